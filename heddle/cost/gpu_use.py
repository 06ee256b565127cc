"""GPU time of engines that come and go, from the events of a run."""

from collections.abc import Mapping

from heddle_core.events import EngineFailed, EngineReady, EngineStopped, Event
from heddle_core.ids import EngineId, EngineShape


class GpuUse:
    """Seconds of GPUs by class, while engines were ready."""

    def __init__(self) -> None:
        self._ready: dict[EngineId, tuple[EngineShape, float]] = {}
        self._used_s: dict[str, float] = {}
        self._now_s = 0.0

    def take(self, event: Event) -> None:
        self._now_s = event.time_s
        match event:
            case EngineReady():
                self._ready[event.engine] = event.shape, event.time_s
            case EngineStopped() | EngineFailed():
                shape, since_s = self._ready.pop(event.engine, (None, 0.0))
                if shape is not None:
                    self._add(self._used_s, shape, event.time_s - since_s)

    @property
    def gpu_s(self) -> Mapping[str, float]:
        """Seconds of GPUs by class until the last event."""
        total = dict(self._used_s)
        for shape, since_s in self._ready.values():
            self._add(total, shape, self._now_s - since_s)
        return total

    def _add(self, total: dict[str, float], shape: EngineShape, seconds: float) -> None:
        total[shape.gpu] = total.get(shape.gpu, 0.0) + shape.gpus * seconds
