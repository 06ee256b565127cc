"""The engines of a run: starts, stops, deaths, samples, and what each of them is doing."""

from collections.abc import Callable, Sequence

import msgspec

from heddle_core.commands import Dispatch, Migrate, Preempt, StartEngine, StopEngine
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    EngineReported,
    EngineStopped,
    Event,
)
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_runtime.clock import RunClock
from heddle_runtime.engine import (
    EngineClient,
    EngineRefusedError,
    KvHandle,
    KvPlaced,
    Launcher,
    StepEnd,
    StepRequest,
)
from heddle_runtime.moves import Moves


class Cluster:
    """Engines by name; implements `EngineListener`. Names are never used twice.

    What an engine says after it was reported dead is not passed on.
    """

    def __init__(
        self,
        clock: RunClock,
        launcher: Launcher,
        *,
        deliver: Callable[[Event], None],
        on_end: Callable[[EngineId, StepEnd], None],
        on_salvage: Callable[[StepEnd], object],
        report_interval_s: float,
        report_delay_s: float,
    ) -> None:
        """Samples are delivered `report_delay_s` after they were taken; interval 0: none are."""
        self.engines: dict[EngineId, EngineClient] = {}
        """Those that are ready, stopping ones included."""
        self.last_failure = ""
        """Which engine failed last, and why."""
        self._clock, self._launcher = clock, launcher
        self._deliver, self._on_end, self._on_salvage = deliver, on_end, on_salvage
        self._starting: dict[EngineId, EngineClient] = {}
        self._stopping: dict[EngineId, None] = {}
        self._leaving: dict[EngineId, None] = {}
        """Stopping ones that have drained and were told to end."""
        self._running: dict[EngineId, dict[TrajectoryId, None]] = {}
        self._under_way = False
        self._worked: dict[EngineId, int] = {}
        """Dispatches that an engine has worked on and ended."""
        self._told_idle: dict[EngineId, int] = {}
        """That number when it was last reported idle."""
        self._updating: dict[EngineId, int] = {}
        self._weights: tuple[int, str] | None = None
        """Version and path that were pushed last: engines that get ready later have older ones."""
        self._report_interval_s, self._report_delay_s = report_interval_s, report_delay_s
        self.moves = Moves(clock, self.engines, deliver)
        if report_interval_s > 0:
            clock.call_after(report_interval_s, self._sample)

    @property
    def computes(self) -> bool:
        """Whether any step runs."""
        return any(self._running.values())

    @property
    def busy(self) -> bool:
        """Whether any engine will have something to tell without being asked again."""
        return bool(
            self._starting or self._leaving or self._updating or self.moves.count or self.computes
        )

    # -- commands ---------------------------------------------------------------------------------

    def start(self, command: StartEngine) -> None:
        """Begin to start an engine; EngineReady or EngineFailed follows."""
        if not self._under_way:
            # Frameworks keep engines between rollouts: the clock waits for the first ones.
            self._clock.freeze()
        spec = EngineSpec(
            engine=command.engine, shape=command.shape, max_running=command.max_running
        )
        self._starting[command.engine] = self._launcher.start(spec, self)

    def stop(self, command: StopEngine) -> None:
        """Let an engine drain, or abort what runs there; EngineStopped follows."""
        engine = self.engines.get(command.engine)
        if engine is None:
            return  # it died before the command came; EngineFailed was its end
        self._stopping[command.engine] = None
        if not command.drain:
            for trajectory in list(self._running[command.engine]):
                engine.abort(trajectory)
        self._stop_if_drained(command.engine)

    def dispatch(self, command: Dispatch, request: StepRequest) -> str:
        """Start a step; `on_end` is called when it ends. Returns why not, if it cannot be."""
        engine = self.engines.get(command.engine)
        if engine is None:
            return ""  # EngineFailed is on its way to the controller, and ends the command
        try:
            engine.start(request)
        except EngineRefusedError as error:
            return str(error)
        self._under_way = True
        self._running[command.engine][command.trajectory] = None
        if request.rewritten:
            for name, other in self.engines.items():
                if name != command.engine:
                    other.forget(command.trajectory)
        return ""

    def preempt(self, command: Preempt) -> None:
        """Abort a running step; it ends as any other."""
        engine = self.engines.get(command.engine)
        if engine is not None:
            engine.abort(command.trajectory)

    def migrate(self, command: Migrate, group: GroupId, context_ids: Sequence[int]) -> None:
        """Move a KV prefix; MigrationFinished follows."""
        self.moves.migrate(command, group, context_ids)

    def abort_all(self) -> None:
        """Abort every running step."""
        for name, running in self._running.items():
            for trajectory in list(running):
                self.engines[name].abort(trajectory)

    def update_weights(self, version: int, path: str) -> None:
        """Have every engine load other weights, and those that are not ready yet once they are."""
        self._weights = version, path
        for name, engine in self.engines.items():
            self._updating[name] = version
            engine.update_weights(version, path)

    # -- what engines tell ------------------------------------------------------------------------

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        """See `EngineListener`."""
        client = self._starting.pop(engine, None)
        if client is None:
            return
        self.engines[engine] = client
        self._running[engine] = {}
        self._worked[engine] = 0
        if self._weights is not None:
            self._updating[engine] = self._weights[0]
            client.update_weights(*self._weights)
        self._deliver(
            EngineReady(
                time_s=self._clock.now_s,
                engine=engine,
                shape=client.spec.shape,
                kv_capacity_tokens=kv_capacity_tokens,
                max_running=client.spec.max_running,
            )
        )
        self._thaw_if_started()

    def step_ended(self, engine: EngineId, end: StepEnd) -> None:
        """See `EngineListener`."""
        if engine not in self.engines:
            return
        del self._running[engine][end.trajectory]
        if end.tokens or end.prefill_s > 0.0:
            self._worked[engine] += 1
        self._on_end(engine, end)
        if engine in self._stopping:
            self._stop_if_drained(engine)

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        """See `EngineListener`."""
        self.moves.exported(trajectory, kv, move)

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        """See `EngineListener`."""
        self.moves.placed(trajectory, placed, move)

    def weights_updated(self, engine: EngineId, version: int) -> None:
        """See `EngineListener`."""
        if self._updating.get(engine) == version:
            del self._updating[engine]

    def engine_stopped(self, engine: EngineId) -> None:
        """See `EngineListener`."""
        if self._leaving.pop(engine, 0) is None:
            self._deliver(EngineStopped(time_s=self._clock.now_s, engine=engine))

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepEnd]]
    ) -> None:
        """See `EngineListener`."""
        known = (
            self.engines.pop(engine, None) is not None
            or self._starting.pop(engine, None) is not None
            or self._leaving.pop(engine, 0) is None
        )
        if not known:
            return
        self.last_failure = f"{engine}: {reason}"
        self._stopping.pop(engine, None)
        self._updating.pop(engine, None)
        self._running.pop(engine, None)
        self.moves.engine_gone(engine)
        for _, end in salvaged:
            self._on_salvage(end)
        self._deliver(
            EngineFailed(
                time_s=self._clock.now_s,
                engine=engine,
                reason=reason,
                salvaged=tuple((trajectory, end.tokens) for trajectory, end in salvaged),
            )
        )
        self._thaw_if_started()

    # -- inside -----------------------------------------------------------------------------------

    def _thaw_if_started(self) -> None:
        if self._clock.frozen and not self._starting:
            self._clock.thaw()

    def _stop_if_drained(self, name: EngineId) -> None:
        if name in self.engines and not self._running[name]:
            engine = self.engines.pop(name)
            del self._stopping[name], self._running[name]
            self._updating.pop(name, None)
            self._leaving[name] = None
            self.moves.engine_gone(name)
            engine.stop()

    def _sample(self) -> None:
        time_s = self._clock.now_s + self._report_delay_s
        reports = []
        for name, engine in self.engines.items():
            idle = not self._running[name]
            if idle and self._told_idle.get(name) == self._worked[name]:
                continue  # nothing has run since it was last reported idle
            self._told_idle[name] = self._worked[name] if idle else -1
            sample = engine.sample()
            reports.append(
                EngineReported(
                    time_s=time_s,
                    engine=name,
                    running=sample.running,
                    waiting=sample.waiting,
                    kv_used_tokens=sample.kv_used_tokens,
                    preemptions=sample.preemptions,
                )
            )
        if reports:
            self._clock.call_at(time_s, lambda: self._report(reports))
        self._clock.call_after(self._report_interval_s, self._sample)

    def _report(self, reports: list[EngineReported]) -> None:
        for report in reports:
            if report.engine in self.engines:
                self._deliver(msgspec.structs.replace(report, time_s=self._clock.now_s))
