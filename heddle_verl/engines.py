"""verl's engines as a driver sees them: a dispatch lets the client call, a report ends it.

The client calls the engine itself. Where it counts its tokens (`counts`), a step can be preempted;
elsewhere the output of a step is estimated from the time that it took.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any

from heddle_core.estimate.cost import StepCost
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
from heddle_verl.steps import EngineCall, Grant

Abort = Callable[[Any, str], Awaitable[bool]]
"""Aborts a request of the engine with this handle; returns whether the engine knew it."""

ABORT_AGAIN_S = 0.2
"""Seconds until an abort is repeated: the request may not have reached the engine yet."""


class DecodeClock:
    """Tokens that a step makes on an engine, estimated by the time that it runs."""

    def __init__(self, cost: StepCost, now: Callable[[], float]) -> None:
        self._cost, self._now = cost, now
        self._made = 0.0
        """Tokens of a step that has run since the beginning."""
        self._since_s = now()
        self._steps: dict[TrajectoryId, tuple[float, int, int]] = {}
        """Tokens made before each running step, its context, and its limit."""
        self._context_tokens = 0

    def begin(self, request: StepRequest) -> None:
        self._advance()
        prefill_s = self._cost.prefill_s * (request.prompt_tokens - request.shared_tokens)
        before = self._made + prefill_s / self._iteration_s(1, request.prompt_tokens)
        self._steps[request.trajectory] = before, request.prompt_tokens, request.max_tokens
        self._context_tokens += request.prompt_tokens

    def end(self, trajectory: TrajectoryId) -> int:
        """A step has ended; returns its tokens."""
        self._advance()
        before, context_tokens, limit = self._steps.pop(trajectory)
        self._context_tokens -= context_tokens
        return min(max(1, round(self._made - before)), limit)

    def _advance(self) -> None:
        now_s = self._now()
        if self._steps:
            self._made += (now_s - self._since_s) / self._iteration_s(0, 0)
        self._since_s = now_s

    def _iteration_s(self, more: int, context_tokens: int) -> float:
        return self._cost.iteration_s(
            len(self._steps) + more, self._context_tokens + context_tokens
        )


class FrameworkEngine:
    """An engine that verl owns; implements `EngineClient`."""

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        handle: Any,
        address: str,
        *,
        kv_tokens: int,
        clock: DecodeClock,
        priority: Callable[[TrajectoryId], int],
        abort: Abort | None,
    ) -> None:
        """Without `abort` steps run to their ends, and their tokens are estimated."""
        self.spec = spec
        self.kv_capacity_tokens = kv_tokens
        self.handle, self.address = handle, address
        self.capabilities = EngineCapabilities(
            export_kv=False, import_kv=False, preempt=abort is not None, update_weights=False
        )
        self.removed = False
        """Whether verl has taken it away; its running steps end early."""
        self._listener, self._clock, self._priority = listener, clock, priority
        self._abort = abort
        self._running: dict[TrajectoryId, EngineCall] = {}
        self._parked: dict[TrajectoryId, EngineCall] = {}
        """Dispatches that were not granted: the engine was leaving, or dispatch was paused."""
        self._aborting: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._salvaged: list[tuple[TrajectoryId, StepResult]] = []
        self._numbers: Iterator[int] = count()
        self.paused = False

    @property
    def in_flight(self) -> int:
        """Steps that clients have been let run here and have not ended."""
        return len(self._running)

    # -- calls of the driver ----------------------------------------------------------------------

    def start(self, request: StepRequest) -> None:
        """Let the client call this engine."""
        trajectory, call = request.trajectory, request.payload
        if trajectory in self._running or trajectory in self._parked:
            raise EngineRefusedError(f"{trajectory} has a step on {self.spec.engine} already")
        if call.released:
            # The client ended it while the driver looked for another engine.
            self._parked[trajectory] = call
            asyncio.get_running_loop().call_soon(self._end_parked, trajectory, True)
        elif self.removed or self.paused:
            self._parked[trajectory] = call
        else:
            self._grant(request, call)

    def _grant(self, request: StepRequest, call: EngineCall) -> None:
        trajectory = request.trajectory
        self._running[trajectory] = call
        call.engine = self
        self._clock.begin(request)
        grant = call.granted
        if grant is None:
            grant = Grant(
                self.address,
                self.handle,
                f"{trajectory}.{self.spec.engine}.{next(self._numbers)}",
                self._priority(trajectory),
                call.session.kept_tokens,
            )
        call.grant(grant)

    def resume(self) -> None:
        """Grant what was parked."""
        self.paused = False
        for trajectory, call in list(self._parked.items()):
            if call.released:
                self._end_parked(trajectory, finished=True)
            else:
                del self._parked[trajectory]
                self._grant(call.session.request(), call)

    def abort(self, trajectory: TrajectoryId) -> None:
        """End a step early: its engine returns the tokens so far to the client, which reports."""
        parked = self._parked.get(trajectory)
        if parked is not None:
            asyncio.get_running_loop().call_soon(self._end_parked, trajectory, False)
            return
        call = self._running.get(trajectory)
        if self._abort is None or call is None or trajectory in self._aborting:
            return
        self._aborting[trajectory] = asyncio.ensure_future(self._abort_until_ended(call))

    def _end_parked(self, trajectory: TrajectoryId, finished: bool) -> None:
        if self._parked.pop(trajectory, None) is not None:
            result = StepResult(trajectory=trajectory, tokens=0, finished=finished)
            self._listener.step_ended(self.spec.engine, result)

    async def _abort_until_ended(self, call: EngineCall) -> None:
        assert self._abort is not None
        trajectory, grant = call.session.id, call.granted
        while grant is not None and self._running.get(trajectory) is call:
            if call.granted is not grant:
                return
            try:
                known = await self._abort(self.handle, grant.request_id)
            except Exception:
                return  # the engine is dead: its client reports that
            await asyncio.sleep(ABORT_AGAIN_S if not known else 5.0)

    def aborted_by_us(self, trajectory: TrajectoryId) -> bool:
        """Whether a step that its engine aborted is to go on elsewhere."""
        return self.removed or trajectory in self._aborting

    # -- reports of the client --------------------------------------------------------------------

    def ended(
        self, trajectory: TrajectoryId, *, tokens: int | None, finished: bool, error: str = ""
    ) -> None:
        """A dispatch has ended; `tokens` None: they are estimated."""
        call = self._running.pop(trajectory, None)
        if call is None:
            return
        call.engine = None
        estimate = self._clock.end(trajectory)
        task = self._aborting.pop(trajectory, None)
        if task is not None:
            task.cancel()
        result = StepResult(
            trajectory=trajectory,
            tokens=estimate if tokens is None else tokens,
            finished=finished,
            error=error,
        )
        if not finished:
            call.withdraw()
        if self.removed and not finished:
            self._salvaged.append((trajectory, result))
        else:
            self._listener.step_ended(self.spec.engine, result)
        if self.removed and not self._running:
            self._gone("verl took it away")

    def remove(self) -> None:
        """verl takes it away: running steps end early, and the engine fails then."""
        self.removed = True
        if self._abort is None or not self._running:
            self._gone("verl took it away")
            return
        for trajectory in list(self._running):
            self.abort(trajectory)

    def died(self, reason: str) -> None:
        """Its process has ended: nothing of its steps is left but what clients have."""
        for call in self._running.values():
            call.withdraw()
        self._gone(reason)

    def _gone(self, reason: str) -> None:
        for call in self._running.values():
            call.engine = None
        lost = [*self._running, *self._parked]
        salvaged = [
            *self._salvaged,
            *((t, StepResult(trajectory=t, tokens=0, finished=False)) for t in lost),
        ]
        for task in self._aborting.values():
            task.cancel()
        self._running, self._parked, self._aborting, self._salvaged = {}, {}, {}, []
        self._listener.engine_failed(self.spec.engine, reason, salvaged)

    # -- what verl's engines do not offer a router ------------------------------------------------

    def forget(self, trajectory: TrajectoryId) -> None:
        """Leave it to the engine's prefix cache."""

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        """Export nothing."""
        return False

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> KvPlaced | None:
        """Import nothing: the next step prefills."""
        return KvPlaced("none", 0)

    def sample(self) -> EngineSample:
        """Its steps; its KV is unknown."""
        return EngineSample(len(self._running), 0, 0, 0)

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        """Leave it to verl."""

    def stop(self) -> None:
        """Leave it running: it is verl's."""
        self._listener.engine_stopped(self.spec.engine)

    def kill(self) -> None:
        """Leave it running: it is verl's."""


