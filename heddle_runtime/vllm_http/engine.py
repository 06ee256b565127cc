"""An engine behind a URL, seen from the driver; implements `EngineClient`.

What an endpoint answers is one of four things. A refusal (4xx) is the client's, in the words of the
endpoint. Where it is busy (429, 503), the step waits, or runs at another endpoint. A fault of the
step (5xx) is tried at a second endpoint and never at a third. Where a stream breaks off or cannot
be true, the step goes on elsewhere with the tokens that it has. The engine itself has failed only
where it cannot be connected to, its `/health` is not 200, or it hangs (`EngineLife`). The engine
that the driver starts in its place waits until the endpoint works again.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, TypeAlias

from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.engines import (
    EngineCapabilities,
    EngineListener,
    KvHandle,
    KvPlaced,
    StepRequest,
)
from heddle_runtime.generation import Refusal
from heddle_runtime.sampling import SamplingError
from heddle_runtime.token_engine import TokenEngine
from heddle_runtime.vllm_http.circuit import Circuit, waits_s
from heddle_runtime.vllm_http.connections import BrokenError, ConnectError
from heddle_runtime.vllm_http.endpoint import (
    ANSWER_BYTES,
    Answer,
    Endpoint,
    SlowError,
    UnreachableError,
    reason_of,
)
from heddle_runtime.vllm_http.life import EXPECTED_SHARE, EngineLife
from heddle_runtime.vllm_http.metrics import began, read_iterations, read_sample
from heddle_runtime.vllm_http.moves import KvMoves
from heddle_runtime.vllm_http.probe import ABORT, CHAT, EndpointFacts, ProbeError, makes_a_token
from heddle_runtime.vllm_http.relay import EngineError
from heddle_runtime.vllm_http.settings import HttpSettings
from heddle_runtime.vllm_http.step import HttpStep
from heddle_runtime.vllm_http.stream import DONE, EventReader, ProtocolError

ABORT_AGAIN_S = 0.25
"""An abort that comes before its generation is lost, and is sent again."""
LOOK_S = 0.25
"""Interval of looks at streams that are silent, and of those for an endpoint that takes a step."""
PREFILL_SHARE = 1.25
"""A prompt is prefilled when its engine has prefilled so many times what was ahead of it."""
FAULT_WAIT_S = 5.0
"""How long a step that failed at an endpoint waits for another one."""
SILENCE_WAIT_S = 1.0
"""How long a step that was silent at an endpoint, which works, waits for another one."""
MOST_FAULTS = 2
"""Endpoints at which a step may fail."""
MOST_MOVES = 2
"""Endpoints that a step leaves because it brings nothing there."""
MOST_CUTS = 20
"""Calls of a step that may break off."""

State: TypeAlias = Literal["starting", "ready", "gone"]


class _BusyError(Exception):
    """An endpoint takes no step now."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.body["error"]["message"])
        self.refusal = refusal


class _StepFaultError(_BusyError):
    """An endpoint failed at a step."""


class _RefusedError(_BusyError):
    """An endpoint refused a step."""


class _CutError(Exception):
    """A step broke off, or what came of it cannot be true; the endpoint may be well."""


