"""An engine behind a URL, seen from the driver; implements `EngineClient`."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeAlias

import aiohttp

from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import (
    EngineCapabilities,
    EngineListener,
    EngineRefusedError,
    EngineSample,
    KvHandle,
    KvPlaced,
    StepRequest,
)
from heddle_runtime.sampling import SamplingError
from heddle_runtime.vllm_http.endpoint import (
    Answer,
    Endpoint,
    SlowError,
    UnreachableError,
    read_all,
    reason_of,
)
from heddle_runtime.vllm_http.metrics import read_sample
from heddle_runtime.vllm_http.moves import KvMoves
from heddle_runtime.vllm_http.probe import ABORT, GENERATE, EndpointFacts, ProbeError
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.step import REQUEST_PREFIX, HttpStep
from heddle_runtime.vllm_http.stream import DONE, EventReader, ProtocolError, read_chunk

ABORT_AGAIN_S = 0.25
"""An abort that comes before its generation is lost, and is sent again."""

State: TypeAlias = Literal["starting", "ready", "gone"]


class _RefusedError(Exception):
    """The endpoint refused one step; the message says why."""


class _CutError(Exception):
    """A step broke off; the endpoint may be well."""


class _UnusableError(Exception):
    """The endpoint cannot run any step."""


class HttpEngine:
    """One engine; made by `heddle_runtime.vllm_http.launcher.HttpLauncher`.

    It is not ours: a stop only ends its use.
    """

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        settings: HttpSettings,
        *,
        connect: Callable[["HttpEngine"], Awaitable[tuple[Endpoint, EndpointFacts]]],
        on_gone: Callable[["HttpEngine"], None],
    ) -> None:
        """`connect` finds an endpoint or raises `ProbeError`; `on_gone` is called at the end."""
        self._spec, self._listener, self._settings = spec, listener, settings
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._state: State = "starting"
        self._facts: EndpointFacts | None = None
        self._steps: dict[TrajectoryId, HttpStep] = {}
        self._streams: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._received_s = 0.0
        """When it last sent anything; seconds of the event loop's clock."""
        self._faults, self._fault_s = 0, 0.0
        """How often in a row a step broke off, and when last."""
        self._sample = EngineSample(0, 0, 0, 0)
        self._moves: KvMoves | None = None
        self._reason = ""
        self.untrue = ""
        """What it sent that cannot be true; "": nothing."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._task(self._begin(connect))

    # -- properties -------------------------------------------------------------------------------

    @property
    def spec(self) -> EngineSpec:
        """The engine's specification."""
        return self._spec

    @property
    def capabilities(self) -> EngineCapabilities:
        """It moves KV where the endpoint does; the endpoint's owner updates its weights."""
        moves = self._facts is not None and self._facts.moves_kv
        return EngineCapabilities(export_kv=moves, import_kv=moves, update_weights=False)

    @property
    def kv_capacity_tokens(self) -> int:
        """Size of its KV space; 0 until it is ready."""
        return self._facts.kv_capacity_tokens if self._facts is not None else 0

    @property
    def facts(self) -> EndpointFacts | None:
        """What the endpoint said of itself; None before it is ready."""
        return self._facts

    # -- orders -----------------------------------------------------------------------------------

    def start(self, request: StepRequest) -> None:
        """Run a step; see `EngineClient.start`."""
        name = f"engine {self._spec.engine}"
        if self._state != "ready" or self._facts is None or self._moves is None:
            raise EngineRefusedError(f"{name} is not ready: {self._reason or self._state}")
        if request.trajectory in self._steps:
            raise EngineRefusedError(f"{name}: {request.trajectory} has a step here already")
        if len(request.prompt_ids) != request.prompt_tokens or not request.prompt_tokens:
            raise EngineRefusedError(
                f"{name}: {request.trajectory} has {len(request.prompt_ids)} token ids for a "
                f"prompt of {request.prompt_tokens} tokens"
            )
        if request.max_tokens < 1:
            raise EngineRefusedError(f"{name}: {request.trajectory} has max_tokens below 1")
        if request.prompt_tokens + request.max_tokens > self._facts.longest:
            raise EngineRefusedError(
                f"{name}: {request.trajectory} needs {request.prompt_tokens} + "
                f"{request.max_tokens} tokens, and the engine holds {self._facts.longest}"
            )
        try:
            step = HttpStep(request, uuid.uuid4().hex, self._settings)
        except SamplingError as error:
            raise EngineRefusedError(f"{name}: {request.trajectory}: {error}") from None
        self._steps[request.trajectory] = step
        self._moves.remember(request.trajectory, step.salt)
        self._streams[request.trajectory] = self._task(self._run(step))

    def abort(self, trajectory: TrajectoryId) -> None:
        """End a step early; see `EngineClient.abort`."""
        step = self._steps.get(trajectory)
        if step is not None and not step.aborted:
            step.aborted = True
            self._task(self._abort(step, self._streams[trajectory]))

    def forget(self, trajectory: TrajectoryId) -> None:
        """Its KV is of no more use; see `EngineClient.forget`."""
        if self._moves is not None:
            self._moves.forget(trajectory)

    def export_kv(
        self, trajectory: TrajectoryId, prompt_ids: Sequence[int], *, move: int = 0
    ) -> bool:
        """Keep KV ready for a pull; see `EngineClient.export_kv`."""
        moves = self._moves
        if moves is None or not (self.capabilities.export_kv and prompt_ids):
            return False
        if not moves.has_seen(trajectory):
            return False
        self._task(self._export(moves, trajectory, prompt_ids, move))
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
        """Bring a context into the prefix cache; see `EngineClient.import_kv`."""
        moves, facts = self._moves, self._facts
        if moves is None or facts is None or not 0 < len(prompt_ids) < facts.longest:
            return KvPlaced("none", 0)
        self._task(self._import(moves, trajectory, prompt_ids, kv, move))
        return None

    def sample(self) -> EngineSample:
        """Return the newest counters received."""
        return self._sample

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        """Nothing that can be done from here.

        Raises:
            EngineRefusedError: always; `capabilities` say so.
        """
        raise EngineRefusedError(f"engine {self._spec.engine}: its owner updates its weights")

    def stop(self) -> None:
        """End its use; see `EngineClient.stop`."""
        if self._state != "gone":
            self._leave("stopped")
            self._loop.call_soon(self._listener.engine_stopped, self._spec.engine)

    def kill(self) -> None:
        """End its use now; see `EngineClient.kill`."""
        if self._state != "gone":
            self._leave("killed")

    def fail(self, reason: str) -> None:
        """End its use as that of an engine that died; its steps are handed over."""
        if self._state == "gone":
            return
        for step in list(self._steps.values()):
            if step.complete and step.credible:  # only its count was still to come
                self._end(step, finished=True)
        steps = list(self._steps.values())
        self._leave(reason)
        salvaged = [
            (step.trajectory, step.result(finished=False, keep=step.credible)) for step in steps
        ]
        self._listener.engine_failed(self._spec.engine, reason, salvaged)

    # -- its life ---------------------------------------------------------------------------------

    async def _begin(
        self, connect: Callable[["HttpEngine"], Awaitable[tuple[Endpoint, EndpointFacts]]]
    ) -> None:
        try:
            self._endpoint, facts = await connect(self)
        except ProbeError as error:
            self.fail(str(error))
            return
        self._moves = KvMoves(self._spec.engine, self._endpoint, facts, self._settings)
        self._facts, self._state = facts, "ready"
        self._listener.engine_ready(self._spec.engine, facts.kv_capacity_tokens)
        self._task(self._watch_health())
        self._task(self._watch_counters())

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_s)
            if why := await self._unusable():
                self.fail(f"{self._endpoint.url}: {why}")
                return

    async def _watch_counters(self) -> None:
        """Read `/metrics` while there is anything to count."""
        limit_s = self._settings.answer_limit_s
        while True:
            await asyncio.sleep(self._settings.sample_s)
            moves = self._moves is not None and self._moves.count > 0
            if not (self._steps or moves or any(self._sample[:3])):
                continue
            # A failed call is seen by `/health`; counters that are no numbers are none.
            with contextlib.suppress(UnreachableError, ValueError):
                answer = await self._endpoint.call("/metrics", limit_s=limit_s)
                if answer.status == 200:
                    self._sample = read_sample(answer.data.decode(), self.kv_capacity_tokens)

    async def _unusable(self) -> str:
        """Why it cannot be used any more; "" while it can be."""
        try:
            answer = await self._endpoint.call("/health", limit_s=self._settings.hang_s)
        except SlowError as error:
            # Busy, and not dead, while streams bring something.
            silent_s = self._loop.time() - self._received_s
            return "" if silent_s < self._settings.hang_s else str(error)
        except UnreachableError as error:
            return str(error)
        return "" if answer.status == 200 else f"/health says {answer.status}: {answer.message}"

    def _leave(self, reason: str) -> None:
        self._state, self._reason = "gone", reason
        self._steps.clear()
        self._streams.clear()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()  # closes its connection, so that the endpoint drops the request
        self._on_gone(self)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler(
                {"message": "an engine's call has failed", "exception": error, "handle": None}
            )

    async def closed(self) -> None:
        """Wait until none of its calls runs any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    # -- steps ------------------------------------------------------------------------------------

    async def _run(self, step: HttpStep) -> None:
        try:
            await self._generate(step)
        except _RefusedError as error:
            self._end(step, finished=True, error=str(error))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            limit_s = self._settings.silence_limit_s
            await self._examine(
                step, f"the stream of {step.trajectory} {reason_of(error, limit_s)}"
            )
        except _CutError as error:
            await self._examine(step, str(error))
        except _UnusableError as error:
            self.fail(f"{self._endpoint.url}: {error}")
        except ProtocolError as error:
            step.credible = False
            self.untrue = str(error)
            self.fail(f"{self._endpoint.url}: {error}")
        except Exception as error:  # a defect: the step must end all the same
            self._end(step, finished=True, error=f"{type(error).__name__}: {error}")
            raise
        else:
            self._faults = 0
            self._end(step, finished=step.finish != "abort")

    async def _generate(self, step: HttpStep) -> None:
        events = EventReader()
        async with self._endpoint.post(
            GENERATE,
            step.body(),
            limit_s=None,
            silence_s=self._settings.silence_limit_s,
        ) as response:
            if response.status != 200:
                answer = Answer(response.status, await read_all(response), {})
                raise _of_status(answer)
            async for data in response.content.iter_any():
                self._received_s = self._loop.time()
                for event in events.feed(data):
                    if event == DONE:
                        continue
                    chunk = read_chunk(event)
                    if chunk.error is not None:
                        raise _CutError(f"{step.trajectory}: {Answer(500, event, {}).message}")
                    step.take(chunk)
        if step.finish is None:
            raise _CutError(f"the stream of {step.trajectory} ended before its step")
        if step.finish == "abort" and not (step.aborted or step.made):
            raise _CutError(f"{step.trajectory} was aborted by another before its first token")

    def _end(self, step: HttpStep, *, finished: bool, error: str = "") -> None:
        if self._steps.get(step.trajectory) is not step:
            return
        del self._steps[step.trajectory]
        self._streams.pop(step.trajectory, None)
        finished = finished or step.complete
        # Cut by no order of ours, a step that cannot be resumed begins again.
        keep = finished or step.resumable or step.aborted
        result = step.result(finished=finished, error=error, keep=keep)
        self._listener.step_ended(self._spec.engine, result)

    async def _examine(self, step: HttpStep, reason: str) -> None:
        """A step broke off: the engine has failed, or the step is to run again."""
        if step.aborted or step.complete:
            self._end(step, finished=False)
            return
        if why := await self._unusable():
            self.fail(f"{self._endpoint.url}: {reason}; {why}")
            return
        if step.sent_s >= self._fault_s:  # many that break off at once are one fault
            self._faults, self._fault_s = self._faults + 1, time.monotonic()
        if self._faults >= self._settings.faults:
            self.fail(
                f"{self._endpoint.url}: steps broke off {self._faults} times in a row; {reason}"
            )
            return
        await asyncio.sleep(self._settings.retry_s)
        self._end(step, finished=False)

    async def _abort(self, step: HttpStep, stream: asyncio.Task[None]) -> None:
        """End a step with the tokens so far; at the latest by closing its connection."""
        until_s = self._loop.time() + self._settings.abort_limit_s
        body = {"request_ids": [REQUEST_PREFIX + step.id]}
        while not stream.done() and (left_s := until_s - self._loop.time()) > 0:
            try:
                answer = await self._endpoint.call(ABORT, body, limit_s=left_s)
            except UnreachableError:
                break
            if answer.status != 200:
                break
            await asyncio.wait({stream}, timeout=min(left_s, ABORT_AGAIN_S))
        if not stream.done():
            stream.cancel()
            await asyncio.wait({stream})
        self._end(step, finished=False)

    # -- moves of KV ------------------------------------------------------------------------------

    async def _export(
        self, moves: KvMoves, trajectory: TrajectoryId, prompt_ids: Sequence[int], move: int
    ) -> None:
        handle = await moves.export(trajectory, prompt_ids)
        self._listener.kv_exported(self._spec.engine, trajectory, handle, move)

    async def _import(
        self,
        moves: KvMoves,
        trajectory: TrajectoryId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        move: int,
    ) -> None:
        placed = await moves.place(trajectory, prompt_ids, kv)
        self._listener.kv_placed(self._spec.engine, trajectory, placed, move)


def _of_status(answer: Answer) -> Exception:
    """What an answer other than 200 means: a fault of the step, of the engine, or of the moment."""
    said = f"{GENERATE} says {answer.status}: {answer.message}"
    if answer.status in (401, 403, 404, 405):
        return _UnusableError(said)
    if 300 <= answer.status < 500 and answer.status not in (408, 429):
        return _RefusedError(said)
    return _CutError(said)
