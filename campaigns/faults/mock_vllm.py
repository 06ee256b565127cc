"""A `vllm serve` without a model, whose answers are exact, and which can do everything wrong.

It batches as vLLM does: an iteration gives each running request one token, or computes a part of a
prompt; requests above `max_running` wait. It counts as vLLM does: iterations that give a token, a
prompt whole with its first token, and KV with each part. Its times are those of the event loop.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from aiohttp import web

from campaigns.faults.mock_answers import BLOCK, BLOCKS, Answering, derendered, metrics_text
from campaigns.faults.mock_bodies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MODEL,
    MockRefusalError,
    Wanted,
    error_body,
    mark_of,
    next_token,
    refusal_words,
    rendered,
    wanted,
    without_output,
)
from campaigns.faults.mock_faults import (
    ANSWERS,
    DONE,
    HTML,
    SLOW_FACTOR,
    STREAMS,
    Damage,
    Fault,
    ResetByFaultError,
    answer_of,
    event,
    reset,
)
from campaigns.faults.mock_port import MockPort

SSE: Final = {"Content-Type": "text/event-stream; charset=utf-8"}


@dataclass(slots=True, eq=False)
class _Running:
    """A request of generation."""

    want: Wanted
    answering: Answering
    context: list[int]
    computed: int = 0
    """Tokens of the prompt."""
    stalled: bool = False
    """It gets no token any more."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MockVllm:
    """One engine; public attributes may be changed at any time."""

    def __init__(
        self,
        *,
        iteration_s: float = 0.05,
        prefill_tokens: int = 8192,
        max_running: int = 256,
        context_tokens: int = 131_072,
        seed: str = "",
    ) -> None:
        """`prefill_tokens`: of prompts in one iteration. `seed` draws which requests are hit."""
        self.iteration_s, self.prefill_tokens = iteration_s, prefill_tokens
        self.max_running, self.context_tokens = max_running, context_tokens
        self._rng = Random(seed)
        self.fault: Fault | None = None
        self.spoiled: list[tuple[str, tuple[int, ...]]] = []
        """The kind and the prompt of every request that a fault hit."""
        self.begun: list[tuple[float, tuple[int, ...]]] = []
        """When each request of generation came, in seconds of the loop, and its prompt."""
        self.dropped: list[tuple[int, ...]] = []
        """Prompts of requests whose connections or generations were ended from outside."""
        self.iterations, self.iteration_tokens, self.generated = 0, 0, 0
        self.calls: Counter[str] = Counter()
        """Of each path."""
        self._running: dict[str, _Running] = {}
        self._waiting = 0
        """Requests of which the latest iteration computed nothing yet."""
        self._work = asyncio.Event()
        self._going = asyncio.Event()
        self._going.set()
        self._ids = itertools.count(1)
        self._port = MockPort()
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens, or did."""
        return f"http://127.0.0.1:{self._port.port}"

    @property
    def running(self) -> int:
        """Requests that run or wait."""
        return len(self._running)

    # -- its life ----------------------------------------------------------------------------------

    async def start(self) -> "MockVllm":
        """Begin to listen; returns itself."""
        app = web.Application(client_max_size=64 << 20, middlewares=[self._first])
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        for path in (CHAT, COMPLETIONS, GENERATE):
            app.router.add_post(path, self._generation(path))
        for path in (CHAT, COMPLETIONS):
            app.router.add_post(f"{path}/render", self._render(path))
            app.router.add_post(f"{path}/derender", self._derender(path))
        await self._port.start(app)
        self._loop_task = asyncio.create_task(self._iterate())
        return self

    async def close(self) -> None:
        self._going.set()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
        await self._port.close()

    async def begin(self, fault: Fault) -> None:
        """Have a fault from now on."""
        self.fault = fault
        match fault.kind:
            case "refuse" | "die":
                await self._port.refuse(cut=fault.kind == "die")
            case "silent":
                self._going.clear()

    async def end(self) -> None:
        """Be well again."""
        self.fault = None
        self._going.set()
        await self._port.listen()

    def _has(self, kind: str) -> bool:
        return self.fault is not None and self.fault.kind == kind

    def _hits(self, kinds: tuple[str, ...]) -> str:
        """The kind of fault that hits a request of this moment; "": none."""
        fault = self.fault
        if fault is None or fault.kind not in kinds or self._rng.random() >= fault.share:
            return ""
        return fault.kind

    # -- generation --------------------------------------------------------------------------------

    async def _iterate(self) -> None:
        while True:
            await self._work.wait()
            factor = SLOW_FACTOR if self._has("slow") else 1.0
            await asyncio.sleep(self.iteration_s * factor)
            await self._going.wait()
            if counted := self._iteration():
                self.iterations += 1
                self.iteration_tokens += counted
            self._waiting = sum(not each.computed for each in self._active())
            if not self._active():
                self._work.clear()

    def _iteration(self) -> int:
        """Compute once; return how many tokens are counted."""
        left, counted = self.prefill_tokens, 0
        for each in self._active()[: self.max_running]:
            prompt = len(each.want.ids)
            if each.computed < prompt:
                part = min(left, prompt - each.computed)
                each.computed += part
                left -= part
                if each.computed < prompt or not part:
                    continue
                counted += prompt
            each.context.append(next_token(each.context))
            each.answering.take(each.context[-1])
            each.changed.set()
            counted, self.generated = counted + 1, self.generated + 1
        return counted

    def _active(self) -> list[_Running]:
        """Those that get tokens or wait for a place, the earliest first."""
        return [r for r in self._running.values() if not r.stalled and r.answering.finish is None]

    def _generation(self, path: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            name = request.headers.get("X-Request-Id") or body.get("request_id")
            want = wanted(
                path,
                body,
                context_tokens=self.context_tokens,
                request_id=name or f"r{next(self._ids)}",
            )
            self.begun.append((asyncio.get_running_loop().time(), tuple(want.ids)))
            mark = mark_of(want.ids)
            if mark is not None and (mark[0] in ("", "render") or not want.stream):
                raise MockRefusalError(mark[1], refusal_words(mark[1], want.ids))
            if kind := self._hits(ANSWERS):
                self.spoiled.append((kind, tuple(want.ids)))
                return answer_of(kind, request)
            kind = self._hits(STREAMS)
            if kind:
                self.spoiled.append((kind, tuple(want.ids)))
            if kind and not want.stream:
                return answer_of("status 500", request)
            return await self._answer(request, want, kind)

        return handle

    async def _answer(self, request: web.Request, want: Wanted, kind: str) -> web.StreamResponse:
        running = _Running(want, Answering(want, cached=0), list(want.ids))
        self._running[want.request_id] = running
        self._work.set()
        try:
            if want.stream:
                damage = Damage(kind, self._rng, want.path, want.max_tokens) if kind else None
                return await self._stream(request, running, damage)
            while running.answering.finish is None:
                await self._more(running)
            return web.json_response(running.answering.whole())
        except (asyncio.CancelledError, ConnectionError):
            self.dropped.append(tuple(want.ids))
            raise
        finally:
            if self._running.get(want.request_id) is running:
                del self._running[want.request_id]

    async def _more(self, running: _Running) -> None:
        await running.changed.wait()
        running.changed.clear()

    async def _stream(
        self, request: web.Request, running: _Running, damage: Damage | None
    ) -> web.StreamResponse:
        want, answering = running.want, running.answering
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        mark, sent, first, chunk = mark_of(want.ids), 0, True, {}
        # A refusal in the middle comes at once where the first tokens were made elsewhere.
        begun = len(without_output(want.ids)) < len(want.ids)
        while answering.finish is None or sent < len(answering.made):
            if damage is not None and not damage.done and sent >= damage.after:
                running.stalled = damage.kind.startswith(("stall", "drip", "comments"))
            if damage is not None and await damage.before(sent, request, response):
                return response
            await self._more(running)
            if mark is not None and (mark[0] == "sse" or begun or sent):
                await response.write(event(_refused(mark[1], want)))
                await response.write(DONE)
                return response
            made = len(answering.made)
            if answering.finish is None and sent and made - sent < want.interval:
                continue
            if first and (head := answering.first()) is not None:
                await response.write(event(head))
            first, chunk = False, answering.chunk(sent)
            pieces = [event(chunk)] if damage is None else damage.damaged(chunk, sent, made)
            for piece in pieces:
                await response.write(piece)
            sent = made
            if answering.finish is not None:
                break
        if damage is not None:
            await damage.at_end(chunk, request, response)
        if (counts := answering.last()) is not None:
            await response.write(event(counts))
        await response.write(DONE)
        return response

    # -- other calls -------------------------------------------------------------------------------

    @web.middleware
    async def _first(self, request: web.Request, handler: Any) -> web.StreamResponse:
        await self._going.wait()
        self.calls[request.path] += 1
        try:
            response: web.StreamResponse = await handler(request)
        except MockRefusalError as refused:
            return web.json_response(refused.body, status=refused.status)
        except ResetByFaultError:
            return web.Response(status=500)  # which nothing carries any more
        return response

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._has("ill") else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": MODEL,
            "object": "model",
            "owned_by": "vllm",
            "root": f"/models/{MODEL}",
            "parent": None,
            "max_model_len": self.context_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self._has("metrics 500"):
            return web.json_response(error_body(500, "mock fault metrics"), status=500)
        if self._has("metrics html"):
            return web.Response(body=HTML, content_type="text/html")
        every = self._running.values()
        held = sum(each.computed + len(each.context) - len(each.want.ids) for each in every)
        text = metrics_text(
            running=self.running - self._waiting,
            waiting=self._waiting,
            usage=min(1.0, held / ((BLOCKS - 1) * BLOCK)),
            iterations=self.iterations,
            iteration_tokens=self.iteration_tokens,
        )
        return web.Response(text=text)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for name in body.get("request_ids", ()):
            running = self._running.get(name)
            if running is not None and running.answering.finish is None:
                self.dropped.append(tuple(running.want.ids))
                running.answering.abort()
                running.changed.set()
        return web.Response()

    def _render(self, path: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            if (spoiled := await self._spoiled_call("render", request)) is not None:
                return spoiled
            name = request.headers.get("X-Request-Id") or f"r{next(self._ids)}"
            want = wanted(path, body, context_tokens=self.context_tokens, request_id=name)
            mark = mark_of(want.ids)
            if mark is not None and mark[0] == "render":
                raise MockRefusalError(mark[1], refusal_words(mark[1], want.ids))
            made = rendered(body, want)
            return web.json_response(made if path == CHAT else [made])

        return handle

    def _derender(self, path: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            if (spoiled := await self._spoiled_call("derender", request)) is not None:
                return spoiled
            return web.json_response(derendered(path, body))

        return handle

    async def _spoiled_call(self, call: str, request: web.Request) -> web.Response | None:
        """What a fault of rendering answers; None without one."""
        kind = self._hits(tuple(f"{call} {how}" for how in ("500", "503", "html", "reset")))
        kind = kind or self._hits((f"{call} hang", f"{call} malformed"))
        match kind.rpartition(" ")[2]:
            case "500" | "503" as status:
                return answer_of(f"status {status}", request)
            case "html":
                return answer_of("html 200", request)
            case "malformed":
                return web.json_response({"token_ids": "none", "choices": None})
            case "reset":
                reset(request)
                raise ResetByFaultError
            case "hang":
                while True:
                    await asyncio.sleep(3600.0)
        return None


def _refused(status: int, want: Wanted) -> dict[str, Any]:
    return MockRefusalError(status, refusal_words(status, without_output(want.ids))).body
