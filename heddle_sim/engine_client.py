"""Simulated engines behind the driver's interface: for simulations, dry runs and tests.

They make no tokens and keep time only: the simulation's own, or one that follows the clock of the
event loop.
"""

from collections.abc import Callable, Sequence
from functools import partial

from heddle_core.defaults import SPARE_SLOTS
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.clock import Clock
from heddle_rollout.engines import (
    EngineCapabilities,
    EngineListener,
    EngineRefusedError,
    EngineSample,
    KvHandle,
    KvPlaced,
    StepRequest,
    StepResult,
)
from heddle_sim.calendar import Calendar
from heddle_sim.clock import FollowingClock
from heddle_sim.config import SimulationConfig
from heddle_sim.drafts import Samples
from heddle_sim.engine import SimEngine
from heddle_sim.host_kv import HostKv, HostLink


class SimEngineClient:
    """One simulated engine; implements `EngineClient`. Made by `SimLauncher`."""

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        config: SimulationConfig,
        clock: Clock,
        engine_clock: Clock,
        follow: Callable[[], None],
        shared_kv: HostKv | None = None,
        samples: Samples | None = None,
    ) -> None:
        self._samples = samples
        self._spec, self._listener, self._config = spec, listener, config
        self._shared_kv = shared_kv
        self._clock, self._engine_clock, self._follow = clock, engine_clock, follow
        self._capabilities = EngineCapabilities(import_kv=config.moves_by == "kv")
        self._model: SimEngine | None = None
        self._busy_s = 0.0
        """In iterations, once the engine has ended."""
        """None before it is ready and after its end."""
        self._prefills: dict[TrajectoryId, int] = {}
        """Moves that are a prefill here, by trajectory."""

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @property
    def capabilities(self) -> EngineCapabilities:
        """KV import only where migrations move KV."""
        return self._capabilities

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that it holds; 0 until it is ready."""
        return self._model.table.kv_capacity_tokens if self._model is not None else 0

    @property
    def alive(self) -> bool:
        """Whether it is ready and has not ended."""
        return self._model is not None

    def begin(self) -> None:
        self._follow()
        config, spec = self._config, self._spec
        table = config.table(spec.shape)
        moves_kv = config.moves_by == "kv"
        slots = spec.max_running + (0 if moves_kv else SPARE_SLOTS)
        block_bytes = config.block_size * table.kv_bytes_per_token
        store, host_kv, host = self._shared_kv, config.host_kv, None
        if host_kv is not None:
            store = store or HostKv(host_kv.blocks(spec.shape.gpus, block_bytes))
            s_per_block = block_bytes / (spec.shape.gpus * host_kv.gpu_bytes_per_s)
            host = HostLink(store, host_kv.fixed_s, s_per_block)
        self._model = SimEngine(
            self._engine_clock,
            spec.engine,
            table,
            max_running=slots,
            max_batched_tokens=config.max_batched_tokens,
            block_size=config.block_size,
            prefix_caching=config.prefix_caching,
            prefill_first=config.prefill_first,
            on_end=partial(
                self._listener.step_ended if moves_kv else self._step_ended, spec.engine
            ),
            speed=config.speed(spec.engine),
            arrival_s=config.dispatch_s,
            host=host,
            samples=self._samples,
        )
        self._listener.engine_ready(spec.engine, self.kv_capacity_tokens)

    def start(self, request: StepRequest) -> None:
        model = self._model
        if model is None:
            raise EngineRefusedError(f"engine {self._spec.engine} is not there")
        self._follow()
        model.start(
            request.trajectory,
            request.group,
            prompt_tokens=request.prompt_tokens,
            shared_tokens=request.shared_tokens,
            output_tokens=request.max_tokens,
            keep_kv=request.keep_kv,
        )

    def abort(self, trajectory: TrajectoryId) -> None:
        if self._model is not None:
            self._alive().abort(trajectory)

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop a trajectory's cached KV, or keep it as a cache only."""
        if self._model is not None:
            self._alive().release(trajectory)

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        """Report the KV that is here; it stays until the engine ends."""
        model, name = self._alive(), self._spec.engine
        tokens = model.export_kv(trajectory)
        if not tokens:
            return False
        handle = KvHandle(
            source=name,
            trajectory=trajectory,
            kv_tokens=tokens,
            kv_bytes=tokens * model.kv_bytes_per_token,
            expires_s=float("inf"),
            params={"engine": self},
        )
        self._answer_soon(self._listener.kv_exported, name, trajectory, handle, move)
        return True

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> KvPlaced | None:
        """Place KV here once its transfer is over, if its source still runs then.

        An engine without KV import prefills the context and drops the one token that it makes.
        """
        model = self._alive()
        if kv is not None and self._capabilities.import_kv:
            # A prefix that is here already is not copied again.
            missing = max(kv.kv_tokens - model.export_kv(trajectory), 0)
            roles = {self._spec.shape.role, kv.params["engine"].spec.shape.role}
            seconds = self._config.transfer_s
            if "prefill" in roles:
                seconds = self._config.handover_s
            delay_s = seconds(missing * model.kv_bytes_per_token)
            self._clock.call_after(delay_s, self._arrived, group, kv, move)
        elif kv is not None and kv.kv_tokens < model.kv_capacity_tokens:
            self._prefills[trajectory] = move
            model.start(
                trajectory,
                group,
                prompt_tokens=kv.kv_tokens,
                shared_tokens=kv.kv_tokens,
                output_tokens=1,
            )
        else:
            tokens = model.import_kv(trajectory, group, 0)
            return KvPlaced("kv" if tokens or kv is not None else "none", tokens)
        return None

    def sample(self) -> EngineSample:
        model = self._alive()
        return EngineSample(model.running, model.waiting, model.kv_used_tokens, model.preemptions)

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        """Void all KV, unless it is kept."""
        if not keep_kv:
            self._alive().flush_kv()
        self._answer_soon(self._listener.weights_updated, self._spec.engine, version)

    def pause(self) -> None:
        """Begin no iteration until `resume`; nothing if the engine is not there."""
        if self._model is not None:
            self._alive().pause()

    def take_weights(self, version: int) -> None:
        if self._model is not None:
            self._alive().take_weights(version)

    def resume(self) -> None:
        if self._model is not None:
            self._alive().resume()

    def flush_kv(self) -> None:
        if self._model is not None:
            self._alive().flush_kv()

    @property
    def busy_gpu_s(self) -> float:
        """GPU-seconds in iterations so far, over its whole life."""
        busy_s = self._model.busy_s if self._model is not None else self._busy_s
        return busy_s * self._spec.shape.gpus

    def stop(self) -> None:
        self.die()
        self._clock.call_after(0.0, self._listener.engine_stopped, self._spec.engine)

    def kill(self) -> None:
        """End the engine without a report."""
        self.die()

    def die(self) -> list[tuple[TrajectoryId, StepResult]]:
        """Fail now; return every step whose end was not reported, with the tokens it had made."""
        if self._model is None:
            return []
        made = self._alive().fail()
        self._busy_s = self._model.busy_s
        self._model = None
        return [
            (t, StepResult(trajectory=t, tokens=tokens, finished=False))
            for t, tokens in made
            if t not in self._prefills
        ]

    def _alive(self) -> SimEngine:
        if self._model is None:
            raise EngineRefusedError(f"engine {self._spec.engine} is not there")
        self._follow()
        return self._model

    def _answer_soon(self, report: Callable[..., None], *args: object) -> None:
        self._clock.call_after(0.0, self._answer, report, args)

    def _answer(self, report: Callable[..., None], args: tuple[object, ...]) -> None:
        if self._model is not None:
            report(*args)

    def _step_ended(self, name: EngineId, result: StepResult) -> None:
        """Report a step, or the result of a move that was a prefill."""
        move = self._prefills.pop(result.trajectory, None)
        if move is None:
            self._listener.step_ended(name, result)
            return
        placed = KvPlaced("none", 0)
        if result.finished:
            placed = KvPlaced("prefill", self._alive().export_kv(result.trajectory))
        self._listener.kv_placed(name, result.trajectory, placed, move)

    def _arrived(self, group: GroupId, kv: KvHandle, move: int) -> None:
        if self._model is None:
            return
        placed = KvPlaced("none", 0)
        if kv.params["engine"].alive:
            tokens = self._alive().import_kv(kv.trajectory, group, kv.kv_tokens)
            placed = KvPlaced("kv", tokens)
        self._listener.kv_placed(self._spec.engine, kv.trajectory, placed, move)


