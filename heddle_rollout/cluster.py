"""The engines of a run: starts, stops, failures, samples, and the dispatches of each."""

from collections.abc import Callable, Sequence

from heddle_core.commands import Dispatch, Preempt, StartEngine, StopEngine
from heddle_core.events import EngineFailed, EngineReady, EngineReported, EngineStopped, Event
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.clock import Clock
from heddle_rollout.engines import (
    EngineClient,
    EngineRefusedError,
    EngineSample,
    KvHandle,
    KvPlaced,
    Launcher,
    StepRequest,
    StepResult,
)
from heddle_rollout.migrations import Migrations


class Cluster:
    """Engines by name; implements `EngineListener`. Names are never used twice.

    Reports of an engine after its failure are dropped.
    """

    def __init__(
        self,
        clock: Clock,
        launcher: Launcher,
        *,
        deliver: Callable[[Event], None],
        on_end: Callable[[EngineId, StepResult], None],
        on_salvage: Callable[[TrajectoryId, StepResult | None], bool],
        on_thaw: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_thaw` is called when the first engines have started and time goes on."""
        self.engines: dict[EngineId, EngineClient] = {}
        """Ready engines, stopping ones included."""
        self.last_failure = ""
        """Which engine failed last, and why."""
        self.migrations = Migrations(clock, self.engines, deliver)
        self._clock, self._launcher = clock, launcher
        self._deliver, self._on_end, self._on_salvage = deliver, on_end, on_salvage
        self._on_thaw = on_thaw
        self._starting: dict[EngineId, EngineClient] = {}
        self._stopping: dict[EngineId, None] = {}
        self._recalled: dict[str, None] = {}
        """Names of engines whose owner waits for no step: even those that cannot be resumed are
        aborted, and begin again."""
        self._closing: dict[EngineId, None] = {}
        """Stopping engines that have drained and are about to end."""
        self._running: dict[EngineId, dict[TrajectoryId, bool]] = {}
        """Whether each running step is resumable."""
        self._kept: dict[TrajectoryId, EngineId] = {}
        """Prefill engines that keep the KV of a trajectory until its next dispatch."""
        self._under_way = False
        self._idle: dict[EngineId, None] = {}
        """Engines that were idle at the last sample and since."""
        self._updating: dict[EngineId, int] = {}
        self._on_updated: dict[EngineId, Callable[[], None]] = {}
        """Called when the update of an engine is done; never if the engine ends before."""
        self._weights: tuple[int, str] | None = None
        """Version and path pushed last: engines that become ready later have older weights."""

    @property
    def computes(self) -> bool:
        """Whether any step runs."""
        return any(self._running.values())

    @property
    def busy(self) -> bool:
        """Whether any engine will report something without another command."""
        return bool(
            self._starting
            or self._closing
            or self._updating
            or self.migrations.count
            or self.computes
        )

    @property
    def stopping(self) -> bool:
        """Whether a stop has not been done yet."""
        return bool(self._stopping or self._closing)

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

    def attach(self, spec: EngineSpec) -> None:
        """Take an engine in that others started; the clock goes on until it is ready."""
        self._starting[spec.engine] = self._launcher.start(spec, self)

    def go_on(self) -> None:
        """Let the clock go on while engines start: those that others bring may take any time."""
        self._under_way = True

    def stop(self, command: StopEngine) -> None:
        """Let an engine drain, or abort what runs there; EngineStopped follows."""
        name = command.engine
        if name not in self.engines:
            return  # it died before the command came; EngineFailed was its end
        self._stopping[name] = None
        if not command.drain:
            self.abort_running(name)
        self._stop_if_drained(name)

    def recall(self, name: EngineId) -> None:
        """Let no step hold up the stop of an engine, whatever its present id."""
        self._recalled[name.name] = None

    def dispatch(self, command: Dispatch, request: StepRequest) -> str:
        """Start a step; `on_end` is called when it ends. Returns the reason if it cannot start."""
        name = command.engine
        if self._kept:
            self.let_go(command.trajectory)
        engine = self.engines.get(name)
        if engine is None:
            return ""  # EngineFailed is on its way to the controller, and ends the command
        try:
            engine.start(request)
        except EngineRefusedError as error:
            return str(error)
        self._under_way = True
        self._running[name][command.trajectory] = request.resumable
        if request.rewritten:
            for other, client in self.engines.items():
                if other != name:
                    client.forget(command.trajectory)
        return ""

    def prefills_only(self, name: EngineId) -> bool:
        """Whether another engine decodes what an engine prefills."""
        engine = self.engines.get(name)
        return engine is not None and engine.spec.shape.prefills_only

    def keep(self, trajectory: TrajectoryId, name: EngineId) -> None:
        """An engine keeps the KV of a step that has ended there; see `StepRequest.keep_kv`."""
        self._kept[trajectory] = name

    def let_go(self, trajectory: TrajectoryId) -> None:
        """The KV that is kept of a trajectory is not needed any more, or is elsewhere too."""
        name = self._kept.pop(trajectory, None)
        engine = self.engines.get(name) if name is not None else None
        if engine is not None:
            engine.forget(trajectory)

    def preempt(self, command: Preempt) -> None:
        """Abort a running step; it ends as any other."""
        engine = self.engines.get(command.engine)
        if engine is None or not engine.capabilities.preempt:
            return
        if self._running[command.engine].get(command.trajectory, True):
            engine.abort(command.trajectory)

    def abort_all(self) -> None:
        for name in self._running:
            self.abort_running(name)

    def abort_running(self, name: EngineId) -> None:
        engine = self.engines[name]
        every = name.name in self._recalled
        if engine.capabilities.preempt:
            for trajectory, resumable in list(self._running[name].items()):
                if resumable or every:
                    engine.abort(trajectory)

    def abort(self, trajectory: TrajectoryId) -> None:
        """Abort the running step of a trajectory, if it has one."""
        for name, running in self._running.items():
            if trajectory in running and self.engines[name].capabilities.preempt:
                self.engines[name].abort(trajectory)

    def update_weights(self, version: int, path: str) -> None:
        """Load other weights on every engine, and on each that becomes ready later."""
        self._weights = version, path
        for name in self.engines:
            self._update_weights(name, version, path)

    def update_engine(
        self,
        name: EngineId,
        version: int,
        path: str,
        *,
        keep_kv: bool,
        then: Callable[[], None],
    ) -> None:
        """Load other weights on one engine; engines that become ready later load them too.

        `then` is called when it has them; never if it ends before.
        """
        self._weights = version, path
        if name in self.engines:
            self._on_updated[name] = then
            self._update_weights(name, version, path, keep_kv=keep_kv)

    def sample(self) -> list[tuple[EngineId, EngineSample]]:
        """Read the counters of all engines, once for each time that an engine is idle."""
        samples = []
        for name, engine in self.engines.items():
            if self._running[name]:
                self._idle.pop(name, None)
            elif name in self._idle:
                continue
            else:
                self._idle[name] = None
            samples.append((name, engine.sample()))
        return samples

    def report(self, samples: Sequence[tuple[EngineId, EngineSample]]) -> None:
        """Deliver samples of engines that still run."""
        for name, sample in samples:
            if name in self.engines:
                self._deliver(
                    EngineReported(
                        time_s=self._clock.now_s,
                        engine=name,
                        running=sample.running,
                        waiting=sample.waiting,
                        kv_used_tokens=sample.kv_used_tokens,
                        preemptions=sample.preemptions,
                    )
                )

    # -- reports of engines -----------------------------------------------------------------------

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        client = self._starting.pop(engine, None)
        if client is None:
            return
        self.engines[engine] = client
        self._running[engine] = {}
        if self._weights is not None:
            self._update_weights(engine, *self._weights)
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

    def step_ended(self, engine: EngineId, result: StepResult) -> None:
        running = self._running.get(engine)
        if running is None:
            return
        resumable = running.pop(result.trajectory)
        if not (resumable or result.finished) and engine.name in self._recalled:
            # It was aborted and cannot be resumed: it begins again elsewhere.
            result = StepResult(
                trajectory=result.trajectory, tokens=0, finished=False, queued_s=result.queued_s
            )
        if self._idle and (result.tokens or result.prefill_s > 0.0):
            self._idle.pop(engine, None)
        self._on_end(engine, result)
        if self._stopping and engine in self._stopping:
            self._stop_if_drained(engine)

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        self.migrations.exported(trajectory, kv, move)

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        self.migrations.placed(trajectory, placed, move)

    def weights_updated(self, engine: EngineId, version: int) -> None:
        if self._updating.get(engine) == version:
            del self._updating[engine]
            then = self._on_updated.pop(engine, None)
            if then is not None:
                then()

    def engine_stopped(self, engine: EngineId) -> None:
        if self._closing.pop(engine, 0) is None:
            self._deliver(EngineStopped(time_s=self._clock.now_s, engine=engine))

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        known = (
            self.engines.pop(engine, None) is not None
            or self._starting.pop(engine, None) is not None
            or self._closing.pop(engine, 0) is None
        )
        if not known:
            return
        self.last_failure = f"{engine}: {reason}"
        self._stopping.pop(engine, None)
        running = self._running.get(engine, {})
        self._forget(engine)
        self.migrations.engine_gone(engine)
        resumed: list[tuple[TrajectoryId, int]] = []
        for trajectory, result in salvaged:
            kept = result if running.get(trajectory, True) else None
            if self._on_salvage(trajectory, kept):
                resumed.append((trajectory, kept.tokens if kept is not None else 0))
        self._deliver(
            EngineFailed(
                time_s=self._clock.now_s,
                engine=engine,
                reason=reason,
                salvaged=tuple(resumed),
            )
        )
        self._thaw_if_started()

    # -- inside -----------------------------------------------------------------------------------

    def _update_weights(
        self, name: EngineId, version: int, path: str, *, keep_kv: bool = False
    ) -> None:
        engine = self.engines[name]
        if engine.capabilities.update_weights:
            self._updating[name] = version
            engine.update_weights(version, path, keep_kv=keep_kv)

    def _thaw_if_started(self) -> None:
        if self._clock.frozen and not self._starting:
            self._clock.thaw()
            self._on_thaw()

    def _stop_if_drained(self, name: EngineId) -> None:
        if name in self.engines and not self._running[name]:
            engine = self.engines.pop(name)
            del self._stopping[name]
            self._forget(name)
            self._closing[name] = None
            self.migrations.engine_gone(name)
            engine.stop()

    def _forget(self, name: EngineId) -> None:
        self._running.pop(name, None)
        self._idle.pop(name, None)
        self._updating.pop(name, None)
        self._on_updated.pop(name, None)
