"""Which engines should exist, and the starts and stops that bring it about. No trajectories."""

from heddle_core.commands import Command, StartEngine, StopEngine
from heddle_core.ids import EngineId
from heddle_core.plan.problem import EngineSpec, ResourcePlan

MAX_RESTARTS = 3
"""Restarts of one engine's GPUs before they are given up: a card that fails thrice is broken."""


class Fleet:
    """Carries out resource plans: first the stops, then, on the freed GPUs, the starts."""

    def __init__(self) -> None:
        self._running: dict[EngineId, EngineSpec] = {}
        self._starting: dict[EngineId, EngineSpec] = {}
        self._stopping: dict[EngineId, EngineSpec] = {}
        self._after_stops: list[EngineSpec] = []
        self._restarting: dict[EngineId, EngineSpec] = {}

    @property
    def settled(self) -> bool:
        """Whether every engine of the plan has started; restarts of failed ones do not count."""
        return not (self._starting or self._after_stops)

    def change_to(self, plan: ResourcePlan, out: list[Command]) -> list[EngineId]:
        """Begin to carry out `plan`; return the engines that must take no more work."""
        wanted = {spec.engine: spec for spec in plan.engines}
        leaving = [name for name, spec in self._running.items() if wanted.get(name) != spec]
        for name in leaving:
            self._stopping[name] = self._running.pop(name)
            out.append(StopEngine(engine=name, drain=True))
        self._after_stops = [
            spec
            for name, spec in wanted.items()
            if name not in self._running and name not in self._starting
        ]
        self._start(out)
        return leaving

    def ready(self, engine: EngineId) -> None:
        """Note that an engine has started."""
        spec = self._starting.pop(engine, None) or self._restarting.pop(engine, None)
        if spec is not None:
            self._running[engine] = spec

    def stopped(self, engine: EngineId, out: list[Command]) -> None:
        """Note that an engine has drained; its GPUs are free."""
        self._stopping.pop(engine, None)
        self._start(out)

    def failed(self, engine: EngineId, out: list[Command]) -> None:
        """Note that an engine died, at whatever point of its life; restart it if it is wanted."""
        wanted = (
            self._running.pop(engine, None)
            or self._starting.pop(engine, None)
            or self._restarting.pop(engine, None)
        )
        if wanted is not None:
            self._restart(wanted, out)
        else:
            self.stopped(engine, out)

    def _start(self, out: list[Command]) -> None:
        if self._stopping:
            return  # their GPUs are not free yet
        for spec in self._after_stops:
            self._starting[spec.engine] = spec
            out.append(_start_command(spec))
        self._after_stops = []

    def _restart(self, spec: EngineSpec, out: list[Command]) -> None:
        """Start the dead engine's GPUs under a new name: the old one gets no more letters."""
        name, _, restarts = spec.engine.partition("+")
        count = int(restarts or 0) + 1
        if count <= MAX_RESTARTS:
            new = EngineSpec(
                engine=EngineId(f"{name}+{count}"),
                tp=spec.tp,
                gpu=spec.gpu,
                max_running=spec.max_running,
            )
            self._restarting[new.engine] = new
            out.append(_start_command(new))


def _start_command(spec: EngineSpec) -> StartEngine:
    return StartEngine(engine=spec.engine, tp=spec.tp, gpu=spec.gpu, max_running=spec.max_running)
