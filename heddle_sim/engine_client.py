"""Engines that make no tokens and keep time only: tests, demonstrations, a dress rehearsal.

How long everything takes is told by an `EngineModel`, such as the simulator's engine with any
latency table. This package may not know the simulator: whoever starts a fake run hands it in.
The models live in one SimPy environment, which the run's clock pulls along.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import simpy

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_runtime.clock import RunClock
from heddle_runtime.engine import (
    EngineListener,
    EngineRefusedError,
    EngineSample,
    KvHandle,
    KvPlaced,
    StepEnd,
    StepRequest,
)


class ModelEnd(Protocol):
    """How a model tells the end of a step; the meaning of each value as in `StepEnd`."""

    @property
    def trajectory(self) -> TrajectoryId: ...  # noqa: D102
    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def finished(self) -> bool: ...  # noqa: D102
    @property
    def queued_s(self) -> float: ...  # noqa: D102
    @property
    def prefill_s(self) -> float: ...  # noqa: D102
    @property
    def decode_s(self) -> float: ...  # noqa: D102
    @property
    def cached_tokens(self) -> int: ...  # noqa: D102
    @property
    def recomputes(self) -> int: ...  # noqa: D102


class EngineModel(Protocol):
    """An engine in the time of a SimPy environment; `heddle_sim.engine.SimEngine` is one."""

    @property
    def kv_capacity_tokens(self) -> int: ...  # noqa: D102
    @property
    def kv_bytes_per_token(self) -> int: ...  # noqa: D102
    @property
    def running(self) -> int: ...  # noqa: D102
    @property
    def waiting(self) -> int: ...  # noqa: D102
    @property
    def kv_used_tokens(self) -> int: ...  # noqa: D102
    @property
    def preemptions(self) -> int: ...  # noqa: D102

    def start(  # noqa: D102
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        *,
        prompt_tokens: int,
        shared_tokens: int,
        output_tokens: int,
    ) -> None: ...
    def abort(self, trajectory: TrajectoryId) -> None: ...  # noqa: D102
    def release(self, trajectory: TrajectoryId) -> None: ...  # noqa: D102
    def export_kv(self, trajectory: TrajectoryId) -> int: ...  # noqa: D102
    def import_kv(self, trajectory: TrajectoryId, group: GroupId, tokens: int) -> int: ...  # noqa: D102
    def flush_kv(self) -> None: ...  # noqa: D102
    def fail(self) -> Sequence[tuple[TrajectoryId, int]]: ...  # noqa: D102


MakeModel: TypeAlias = Callable[
    [simpy.Environment, EngineSpec, Callable[[ModelEnd], None]], EngineModel
]
"""Makes the model of an engine; the callable is told each step's end."""


class _PulledEnvironment(simpy.Environment):
    """Simulated time that somebody else's clock moves on between events."""

    def advance(self, time_s: float) -> None:
        """Let it be `time_s`, or as late as the next event allows."""
        self._now = max(self._now, min(time_s, self.peek()))


class _World:
    """A SimPy environment whose time is the run clock's."""

    def __init__(self, clock: RunClock) -> None:
        self.clock = clock
        self.env = _PulledEnvironment()
        self._armed_s: float | None = None
        self._stepping = False

    def present(self) -> None:
        """Bring the environment's time up to now, or to what is overdue if the clock is late.

        Not in the middle of an event, which happens at its own moment however late it is called.
        """
        if not self._stepping:
            self.env.advance(self.clock.now_s)

    def arm(self) -> None:
        """Have the clock call when the environment's next event is due."""
        due_s = self.env.peek()
        if due_s != float("inf") and (self._armed_s is None or due_s < self._armed_s):
            self._armed_s = due_s
            self.clock.call_at(due_s, partial(self._ring, due_s))

    def _ring(self, due_s: float) -> None:
        if due_s == self._armed_s:
            self._armed_s = None
        self._stepping = True
        try:
            while self.env.peek() <= self.clock.now_s:
                self.env.step()
        finally:
            self._stepping = False
        self.arm()