class HttpEngine(TokenEngine):
    """One engine; made by `heddle_runtime.vllm_http.launcher.HttpLauncher`.

    It is not ours: a stop only ends its use. A step of it may run at the endpoint of another while
    its own is busy or fails; that one is then its place.
    """

    def __init__(
        self,
        spec: EngineSpec,
        listener: EngineListener,
        settings: HttpSettings,
        *,
        connect: Callable[["HttpEngine"], Awaitable[tuple[Endpoint, EndpointFacts]]],
        on_gone: Callable[["HttpEngine"], None],
        others: Callable[["HttpEngine"], Sequence["HttpEngine"]] = lambda engine: (),
        prefill_s: Callable[[EngineSpec, int], float] = lambda spec, tokens: 0.0,
    ) -> None:
        """`connect` finds an endpoint or raises `ProbeError`; `on_gone` is called at the end.

        `others` are the engines that may run a step in its place. `prefill_s` is what the prefill
        of so many tokens should take.
        """
        super().__init__(spec, listener)
        self._settings = settings
        self._on_gone, self._others, self._prefill_s = on_gone, others, prefill_s
        self._state: State = "starting"
        self._facts: EndpointFacts | None = None
        self._steps: dict[TrajectoryId, HttpStep] = {}
        self._runs: dict[TrajectoryId, asyncio.Task[None]] = {}
        self._here: dict[HttpStep, None] = {}
        """Steps at its endpoint, those of other engines included."""
        self._life = EngineLife(self._loop.time(), silence_s=settings.silence_s)
        self._circuit = Circuit()
        self._moves: KvMoves | None = None
        self._check: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._task(self._begin(connect))

    # -- properties -------------------------------------------------------------------------------

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

    @property
    def load(self) -> int:
        """Steps at its endpoint."""
        return len(self._here)

    @property
    def _counts_each(self) -> bool:
        """Whether to have the tokens of each event counted: reasoning would be counted anew."""
        answer = self._facts.answers.get(CHAT, {}) if self._facts is not None else {}
        return not (answer.get("usage") or {}).get("completion_tokens_details")

    def _serves(self, adapter: str) -> bool:
        """Whether its endpoint lists a LoRA adapter; "" is none."""
        return not adapter or (self._facts is not None and adapter in self._facts.adapters)

    @property
    def takes_steps(self) -> bool:
        """Whether steps may go to its endpoint now."""
        return self._state == "ready" and self._circuit.allows(self._loop.time())

    # -- orders -----------------------------------------------------------------------------------

    def start(self, request: StepRequest) -> None:
        if self._state != "ready" or self._facts is None or self._moves is None:
            raise self._refused(f" is not ready: {self._reason or self._state}")
        has_step = request.trajectory in self._steps
        self._check_step(request, has_step=has_step, longest=self._facts.longest)
        try:
            step = HttpStep(request, "", self._settings)
        except SamplingError as error:
            raise self._refused(f": {request.trajectory}: {error}") from None
        self._steps[request.trajectory] = step
        self._moves.remember(request.trajectory, step.salt)
        self._runs[request.trajectory] = self._task(self._run(step))

    def abort(self, trajectory: TrajectoryId) -> None:
        step = self._steps.get(trajectory)
        if step is not None and not step.aborted:
            step.aborted = True
            self._task(self._abort(step, self._runs[trajectory]))

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

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        """Nothing that can be done from here.

        Raises:
            EngineRefusedError: always; `capabilities` say so.
        """
        raise self._refused(": its owner updates its weights")

    def stop(self) -> None:
        if self._state != "gone":
            self._leave("stopped")
            self._loop.call_soon(self._listener.engine_stopped, self.spec.engine)

    def kill(self) -> None:
        if self._state != "gone":
            self._leave("killed")

    def fail(self, reason: str) -> None:
        """End its use as that of an engine that died; its steps are handed over."""
        if self._state == "gone":
            return
        for step in list(self._steps.values()):
            if step.complete:  # only its count was still to come
                self._end(step, finished=True)
        steps = list(self._steps.values())
        self._leave(reason)
        salvaged = [
            (step.trajectory, step.result(finished=False, keep=step.resumable and not step.void))
            for step in steps
        ]
        self._listener.engine_failed(self.spec.engine, reason, salvaged)

    # -- its life ---------------------------------------------------------------------------------

    async def _begin(
        self, connect: Callable[["HttpEngine"], Awaitable[tuple[Endpoint, EndpointFacts]]]
    ) -> None:
        try:
            self._endpoint, facts = await connect(self)
        except ProbeError as error:
            self.fail(str(error))
            return
        self._moves = KvMoves(self.spec.engine, self._endpoint, facts, self._settings)
        self._facts, self._state = facts, "ready"
        self._listener.engine_ready(self.spec.engine, facts.kv_capacity_tokens)
        self._life = EngineLife(self._loop.time(), silence_s=self._settings.silence_s)
        self._task(self._watch_health())
        self._task(self._watch_counters())
        self._task(self._watch_silence())

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_s)
            await self._fail_if_unusable(broken=False)

    async def _unusable(self, *, broken: bool) -> str:
        """Why it cannot be used any more, by two calls of `/health`; "" while it can be.

        `broken`: whether a stream broke off just now; then one that is not connected is enough.
        """
        for attempt in range(2):
            if attempt:
                await asyncio.sleep(LOOK_S)
            try:
                answer = await self._endpoint.call("/health", limit_s=self._settings.silence_s)
            except SlowError:
                return ""  # whether it hangs is judged by what else it brings
            except UnreachableError as error:
                why, out = str(error), broken or attempt > 0
            else:
                self._life.answered(self._loop.time())
                out = self._life.health(answer.status)
                why = f"/health says {answer.status}: {answer.message}"
                if answer.status == 200:
                    return ""
            if out:
                return why
        return ""

    async def _watch_counters(self) -> None:
        """Read `/metrics` while there is anything to count."""
        while True:
            await asyncio.sleep(self._settings.sample_s)
            moves = self._moves is not None and self._moves.count > 0
            if not (self._here or moves or any(self._sample[:3])):
                continue
            # A failed call says as much as `/health`; counters that are no numbers are none.
            with contextlib.suppress(UnreachableError, ValueError, IndexError):
                answer = await self._endpoint.call(
                    "/metrics", limit_s=self._settings.answer_limit_s
                )
                self._life.answered(self._loop.time())
                if answer.status == 200:
                    text = answer.data.decode("utf-8", "replace")
                    now = began(text)
                    if now and self._facts is not None and self._facts.began not in ("", now):
                        self.fail(f"{self._endpoint.url} was started again")
                        return
                    sample = read_sample(text, self.kv_capacity_tokens)
                    now_s, counters = self._loop.time(), read_iterations(text)
                    self._life.counted(now_s, *counters, sample.kv_used_tokens)
                    self._sample = sample

    async def _watch_silence(self) -> None:
        now_s = self._loop.time()
        while True:
            due_s = now_s + LOOK_S
            await asyncio.sleep(LOOK_S)
            now_s = self._loop.time()
            if now_s - due_s > self._settings.silence_s / 2:
                self._life.stood_still(now_s - due_s)
                continue  # what came meanwhile is read before the next look
            silent = [step.request.prompt_tokens for step in self._here if not step.brought_s]
            expected_s = sum(self._prefill_s(self.spec, tokens) for tokens in silent)
            if why := self._life.hung(now_s, streams=bool(self._here), expected_s=expected_s):
                for step in self._here:
                    step.attempts.moved_from.append(self._endpoint.url)
                self.fail(f"{self._endpoint.url}: {why}")
                return
            for step in list(self._here):
                if self._late(step, now_s):
                    step.attempts.moved_from.append(self._endpoint.url)
                    self._cut(step, f"{step.trajectory} brought nothing while others went on")

    def _late(self, step: HttpStep, now_s: float) -> bool:
        """Whether a step brings nothing although its engine computes, and may go elsewhere.

        Before its first token it may be in a queue, or prefill. An answer that is no stream is
        silent to its end.
        """
        silence_s = self._settings.silence_s
        if not step.streams:
            return False
        since_s = now_s - (step.brought_s or step.posted_s)
        if since_s < silence_s or len(step.attempts.moved_from) >= MOST_MOVES or step.aborted:
            return False
        fresh = [
            e for e in self._elsewhere(step) if e._endpoint.url not in step.attempts.moved_from
        ]
        if not fresh:
            return False
        waits = self._sample.waiting > 0
        if step.overtaken and not (step.brought_s or waits or self._life.grows):
            return True
        if not self._life.moves(now_s):
            return False
        if step.brought_s:
            slow = since_s < EXPECTED_SHARE * step.stream_interval * self._life.iteration_s
            return not (slow or (waits and self._sample.preemptions != step.preemptions))
        if self._life.counts_tokens:
            idle = not (waits or self._life.prefills())
            return idle or self._life.prefilled > step.prefilled_by
        expected_s = self._prefill_s(self.spec, step.request.prompt_tokens)
        return not waits and since_s > EXPECTED_SHARE * expected_s

    def _cut(self, step: HttpStep, why: str) -> None:
        if step.attempt is not None and not step.cut:
            step.cut = why
            step.attempt.cancel()

    def _leave(self, reason: str) -> None:
        self._state, self._reason = "gone", reason
        for step in list(self._here):
            if step not in self._steps.values():
                self._cut(step, f"{self._endpoint.url}: {reason}")
        self._steps.clear()
        self._runs.clear()
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
            await self._call_until_done(step)
        except _BusyError as error:
            self._end(step, finished=True, error=str(error), refusal=error.refusal)
        except _CutError:
            self._end(step, finished=False)
        except Exception as error:  # a defect: the step must end all the same
            self._end(step, finished=True, error=f"{type(error).__name__}: {error}")
            raise
        else:
            self._end(step, finished=step.finish != "abort")

    async def _call_until_done(self, step: HttpStep) -> None:
        """Run it where it can run.

        Raises:
            _RefusedError: an endpoint refused it.
            _StepFaultError: two endpoints failed at it.
            _BusyError: none took it in time.
            _CutError: it broke off; it is to go on as another dispatch.
        """
        last: _BusyError | None = None
        while True:
            place = await self._place(step, last)
            try:
                await self._call(step, place)
            except _RefusedError:
                place._circuit.succeeded()
                raise
            except _StepFaultError as error:
                place._count_fault()
                step.attempts.failed_at.append(place._endpoint.url)
                if len(step.attempts.failed_at) >= MOST_FAULTS:
                    raise
                last = error
            except _BusyError as error:
                place._circuit.busy(self._loop.time(), error.refusal.retry_after_s)
                last = error
            except _CutError as error:
                if step.aborted or step.complete:
                    raise
                place._count_fault()
                step.attempts.cuts += 1
                if step.attempts.cuts >= MOST_CUTS:
                    said = f"engines broke off {MOST_CUTS} times; {error}"
                    raise _fault("server_error", said) from None
            else:
                place._circuit.succeeded()
                return
            if step.made or step.void or step.aborted:
                raise _CutError

    async def _place(self, step: HttpStep, last: _BusyError | None) -> "HttpEngine":
        """Wait for an engine at whose endpoint a step may run now, its own first."""
        began_s = self._loop.time()
        until_s = began_s + self._settings.place_limit_s
        fault_wait_s = FAULT_WAIT_S if isinstance(last, _StepFaultError) else 1e9
        failed = set(step.attempts.failed_at)
        avoided = failed.union(step.attempts.moved_from)
        while True:
            able = self._serves(step.adapter)
            if able and self.takes_steps and self._endpoint.url not in avoided:
                return self
            every = [self, *self._elsewhere(step)] if able else self._elsewhere(step)
            free = [engine for engine in every if engine.takes_steps]
            for engine in free:
                if engine._endpoint.url not in avoided:
                    return engine
            # One that has failed at it is better than none, where no other is there or starts.
            others = [engine for engine in every if engine._endpoint.url not in avoided]
            others += [engine for engine in self._others(self) if engine._state == "starting"]
            waited_s = self._loop.time() - began_s
            for engine in free:
                wait_s = fault_wait_s if engine._endpoint.url in failed else SILENCE_WAIT_S
                if not others or waited_s > wait_s:
                    return engine
            if self._loop.time() > until_s:
                if last is not None:
                    raise last
                raise _CutError
            await asyncio.sleep(LOOK_S / 5)

    def _elsewhere(self, step: HttpStep) -> Sequence["HttpEngine"]:
        """Other engines that are up and can hold a step, the least loaded first."""
        needed = step.request.prompt_tokens + step.request.max_tokens
        up = [e for e in self._others(self) if e._facts is not None and e._state == "ready"]
        able = [e for e in up if e._serves(step.adapter)]
        fits = [e for e in able if e._facts is not None and e._facts.longest >= needed]
        return sorted(fits, key=lambda engine: engine.load)

    async def _call(self, step: HttpStep, place: "HttpEngine") -> None:
        """Call an endpoint for a step.

        Raises:
            _BusyError: one of its kinds, by what the endpoint says.
            _CutError: the call broke off, or was cut.
        """
        now_s = self._loop.time()
        if not place._here:
            place._life.begun(now_s)
        place._here[step] = None
        step.posted(f"{random.getrandbits(128):032x}", now_s)
        step.attempts.connected = True
        prefilled = place._life.prefilled
        ahead = sum(
            other.request.prompt_tokens
            for other in place._here
            if other is step or (not other.brought_s and other.prefilled_by >= prefilled)
        )
        step.prefilled_by = prefilled + PREFILL_SHARE * ahead
        step.attempt = current = asyncio.current_task()
        try:
            try:
                await self._generate(step, place)
            finally:
                step.attempt = None
        except asyncio.CancelledError:
            # Cut and cancelled, it is cancelled.
            if not step.cut or current is None or current.uncancel():
                raise
            raise _CutError(step.cut) from None
        except (BrokenError, OSError) as error:
            step.attempts.connected = not isinstance(error, ConnectError)
            limit_s = self._settings.silence_limit_s
            why = f"the stream of {step.trajectory} {reason_of(error, limit_s)}"
            if not (step.aborted or step.complete):
                await place._checked()
            raise _CutError(why) from None
        except ProtocolError as error:
            raise _CutError(str(error)) from None
        except EngineError as error:
            raise _kind_of(error.status, error.body, None, in_stream=step.streams) from None
        finally:
            place._here.pop(step, None)
            place._life.left(step.request.prompt_tokens + len(step.made) + step.uncounted)

    async def _generate(self, step: HttpStep, place: "HttpEngine") -> None:
        events = EventReader()
        async with place._endpoint.post(
            step.path,
            step.body(counts_each=place._counts_each),
            headers=step.trace_headers,
            limit_s=None,
            silence_s=self._settings.silence_limit_s,
        ) as response:
            place._life.answered(self._loop.time())
            if response.status != 200:
                found = await response.read(ANSWER_BYTES)
                raise _of_status(step.path, Answer(response.status, found, response.headers))
            if step.streams and response.content_type != "text/event-stream":
                sent = response.content_type[:80]
                said = f"{step.path} was to answer with a stream, and it sent {sent}"
                raise _fault("api_error", said)
            if not step.streams:
                place._brought(step, step.take_whole(await response.read(ANSWER_BYTES)))
                return
            while data := await response.some():
                for event in events.feed(data):
                    if event != DONE:
                        place._brought(step, step.take(event))
        if step.finish is None:
            raise ProtocolError(f"the stream of {step.trajectory} ended before its step")
        if step.finish == "abort" and not (step.aborted or step.made):
            raise ProtocolError(f"{step.trajectory} was aborted by another before its first token")

    def _brought(self, step: HttpStep, tokens: int) -> None:
        if not tokens:
            return
        in_order = self._facts is not None and self._facts.ranks == 1 and not self._sample.waiting
        if in_order and not step.brought_s:
            # Running requests are prefilled in order. Tokenizing, before that, is not in order.
            before_s = step.posted_s - self._settings.silence_s / 2
            for other in self._here:
                other.overtaken |= not other.brought_s and other.posted_s <= before_s
        step.brought_s, step.preemptions = self._loop.time(), self._sample.preemptions
        self._life.brought(step.brought_s, tokens)

    def _count_fault(self) -> None:
        """A step failed at its endpoint: after some in a row it gets none until one succeeds."""
        if self._circuit.failed() and self._state == "ready":
            self._task(self._recover())

    async def _recover(self) -> None:
        """Try its endpoint with a generation of one token, until that succeeds."""
        for wait_s in waits_s():
            await asyncio.sleep(wait_s)
            if await makes_a_token(self._endpoint, limit_s=self._settings.silence_s):
                self._circuit.succeeded()
                return

    async def _checked(self) -> None:
        """A stream broke off: look at once whether the engine has failed, once for all streams."""
        if self._state != "ready":
            return
        if self._check is None or self._check.done():
            self._check = self._task(self._fail_if_unusable(broken=True))
        await asyncio.wait({self._check})

    async def _fail_if_unusable(self, *, broken: bool) -> None:
        if why := await self._unusable(broken=broken):
            self.fail(f"{self._endpoint.url}: {why}")

    def _end(
        self, step: HttpStep, *, finished: bool, error: str = "", refusal: Refusal | None = None
    ) -> None:
        if self._steps.get(step.trajectory) is not step:
            return
        del self._steps[step.trajectory]
        self._runs.pop(step.trajectory, None)
        finished = finished or step.complete
        # Cut by no order of ours, a step that cannot be resumed begins again.
        keep = not step.void and (finished or step.resumable or step.aborted)
        result = step.result(finished=finished, error=error, keep=keep, refusal=refusal)
        self._listener.step_ended(self.spec.engine, result)

    async def _abort(self, step: HttpStep, stream: asyncio.Task[None]) -> None:
        """End a step with the tokens so far; at the latest by closing its connection."""
        until_s = self._loop.time() + self._settings.abort_limit_s
        while not stream.done() and (left_s := until_s - self._loop.time()) > 0:
            place = next((e for e in (self, *self._others(self)) if step in e._here), None)
            if place is None or not step.engine_id:  # it waits for one, or cannot be named
                break
            body = {"request_ids": [step.engine_id]}
            try:
                answer = await place._endpoint.call(ABORT, body, limit_s=left_s)
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
        self._listener.kv_exported(self.spec.engine, trajectory, handle, move)

    async def _import(
        self,
        moves: KvMoves,
        trajectory: TrajectoryId,
        prompt_ids: Sequence[int],
        kv: KvHandle | None,
        move: int,
    ) -> None:
        placed = await moves.place(trajectory, prompt_ids, kv)
        self._listener.kv_placed(self.spec.engine, trajectory, placed, move)


