"""Fireworks' window: as many requests in flight as keep the wait for a prefill short."""

from collections.abc import Mapping, Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from heddle_core.events import StepFinished
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, Sticky
from heddle_core.policy import TrajectoryView, View

PER_GPU: Final = 8
"""Requests in flight for each GPU at first, in the recipes of Fireworks' cookbook."""
MOST: Final = 256
NEWEST: Final = 0.3
"""Weight of the newest mean wait in the smoothed one."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RequestWindow(OneByOne):
    """Additive increase, multiplicative decrease of requests in flight over all engines.

    After every `interval` finished steps the mean of what they waited for their prefill, smoothed
    over intervals, is held against `target_s`. Above, the window halves, and in-flight steps drain.
    Below, it grows by `target_s` over that wait, 4 at most. Other steps wait in order of arrival,
    those of started trajectories too. A trajectory stays on its engine.

    Source: fw-ai-external/python-sdk, `training/sdk/concurrency.py` at 4e1d74df, for deployments
    that report `prefill_queue_duration`; fw-ai/cookbook pull request 251.
    """

    review_s: float = 0.0

    def __init__(self, *, target_s: float = 0.5, interval: int = 32) -> None:
        """Set the wait to keep below, and the steps between changes.

        Raises:
            ValueError: a wait that is not above 0, or an interval below 1.
        """
        if not (target_s > 0.0 and interval >= 1):
            raise ValueError("give target_s above 0, and an interval of 1 or more steps")
        self._target_s, self._interval = target_s, interval
        self._window = 0.0
        self._sent_s: dict[TrajectoryId, float] = {}
        """When each step in flight went to its engine."""
        self._waits_s = 0.0
        self._ended = 0
        self._smoothed_s: float | None = None
        self._engines = Sticky()

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine of a step that the window has room for."""
        if not self._window:
            self._window = float(min(PER_GPU * sum(e.shape.gpus for e in view.engines), MOST))
        if t.id not in self._sent_s and len(self._sent_s) >= int(self._window):
            return None
        self._sent_s[t.id] = view.now_s
        return self._engines.place(t, view)

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Sequence[tuple[TrajectoryId, EngineId]]:
        """Send the first that waits if there is room."""
        for t in backlog.values():
            engine = self.place(t, view)
            return [] if engine is None else [(t.id, engine)]
        return []

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Count what it waited at its engine, in Heddle's queue and in the engine's own."""
        sent_s = self._sent_s.pop(t.id, None)
        if sent_s is None:
            return
        self._waits_s += max(t.dispatched_s - sent_s, 0.0) + event.queued_s
        self._ended += 1
        if self._ended == self._interval:
            self._resize(self._waits_s / self._ended)
            self._waits_s, self._ended = 0.0, 0

    def finished(self, t: TrajectoryView) -> None:
        """Free the place of a step that was cancelled."""
        self._sent_s.pop(t.id, None)

    def _resize(self, wait_s: float) -> None:
        last_s = self._smoothed_s
        self._smoothed_s = wait_s if last_s is None else last_s + NEWEST * (wait_s - last_s)
        if self._smoothed_s > self._target_s:
            self._window = max(self._window / 2.0, 1.0)
        else:
            grows = self._target_s / max(self._smoothed_s, self._target_s / 4.0)
            self._window = min(self._window + grows, float(MOST))