class FakeEngine:
    """One engine; implements `EngineClient`."""

    def __init__(
        self, spec: EngineSpec, listener: EngineListener, world: _World, transfer: "Transfer"
    ) -> None:
        self._spec, self._listener, self._world, self._transfer = spec, listener, world, transfer
        self.model: EngineModel | None = None
        """None before it is ready and after it is gone."""
        self._here: dict[TrajectoryId, None] = {}

    @property
    def spec(self) -> EngineSpec:
        """What was asked for."""
        return self._spec

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that it holds; 0 until it is ready."""
        return self.model.kv_capacity_tokens if self.model is not None else 0

    def begin(self, make: MakeModel) -> None:
        """Become ready."""
        self._world.present()
        self.model = make(self._world.env, self._spec, self._step_ended)
        self._listener.engine_ready(self._spec.engine, self.model.kv_capacity_tokens)

    def start(self, request: StepRequest) -> None:
        """Run a step; see `EngineClient.start`."""
        if request.trajectory in self._here:
            raise EngineRefusedError(
                f"engine {self._spec.engine}: {request.trajectory} has a step here already"
            )
        model = self._alive()
        try:
            model.start(
                request.trajectory,
                request.group,
                prompt_tokens=request.prompt_tokens,
                shared_tokens=request.shared_tokens,
                output_tokens=request.max_tokens,
            )
        except ValueError as error:
            raise EngineRefusedError(str(error)) from None
        self._here[request.trajectory] = None
        self._world.arm()

    def abort(self, trajectory: TrajectoryId) -> None:
        """End a step early; see `EngineClient.abort`."""
        if self.model is not None:
            self._alive().abort(trajectory)
            self._world.arm()

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop a trajectory's cached KV."""
        if self.model is not None:
            self._alive().release(trajectory)
            self._world.arm()

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> None:
        """Answer what KV there is; it is there as long as the engine lives."""
        model = self._alive()
        tokens = model.export_kv(trajectory)
        handle = KvHandle(
            source=self._spec.engine,
            trajectory=trajectory,
            kv_tokens=tokens,
            kv_bytes=tokens * model.kv_bytes_per_token,
            expires_s=float("inf"),
            params={"engine": self},
        )
        self._soon(
            lambda: self._listener.kv_exported(
                self._spec.engine, trajectory, handle if tokens else None, move
            )
        )

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> None:
        """Place KV here once its transfer is over, if its source is still there then."""
        delay_s = self._transfer(kv.kv_bytes) if kv is not None else 0.0
        self._world.clock.call_after(delay_s, partial(self._arrived, trajectory, group, kv, move))

    def sample(self) -> EngineSample:
        """Return the counters of this moment."""
        model = self._alive()
        return EngineSample(model.running, model.waiting, model.kv_used_tokens, model.preemptions)

    def update_weights(self, version: int, path: str) -> None:
        """Void all KV."""
        self._alive().flush_kv()
        self._world.arm()
        self._soon(lambda: self._listener.weights_updated(self._spec.engine, version))

    def stop(self) -> None:
        """End the engine."""
        self.model = None
        self._soon(lambda: self._listener.engine_stopped(self._spec.engine), even_dead=True)

    def kill(self) -> None:
        """End the engine, telling nobody."""
        self.die()

    def die(self) -> list[StepEnd]:
        """Fail now; return every step whose end was not told, with the tokens it had made."""
        if self.model is None:
            return []
        lost = self._alive().fail()
        self.model = None
        return [StepEnd(t, tokens, False, 0.0, 0.0, 0.0, 0, 0) for t, tokens in lost]

    def _alive(self) -> EngineModel:
        if self.model is None:
            raise EngineRefusedError(f"engine {self._spec.engine} is not there")
        self._world.present()
        return self.model

    def _soon(self, tell: Callable[[], None], *, even_dead: bool = False) -> None:
        self._world.clock.call_after(0.0, lambda: tell() if even_dead or self.model else None)

    def _step_ended(self, end: ModelEnd) -> None:
        del self._here[end.trajectory]
        self._listener.step_ended(
            self._spec.engine,
            StepEnd(
                end.trajectory,
                end.tokens,
                end.finished,
                end.queued_s,
                end.prefill_s,
                end.decode_s,
                end.cached_tokens,
                end.recomputes,
            ),
        )

    def _arrived(
        self, trajectory: TrajectoryId, group: GroupId, kv: KvHandle | None, move: int
    ) -> None:
        if self.model is None:
            return
        placed = KvPlaced("none", 0)
        if kv is not None and kv.params["engine"].model is not None:
            placed = KvPlaced("kv", self._alive().import_kv(trajectory, group, kv.kv_tokens))
            self._world.arm()
        self._listener.kv_placed(self._spec.engine, trajectory, placed, move)


Transfer: TypeAlias = Callable[[int], float]
"""Seconds that bytes of KV take from one engine to another."""


class FakeLauncher:
    """Starts fake engines; implements `Launcher`."""

    def __init__(
        self,
        clock: RunClock,
        make: MakeModel,
        *,
        transfer: Transfer,
        start_s: float = 0.0,
        faults: Sequence[tuple[float, EngineId]] = (),
    ) -> None:
        """Engines take `start_s` to start unless the clock stands still for them.

        `faults` are (time_s, engine that dies then).
        """
        self._clock, self._make, self._transfer, self._start_s = clock, make, transfer, start_s
        self._world = _World(clock)
        self._engines: dict[EngineId, tuple[FakeEngine, EngineListener]] = {}
        for time_s, name in faults:
            clock.call_at(time_s, partial(self._fail, name))

    def start(self, spec: EngineSpec, listener: EngineListener) -> FakeEngine:
        """Begin to start an engine."""
        engine = FakeEngine(spec, listener, self._world, self._transfer)
        self._engines[spec.engine] = engine, listener
        delay_s = 0.0 if self._clock.frozen else self._start_s
        self._clock.call_after(delay_s, partial(engine.begin, self._make))
        return engine

    async def close(self) -> None:
        """Nothing is left behind by engines that are not there."""

    def _fail(self, name: EngineId) -> None:
        engine, listener = self._engines.pop(name, (None, None))
        if engine is not None and listener is not None and engine.model is not None:
            lost = engine.die()
            listener.engine_failed(name, "injected fault", [(e.trajectory, e) for e in lost])
