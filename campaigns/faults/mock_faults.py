"""What an engine of `mock_vllm` may do wrong: kinds of faults, and how they damage answers."""

import asyncio
import json
import socket
import struct
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, Final

import msgspec
from aiohttp import web

from campaigns.faults.mock_bodies import GENERATE, error_body

HTML: Final = b"<html><body><h1>Bad Gateway</h1></body></html>"

ANSWERS: Final = (
    *("status 429", "status 500", "status 502", "status 503", "status 504"),
    *("html 500", "html 502", "html 200", "empty 500", "empty 200", "no object 200"),
    *("no object 500", "reset before headers"),
)
"""Instead of the answer of a generation."""
SILENT_STREAMS: Final = ("stall first", "stall middle", "drip", "comments")
"""Of one stream, that brings nothing or next to nothing while its engine computes."""
STREAMS: Final = (
    *("event 500 first", "event 500 middle", "malformed line", "truncated event", "wrong types"),
    *("wrong ids", "chunk twice", "no finish", "after finish", "reset middle", "reset end"),
    *SILENT_STREAMS,
)
"""Within the stream of a generation."""
ENGINES: Final = ("refuse", "die", "silent", "ill", "metrics 500", "metrics html")
"""Of a whole engine, for a time: no new connections; all connections cut as well; nothing answered
and nothing generated, as after SIGSTOP; `/health` 503; `/metrics` broken."""
COUNTERS_ONLY: Final = ("metrics 500", "metrics html")
"""Of an engine that works; only its counters cannot be read."""
CALLS: Final = tuple(
    f"{call} {how}"
    for call in ("render", "derender")
    for how in ("500", "503", "hang", "html", "malformed", "reset")
)
"""Of rendering and derendering."""
SLOW: Final = ("slow",)
"""No fault: iterations take many times longer, as those of a long prefill do."""
KINDS: Final = (*ANSWERS, *STREAMS, *ENGINES, *CALLS, *SLOW)

HARMLESS: Final = (
    *COUNTERS_ONLY,
    *("malformed line", "after finish", "chunk twice"),
    *SLOW,
)
"""Kinds that change no token and no end: not even a move is needed."""
BUSY: Final = ("status 429", "status 503")
STEP_FAULTS: Final = tuple(
    kind
    for kind in (*ANSWERS, *STREAMS)
    if kind not in BUSY and kind not in HARMLESS and not kind.startswith(("stall", "reset"))
)
"""Kinds that count as faults of the step: it ends with an error after two engines."""
SLOW_FACTOR: Final = 25.0
RETRY_AFTER_S: Final = 2
DRIP_S: Final = 3.0


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault of one engine for a time; all times are seconds from the beginning of a case."""

    kind: str
    engine: int
    at_s: float
    seconds: float
    share: float = 1.0
    """Of the requests that begin meanwhile, for kinds that concern single requests."""


class ResetByFaultError(Exception):
    """The connection was cut; nothing more can be sent."""


def reset(request: web.BaseRequest) -> None:
    """Cut a connection with TCP's RST, as a killed process with unread data does."""
    transport = request.transport
    if transport is None:
        return
    wire = transport.get_extra_info("socket")
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def answer_of(kind: str, request: web.BaseRequest) -> web.Response:
    """Return the answer that a kind of `ANSWERS` gives.

    Raises:
        ResetByFaultError: it gives none.
    """
    what, _, number = kind.rpartition(" ")
    if what == "reset before":
        reset(request)
        raise ResetByFaultError
    status = int(number)
    match what:
        case "html":
            return web.Response(status=status, body=HTML, content_type="text/html")
        case "empty":
            return web.Response(status=status)
        case "no object":
            return web.json_response(["nothing", None], status=status)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else None
    kinds: Mapping[int, str] = {429: "RateLimitError", 503: "ServiceUnavailableError"}
    body = error_body(status, f"mock fault {kind}", kind=kinds.get(status, "InternalServerError"))
    return web.json_response(body, status=status, headers=headers)


def event(value: Any) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE: Final = b"data: [DONE]\n\n"


class Damage:
    """Damages one stream."""

    def __init__(self, kind: str, rng: Random, path: str, tokens: int) -> None:
        """`tokens`: how many the stream will have at most."""
        self.kind, self._path = kind, path
        first = kind.endswith("first")
        self.after = 0 if first else rng.randint(min(1, tokens - 1), max(0, tokens - 1))
        """It happens when so many tokens have been sent."""
        self.done = False

    async def before(
        self, made: int, request: web.BaseRequest, response: web.StreamResponse
    ) -> bool:
        """Act before the chunk of the tokens after number `made`; return whether this is the end.

        Raises:
            ResetByFaultError: the connection was cut.
        """
        if self.done or made < self.after:
            return False
        match self.kind:
            case "event 500 first" | "event 500 middle":
                await response.write(event(error_body(500, f"mock fault {self.kind}")))
                await response.write(DONE)
                return True
            case "no finish":
                return True
            case "reset middle":
                reset(request)
                raise ResetByFaultError
            case "stall first" | "stall middle":
                await _for_ever(None, b"")
            case "drip":
                await _for_ever(response, b"\n")
            case "comments":
                await _for_ever(response, b": still here\n\n")
            case "malformed line":
                self.done = True
                await response.write(b"garbage {]\n\n")
        return False

    def damaged(self, chunk: dict[str, Any], before: int, after: int) -> Iterator[bytes]:
        """Return what is sent in place of the chunk of tokens `before` to `after`."""
        whole = event(chunk)
        if self.done or after <= self.after:
            yield whole
            return
        match self.kind:
            case "truncated event":
                self.done = True
                yield whole[: len(whole) // 2] + b"\n\n"
            case "wrong types":
                self.done = True
                yield event({**chunk, "choices": "none"})
            case "wrong ids":
                self.done = True
                (choice,) = chunk["choices"]
                text = {name: choice[name] for name in ("delta", "text") if name in choice}
                text = {n: "t-7 " if n == "text" else {"content": "t-7 "} for n in text}
                yield event({**chunk, "choices": [{**choice, **text, "token_ids": [-7, "x"]}]})
            case "chunk twice":
                self.done = True
                (choice,) = chunk["choices"]
                yield event({**chunk, "choices": [{**choice, "finish_reason": None}]})
                yield whole
            case _:
                yield whole

    async def at_end(
        self, chunk: dict[str, Any], request: web.BaseRequest, response: web.StreamResponse
    ) -> None:
        """Act between the last token and the counts.

        Raises:
            ResetByFaultError: the connection was cut.
        """
        if self.kind == "after finish":
            (choice,) = chunk["choices"]
            more = {**choice, "finish_reason": None}
            more |= {"token_ids": [999]} if self._path == GENERATE else {}
            await response.write(event({**chunk, "choices": [more]}))
        elif self.kind == "reset end":
            reset(request)
            raise ResetByFaultError


async def _for_ever(response: web.StreamResponse | None, data: bytes) -> None:
    """Send data again and again, or nothing; ends when the client goes."""
    while True:
        await asyncio.sleep(DRIP_S)
        if response is not None:
            await response.write(data)
