"""Engines that do everything that the contract allows, at the worst moments; seeded."""

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from heddle_core.events import MoveWay
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
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

DELAYS_S = (0.0, 0.0, 1e-9, 0.01, 0.3, 2.0)
WAYS: tuple[MoveWay, ...] = ("kv", "prefill", "none")


class HostileEngine:
    """One engine. `deadly` is the chance that it dies of a call, some moment after it."""

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        rng: Random,
        *,
        deadly: float,
        refuses: float,
        log: list[tuple[EngineId, int]],
    ) -> None:
        self.spec, self.kv_capacity_tokens = spec, 0
        self.capabilities = EngineCapabilities(
            export_kv=rng.random() < 0.8, import_kv=rng.random() < 0.8
        )
        self._listener, self._rng, self._deadly, self._refuses = listener, rng, deadly, refuses
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._running: dict[TrajectoryId, StepRequest] = {}
        self.alive = True
        self._later(self._ready)
        self._may_die()

    def start(self, request: StepRequest) -> None:
        assert self.alive
        assert self.kv_capacity_tokens, "used before it was ready"
        assert request.trajectory not in self._running
        assert request.max_tokens > 0
        if self._rng.random() < self._refuses:
            raise EngineRefusedError("it does not fit")
        self._running[request.trajectory] = request
        self._later(lambda: self._end(request, finished=True))
        self._may_die()

    def abort(self, trajectory: TrajectoryId) -> None:
        request = self._running.get(trajectory)
        if request is not None:
            self._later(lambda: self._end(request, finished=self._rng.random() < 0.2))
        self._may_die()

    def forget(self, trajectory: TrajectoryId) -> None:
        self._may_die()

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        assert self.capabilities.export_kv
        name = self.spec.engine
        if self._rng.random() < 0.1:
            return False
        handle = None
        if self._rng.random() < 0.7:
            size = self._rng.randrange(1, 9)
            handle = KvHandle(
                source=name, trajectory=trajectory, kv_tokens=size, kv_bytes=size, expires_s=1e9
            )
        self._later(lambda: self._listener.kv_exported(name, trajectory, handle, move))
        self._may_die()
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
        placed = KvPlaced(self._rng.choice(WAYS), self._rng.randrange(9))
        self._may_die()
        if self._rng.random() < 0.1:
            return placed
        self._later(lambda: self._listener.kv_placed(self.spec.engine, trajectory, placed, move))
        return None

    def sample(self) -> EngineSample:
        assert self.alive
        return EngineSample(len(self._running), 0, 0, 0)

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        self._log.append((self.spec.engine, version))
        self._later(lambda: self._listener.weights_updated(self.spec.engine, version))
        self._may_die()

    def stop(self) -> None:
        assert not self._running, "stopped with steps running"
        self._may_die()
        # After a stop only its end is reported: earlier requests are lost with it.
        self._loop.call_later(self._delay(), self._stopped)
        self._stopping = True

    def kill(self) -> None:
        self.alive = False

    _stopping = False

    def _delay(self) -> float:
        return self._rng.choice(DELAYS_S)

    def _later(self, report: Callable[[], None]) -> None:
        self._loop.call_later(
            self._delay(), lambda: report() if self.alive and not self._stopping else None
        )

    def _ready(self) -> None:
        self.kv_capacity_tokens = 1_000_000
        self._listener.engine_ready(self.spec.engine, self.kv_capacity_tokens)

    def _stopped(self) -> None:
        if self.alive:
            self.alive = False
            self._listener.engine_stopped(self.spec.engine)

    def _end(self, request: StepRequest, *, finished: bool) -> None:
        if self._running.get(request.trajectory) is not request:
            return
        del self._running[request.trajectory]
        tokens = request.max_tokens if finished else self._rng.randrange(request.max_tokens)
        end = StepResult(trajectory=request.trajectory, tokens=tokens, finished=finished)
        self._listener.step_ended(self.spec.engine, end)

    def _may_die(self) -> None:
        if self._rng.random() < self._deadly:
            self._loop.call_later(self._delay(), self._die)

    def _die(self) -> None:
        if not self.alive:
            return
        self.alive = False
        salvaged = []
        for trajectory, request in self._running.items():
            tokens = self._rng.randrange(request.max_tokens)
            end = StepResult(trajectory=trajectory, tokens=tokens, finished=False)
            salvaged.append((trajectory, end))
        self._listener.engine_failed(self.spec.engine, "hostile", salvaged)


class HostileLauncher:
    def __init__(self, rng: Random, *, deadly: float, refuses: float = 0.0) -> None:
        self._rng, self._deadly, self._refuses = rng, deadly, refuses
        self.engines: list[HostileEngine] = []
        self.updates: list[tuple[EngineId, int]] = []

    def start(self, spec: EngineSpec, listener: EngineListener) -> HostileEngine:
        engine = HostileEngine(
            spec,
            listener,
            self._rng,
            deadly=self._deadly,
            refuses=self._refuses,
            log=self.updates,
        )
        self.engines.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self.engines:
            engine.kill()