class SimLauncher:
    """Starts simulated engines; implements `Launcher`."""

    def __init__(
        self, config: SimulationConfig, clock: Clock, *, loaded: str | None = None
    ) -> None:
        """The engines' simulated time is `clock`, or follows it if that is no calendar.

        Engines whose names begin with `loaded` are in memory already and start at once.
        """
        self._config, self._clock, self._loaded = config, clock, loaded
        self._engine_clock: Clock = clock
        self._follow: Callable[[], None] = _already_there
        if not isinstance(clock, Calendar):
            self._engine_clock = following = FollowingClock(clock)
            self._follow = following.follow
        self._engines: dict[EngineId, tuple[SimEngineClient, EngineListener]] = {}
        self._shared_kv: HostKv | None = None
        self._samples = Samples()
        self._ended_gpu_s = 0.0
        """GPU-seconds in iterations of failed engines."""

    def start(self, spec: EngineSpec, listener: EngineListener) -> SimEngineClient:
        """Begin to start an engine; it takes no time while the clock is frozen."""
        engine = SimEngineClient(
            spec,
            listener,
            self._config,
            self._clock,
            self._engine_clock,
            self._follow,
            self._shared_store(spec),
            self._samples,
        )
        self._engines[spec.engine] = engine, listener
        loaded = self._loaded is not None and spec.engine.startswith(self._loaded)
        at_once = loaded or self._clock.frozen
        delay_s = 0.0 if at_once else self._config.start_s(spec.shape)
        self._clock.call_after(delay_s, engine.begin)
        return engine

    def _shared_store(self, spec: EngineSpec) -> HostKv | None:
        """The host memory that all engines share, made for the first of them."""
        config = self._config
        host_kv = config.host_kv
        if host_kv is None or host_kv.scope != "cluster":
            return None
        if self._shared_kv is None:
            table = config.table(spec.shape)
            block_bytes = config.block_size * table.kv_bytes_per_token
            self._shared_kv = HostKv(host_kv.blocks(spec.shape.gpus, block_bytes))
        return self._shared_kv

    @property
    def busy_gpu_s(self) -> float:
        """GPU-seconds in iterations of all engines so far."""
        return self._ended_gpu_s + sum(e.busy_gpu_s for e, _ in self._engines.values())

    def engine(self, name: EngineId) -> SimEngineClient | None:
        """Return an engine that was started and has not failed."""
        found = self._engines.get(name)
        return found[0] if found is not None and found[0].alive else None

    def schedule_faults(self) -> None:
        """Schedule the failures of the configuration; each applies if its engine runs then."""
        for time_s, name in self._config.faults:
            self._clock.call_at(time_s, self.fail, name)

    def fail(self, name: EngineId) -> None:
        """Fail an engine now, if it runs."""
        engine, listener = self._engines.get(name, (None, None))
        if engine is not None and listener is not None and engine.alive:
            del self._engines[name]
            salvaged = engine.die()
            self._ended_gpu_s += engine.busy_gpu_s
            listener.engine_failed(name, "injected fault", salvaged)

    async def close(self) -> None:
        """Do nothing: simulated engines leave nothing behind."""


def _already_there() -> None:
    """Do nothing: the engines' time is the clock's."""