class FrameworkLauncher:
    """Takes engines of verl in under the names of the driver; implements `Launcher`."""

    def __init__(
        self,
        cost: StepCost,
        now: Callable[[], float],
        *,
        kv_tokens: int,
        priority: Callable[[TrajectoryId], int],
        abort: Abort | None,
    ) -> None:
        self._cost, self._now, self._kv_tokens = cost, now, kv_tokens
        self._priority, self._abort = priority, abort
        self._given: dict[EngineId, tuple[str, Any]] = {}
        self.engines: dict[str, FrameworkEngine] = {}
        """Engines by verl's names."""

    def give(self, engine: EngineId, address: str, handle: Any) -> None:
        """Name the engine of verl that the driver is about to attach."""
        self._given[engine] = address, handle

    def start(self, spec: EngineSpec, listener: EngineListener) -> FrameworkEngine:
        """Take an engine in, which runs already."""
        address, handle = self._given.pop(spec.engine)
        # SGLang's engines have no such call.
        abort = self._abort if getattr(handle, "abort_request", None) is not None else None
        engine = self.engines[address] = FrameworkEngine(
            spec,
            listener,
            handle,
            address,
            kv_tokens=self._kv_tokens,
            clock=DecodeClock(self._cost, self._now),
            priority=self._priority,
            abort=abort,
        )
        asyncio.get_running_loop().call_soon(listener.engine_ready, spec.engine, self._kv_tokens)
        return engine

    async def close(self) -> None:
        """End nothing: the engines are verl's."""
        self.engines.clear()
