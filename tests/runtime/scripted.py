"""Engines with scripted outputs, as token ids: live agents without a model."""

import asyncio
from collections.abc import Callable, Sequence

from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import (
    EngineCapabilities,
    EngineListener,
    EngineSample,
    KvHandle,
    KvPlaced,
    StepRequest,
    StepResult,
)

Model = Callable[[StepRequest], Sequence[int]]
"""Returns the generation for a prompt; it is cut at the requested length."""


def end_of(request: StepRequest, ids: Sequence[int], *, finished: bool = True) -> StepResult:
    made = tuple(ids[: request.max_tokens])
    return StepResult(
        trajectory=request.trajectory,
        tokens=len(made),
        finished=finished,
        prefill_s=0.001,
        decode_s=0.001,
        output_ids=made,
    )


class ScriptedEngine:
    def __init__(self, spec: EngineSpec, listener: EngineListener, model: Model) -> None:
        self.spec, self.kv_capacity_tokens = spec, 1_000_000
        self.capabilities = EngineCapabilities()
        self._listener, self._model = listener, model
        self._loop = asyncio.get_running_loop()
        self._running: dict[TrajectoryId, StepRequest] = {}
        self._loop.call_soon(lambda: listener.engine_ready(spec.engine, self.kv_capacity_tokens))

    def start(self, request: StepRequest) -> None:
        self._running[request.trajectory] = request
        self._loop.call_later(0.01, self._finish, request)

    def _finish(self, request: StepRequest) -> None:
        if self._running.get(request.trajectory) is request:
            del self._running[request.trajectory]
            end = end_of(request, self._model(request))
            self._listener.step_ended(self.spec.engine, end)

    def abort(self, trajectory: TrajectoryId) -> None:
        """Keep one token of what would have been said."""
        request = self._running.pop(trajectory, None)
        if request is not None:
            end = end_of(request, self._model(request)[:1], finished=False)
            self._loop.call_soon(self._listener.step_ended, self.spec.engine, end)

    def forget(self, trajectory: TrajectoryId) -> None:
        pass

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        return False

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> None:
        placed = KvPlaced("prefill", len(prompt_ids))
        self._loop.call_soon(self._listener.kv_placed, self.spec.engine, trajectory, placed, move)

    def sample(self) -> EngineSample:
        return EngineSample(len(self._running), 0, 0, 0)

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        self._loop.call_soon(self._listener.weights_updated, self.spec.engine, version)

    def stop(self) -> None:
        self._loop.call_soon(self._listener.engine_stopped, self.spec.engine)

    def kill(self) -> None:
        self._running.clear()


class ScriptedLauncher:
    def __init__(self, model: Model) -> None:
        self._model = model

    def start(self, spec: EngineSpec, listener: EngineListener) -> ScriptedEngine:
        return ScriptedEngine(spec, listener, self._model)

    async def close(self) -> None:
        pass