def _of_status(path: str, answer: Answer) -> Exception:
    """What an answer other than 200 means: refusal, busy, or fault."""
    content = answer.json()
    error = content.get("error") if isinstance(content, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return _kind_of(answer.status, content, _retry_after_s(answer))
    message = f"{path} says {answer.status}: {answer.message}"
    body = {"message": message, "type": "api_error", "param": None, "code": answer.status}
    return _kind_of(answer.status, {"error": body}, _retry_after_s(answer), understood=False)


def _kind_of(
    status: int,
    body: dict[str, Any],
    retry_after_s: float | None,
    *,
    understood: bool = True,
    in_stream: bool = False,
) -> Exception:
    """The error for an engine's error object; `understood`: whether it was one, in vLLM's form."""
    refusal = Refusal(status=status, body=body, retry_after_s=retry_after_s, in_stream=in_stream)
    if status in (429, 503):
        return _BusyError(refusal)
    # Paths, keys and methods are the gateway's own: no client can mend them.
    if understood and 400 <= status < 500 and status not in (401, 403, 404, 405, 408):
        return _RefusedError(refusal)
    return _StepFaultError(_of_engine(refusal, understood=understood))


def _fault(kind: str, message: str) -> _StepFaultError:
    body = {"message": message, "type": kind, "param": None, "code": 502}
    return _StepFaultError(Refusal(status=502, body={"error": body}))


def _of_engine(refusal: Refusal, *, understood: bool) -> Refusal:
    """A fault as the client gets it: what is between gateway and engine is no fault of its own."""
    if understood and refusal.status >= 400 and refusal.status not in (401, 403, 405):
        return refusal
    status = refusal.status if refusal.status >= 500 else 502
    return Refusal(status=status, body=refusal.body, in_stream=refusal.in_stream)


def _retry_after_s(answer: Answer) -> float | None:
    with contextlib.suppress(ValueError):
        return float(answer.headers.get("retry-after", ""))
    return None
