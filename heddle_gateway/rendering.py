"""Request bodies to tokens and back. The gateway has no tokenizer: an engine's own code does it."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any, Final, Protocol

from heddle_gateway.errors import no_engine
from heddle_runtime.generation import GenerationEnd, Refusal, Rendered, RenderError
from heddle_runtime.vllm_http.launcher import HttpLauncher, Registered
from heddle_runtime.vllm_http.probe import PROBES, EndpointFacts
from heddle_runtime.vllm_http.rendering import HttpRenderer

AGAIN_S: Final = 0.25
"""Between two attempts to render while no engine can."""
HEDGE_S: Final = 1.0
"""After so long another engine is asked to render the same; what comes first counts."""


class Renderer(Protocol):
    """Makes prompts of bodies, and responses of generated tokens.

    `endpoint` is ``/v1/chat/completions`` or ``/v1/completions``.
    """

    async def render(
        self, endpoint: str, body: dict[str, Any], read: Callable[[bytes], Rendered | None]
    ) -> Rendered:
        """Make the prompt of a request; `read` may read its ids from JSON.

        Raises:
            RenderError: the body is refused.
        """
        ...

    async def derender(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        output_ids: Sequence[int],
        end: GenerationEnd,
    ) -> dict[str, Any]:
        """Make the whole response object, parsed tool calls included.

        Raises:
            RenderError: the tokens cannot be made a response.
        """
        ...

    async def derender_more(
        self,
        endpoint: str,
        body: dict[str, Any],
        rendered: Rendered,
        new_ids: Sequence[int],
        state: Any,
        end: GenerationEnd | None,
        logprobs: Sequence[Any] = (),
    ) -> tuple[dict[str, Any], Any]:
        """Make the choice of a stream's event of further tokens, and the state after them.

        `state` is None first; `end` comes with the last tokens.

        Raises:
            RenderError: it could not be made.
        """
        ...

    async def refusal(self, endpoint: str, body: bytes, content_type: str) -> Refusal | None:
        """Return what vLLM says of a body that it refuses, however it is written.

        Raises:
            RenderError: it could not be asked.
        """
        ...

    async def call(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON answer to ``/tokenize``, ``/detokenize`` or ``*/render``.

        Raises:
            RenderError: the engine refused it.
        """
        ...


class RenderingEngines:
    """Renders at registered engines that work, in rotation; implements `Renderer`.

    What fails at one is asked of another before a client hears of it.
    """

    def __init__(self, launcher: HttpLauncher, *, wait_s: float = 300.0) -> None:
        """While no engine is registered, calls wait for `wait_s`."""
        self._launcher, self._wait_s = launcher, wait_s
        self._calls = count()

    def facts(self) -> EndpointFacts | None:
        """What engines are; None while none is registered."""
        registered = self._launcher.registered
        for each in registered:
            if len(each.facts.answers) == len(PROBES):
                return each.facts
        every = [each.facts for each in (*self._launcher.usable, *registered)]
        return max(every, key=lambda facts: len(facts.answers), default=None)

    async def render(self, *body: Any) -> Rendered:
        found: Rendered = await self._first("render", body)
        return found

    async def derender(self, *generated: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._first("derender", generated, ours=True)
        return found

    async def derender_more(self, *generated: Any) -> tuple[dict[str, Any], Any]:
        """Make the choice of a stream's event."""
        found: tuple[dict[str, Any], Any] = await self._first("derender_more", generated, ours=True)
        return found

    async def refusal(self, *body: Any) -> Refusal | None:
        """Return what an engine says of a body that it refuses."""
        found: Refusal | None = await self._first("refusal", body)
        return found

    async def call(self, *call: Any) -> Any:
        return await self._first("call", call)

    async def _first(self, method: str, args: Sequence[Any], *, ours: bool = False) -> Any:
        """Call engines, the next first, until one answers.

        `ours`: whether a refusal is no client's fault, so that another engine is asked too.
        """
        until_s = asyncio.get_running_loop().time() + self._wait_s
        while True:
            if not self._launcher.registered:
                try:
                    async with asyncio.timeout(self._wait_s):
                        await self._launcher.any_registered()
                except TimeoutError:
                    raise no_engine(self._wait_s) from None
            try:
                return await self._any(method, args, ours=ours)
            except RenderError as failed:
                # Where none can be reached, or all are busy, one may come back.
                passing = failed.status in (429, 503)
                if not passing or asyncio.get_running_loop().time() > until_s:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _any(self, method: str, args: Sequence[Any], *, ours: bool) -> Any:
        """Call the engines that work, then the others, until one answers.

        Raises:
            RenderError: none did; the answer of the one that was reached last, if any was.
        """
        body = args[1]
        model = body.get("model") if isinstance(body, dict) else None
        engines = self._by_need(model)
        following = next(engines, None)
        calls: dict[asyncio.Task[Any], None] = {}
        failed: RenderError | None = None
        try:
            while following is not None or calls:
                if following is not None:
                    renderer = HttpRenderer(following.endpoint, generates=True)
                    call = asyncio.ensure_future(getattr(renderer, method)(*args))
                    calls[call] = None
                    following = next(engines, None)
                await _any_ended(calls, None if following is None else HEDGE_S)
                for call in [each for each in calls if each.done()]:
                    del calls[call]
                    try:
                        return call.result()
                    except RenderError as refused:
                        if not ours and refused.status < 500 and refused.status != 429:
                            raise
                        if failed is None or refused.status != 503:
                            failed = refused
        finally:
            for call in calls:
                call.cancel()
        raise failed or no_engine(self._wait_s)

    def _by_need(self, model: Any) -> Iterator[Registered]:
        """Yield the engines that can render for a model, those that work before the others."""
        registered = self._launcher.registered
        start = next(self._calls) % max(1, len(registered))
        engines = (*registered[start:], *registered[:start])
        engines = (
            tuple(e for e in engines if e.facts.adapters and model in e.facts.adapters) or engines
        )
        tried = set[str]()
        for each in engines:
            if each.engine is not None and each.engine.takes_steps:
                tried.add(each.url)
                yield each
        yield from (each for each in engines if each.url not in tried)


async def _any_ended(calls: Iterable[asyncio.Task[Any]], limit_s: float | None) -> None:
    """Wait until a call has ended, `limit_s` at most; `asyncio.wait` takes twice as long."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def wake(call: asyncio.Task[Any] | None) -> None:
        if not ended.done():
            ended.set_result(None)

    for call in calls:
        call.add_done_callback(wake)
    timer = None if limit_s is None else loop.call_later(limit_s, wake, None)
    try:
        await ended
    finally:
        if timer is not None:
            timer.cancel()
        for call in calls:
            call.remove_done_callback(wake)
