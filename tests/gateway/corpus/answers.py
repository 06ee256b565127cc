"""Answers of a server as they come: status, type, body, and the events of a stream."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from tests.gateway.corpus.request import Request

LIMIT_S: Final = 300.0
"""Of one answer, on a machine that does other things too."""
DONE: Final = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client received; `status` is 0 if that was nothing."""

    status: int
    media_type: str
    text: str
    received_s: float
    """Time of day of its end, in seconds since 1970."""

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return self.media_type == "text/event-stream"

    @property
    def events(self) -> list[Any]:
        """Data of its events: JSON, or a text where it is none.

        Lines that begin with a colon are comments, and several lines of data are one text, as the
        HTML standard has it ("server-sent events").
        """
        events: list[Any] = []
        data: list[str] = []
        for line in (*self.text.replace("\r\n", "\n").split("\n"), ""):
            if line.startswith("data:"):
                data.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and data:
                events.append(_json_or_text("\n".join(data)))
                data = []
        return events

    @property
    def json(self) -> Any:
        """Its body as JSON, or as a text where it is none."""
        return _json_or_text(self.text)


async def ask(session: aiohttp.ClientSession, url: str, request: Request) -> Answer:
    """Send a request; a server that does not answer gives an answer of status 0."""
    try:
        async with session.request(
            request.method,
            url + request.path,
            data=request.content or None,
            headers=request.headers,
            # Without it aiohttp names a type of its own where a request has none.
            skip_auto_headers=("Content-Type", "User-Agent", "Accept"),
        ) as response:
            content = await response.read()
            return Answer(
                status=response.status,
                media_type=response.headers.get("Content-Type", "").partition(";")[0].strip(),
                text=content.decode(errors="backslashreplace"),
                received_s=time.time(),
            )
    except (aiohttp.ClientError, TimeoutError) as error:
        text = f"{type(error).__name__}: {error}"
        return Answer(status=0, media_type="", text=text, received_s=time.time())


async def ask_all(url: str, requests: Sequence[Request], *, at_once: int = 1) -> list[Answer]:
    """Send requests in their order, `at_once` of them at a time."""
    limit = asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(request: Request) -> Answer:
            async with limit:
                return await ask(session, url, request)

        return list(await asyncio.gather(*(one(request) for request in requests)))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
