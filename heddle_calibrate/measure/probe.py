"""Timed calls on engines: each sends one request to an engine and awaits its answer.

Engines are used through `EngineClient` and `Launcher` only, real and simulated ones alike.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import (
    EngineClient,
    KvHandle,
    KvPlaced,
    Launcher,
    StepRequest,
    StepResult,
)

T = TypeVar("T")

ANSWER_TIMEOUT_S = 600.0
"""Longest wait for an engine's answer: longer than any start takes."""


class MeasureError(RuntimeError):
    """An engine failed or did not answer; the message names the engine and the request."""


class StepSample(NamedTuple):
    """The end of a step, with the event loop's clock at its request and at the report."""

    sent_s: float
    reported_s: float
    end: StepResult

    @property
    def first_token_s(self) -> float:
        """Event loop's clock at the first token."""
        return self.sent_s + self.end.queued_s + self.end.prefill_s

    @property
    def last_token_s(self) -> float:
        """Event loop's clock at the last token."""
        return self.first_token_s + self.end.decode_s


class EngineProbe:
    """Engines under measurement; implements `EngineListener`."""

    def __init__(self, launcher: Launcher, *, gpu: str, max_running: int) -> None:
        self._launcher, self._gpu, self._max_running = launcher, gpu, max_running
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[tuple[EngineId, str, str], asyncio.Future[Any]] = {}
        """Keys: engine, kind of answer, trajectory."""
        self._numbers = count()

    # -- requests ----------------------------------------------------------------------------------

    async def start(self, tp: int) -> tuple[EngineClient, float]:
        """Start an engine; returns it once it is ready, and the seconds that it took."""
        name = EngineId(f"m{next(self._numbers)}")
        spec = EngineSpec(
            engine=name, shape=EngineShape(self._gpu, tp), max_running=self._max_running
        )
        sent_s = self._loop.time()
        answer = self._expect(name, "ready")
        client = self._launcher.start(spec, self)
        await self._wait(answer, f"engine {name} to start at TP {tp}")
        return client, self._loop.time() - sent_s

    async def stop(self, client: EngineClient) -> float:
        """Stop an idle engine; returns the seconds that it took."""
        name = client.spec.engine
        sent_s = self._loop.time()
        answer = self._expect(name, "stopped")
        client.stop()
        await self._wait(answer, f"engine {name} to stop")
        return self._loop.time() - sent_s

    def begin(self, client: EngineClient, request: StepRequest) -> Awaitable[StepSample]:
        """Start a step now; the returned awaitable gives its end."""
        name, sent_s = client.spec.engine, self._loop.time()
        answer = self._expect(name, "end", request.trajectory)
        client.start(request)

        async def sample() -> StepSample:
            reported_s, end = await self._wait(answer, f"a step on engine {name} to end")
            if end.error:
                raise MeasureError(f"engine {name} could not run a step: {end.error}")
            return StepSample(sent_s, reported_s, end)

        return sample()

    async def step(self, client: EngineClient, request: StepRequest) -> StepSample:
        return await self.begin(client, request)

    async def export(
        self, client: EngineClient, trajectory: TrajectoryId, prompt_ids: Sequence[int]
    ) -> tuple[KvHandle | None, float]:
        """Export the KV of a context; returns its handle, None without one, and the seconds."""
        sent_s = self._loop.time()
        answer = self._expect(client.spec.engine, "exported", trajectory)
        if not client.export_kv(trajectory, prompt_ids):
            return None, self._loop.time() - sent_s
        kv: KvHandle | None = await self._wait(answer, f"{client.spec.engine} to export KV")
        return kv, self._loop.time() - sent_s

    async def place(
        self,
        client: EngineClient,
        trajectory: TrajectoryId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
    ) -> tuple[KvPlaced, float]:
        """Import a context; returns what the engine did with it, and the seconds."""
        sent_s = self._loop.time()
        answer = self._expect(client.spec.engine, "placed", trajectory)
        at_once = client.import_kv(trajectory, GroupId(trajectory), prompt_ids, kv)
        if at_once is not None:
            return at_once, self._loop.time() - sent_s
        placed: KvPlaced = await self._wait(answer, f"{client.spec.engine} to import KV")
        return placed, self._loop.time() - sent_s

    async def _wait(self, answer: asyncio.Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise MeasureError(f"waited {ANSWER_TIMEOUT_S:.0f} s in vain for {what}") from None

    def _expect(self, engine: EngineId, what: str, of: str = "") -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[engine, what, of] = answer
        return answer

    def _answer(self, value: Any, engine: EngineId, what: str, of: str = "") -> None:
        answer = self._waiting.pop((engine, what, of), None)
        if answer is not None and not answer.done():
            answer.set_result(value)

    # -- answers: `EngineListener` -----------------------------------------------------------------

    def engine_ready(self, engine: EngineId, kv_capacity_tokens: int) -> None:
        self._answer(None, engine, "ready")

    def step_ended(self, engine: EngineId, end: StepResult) -> None:
        self._answer((self._loop.time(), end), engine, "end", end.trajectory)

    def kv_exported(
        self, engine: EngineId, trajectory: TrajectoryId, kv: KvHandle | None, move: int
    ) -> None:
        self._answer(kv, engine, "exported", trajectory)

    def kv_placed(
        self, engine: EngineId, trajectory: TrajectoryId, placed: KvPlaced, move: int
    ) -> None:
        self._answer(placed, engine, "placed", trajectory)

    def weights_updated(self, engine: EngineId, version: int) -> None:
        """See `EngineListener`; a sweep updates no weights."""

    def engine_stopped(self, engine: EngineId) -> None:
        self._answer(None, engine, "stopped")

    def engine_failed(
        self, engine: EngineId, reason: str, salvaged: Sequence[tuple[TrajectoryId, StepResult]]
    ) -> None:
        """See `EngineListener`: every call that waits for this engine raises `MeasureError`."""
        for key, answer in list(self._waiting.items()):
            if key[0] == engine and not answer.done():
                answer.set_exception(MeasureError(f"engine {engine} failed: {reason}"))
                del self._waiting[key]
