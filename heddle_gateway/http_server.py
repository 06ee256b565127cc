"""The gateway's HTTP/1.1 server: what its connections take in, and when they end."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools

from heddle_gateway.http import REASONS, Headers, HttpRequest, Receiving, RequestError, Response

BACKLOG: Final = 65_535
"""Connections that wait to be accepted; the system has a limit of its own."""
HEAD_BYTES: Final = 64 << 10
"""Of a request's head."""
KEEP_ALIVE_S: Final = 75.0
"""A connection without a request is closed after this."""
LINGER_S: Final = 5.0
"""What comes of a body after its answer is dropped for so long: else clients may not see that."""
_LOG: Final = logging.getLogger(__name__)

_CGROUPS: Final = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"

Handle = Callable[[HttpRequest], Awaitable[Response]]


def _share_of_memory(limits: Iterable[str] = _CGROUPS) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in limits:
        with suppress(OSError, ValueError):  # there may be no such file, or no limit in it
            memory = min(memory, int(Path(limit).read_text()))
    return max(384 << 20, memory // 16)


RECEIVED_BYTES: Final = _share_of_memory()
"""Of small bodies until their answers, and as much of large ones; four may have the most."""


class Connection(asyncio.Protocol):
    """A client's connection; its parser calls the methods `on_...`."""

    def __init__(self, others: "OpenConnections") -> None:
        self._others, self._loop = others, asyncio.get_running_loop()
        self.receiving = others.receiving
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self.current: asyncio.Task[None] | None = None
        """The request under way."""
        self._coming: HttpRequest | None = None
        """The request whose body comes."""
        self._came, self._since_came = False, 0
        """Whether the data brought a whole head or some of a body; bytes since some did."""
        self._drops = False
        """Whether nothing that comes is read any more."""
        self._full: asyncio.Future[None] | None = None
        self.requested = False
        self.since_s = self._loop.time()
        """Its beginning, or the end of its last answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._others.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._others.connections.discard(self)
        self._fail(400, "the client is gone")
        # The parser has this connection's methods: bodies would stay until garbage is collected.
        self._drops, self._coming = True, None
        del self._parser
        if self.current is not None:
            self.current.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._drops:
            return
        self._came = False
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            self._refuse(400, f"the request is no HTTP: {error.__context__ or error}")
        self._since_came = 0 if self._came else self._since_came + len(data)
        if self._since_came > HEAD_BYTES:
            self._refuse(400, f"the request has more than {HEAD_BYTES} bytes outside its body")

    def _parse(self, data: memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    self._drops = True  # it is answered, and what follows is another protocol
                    return
                data = data[offer.args[0] :]
                # With the offer, httptools takes the body for the other protocol's.
                head, self._parser = self._offerless(), httptools.HttpRequestParser(self)
                self._parser.feed_data(head)

    def _offerless(self) -> bytes:
        """Return the head that came without its offer of another protocol."""
        version = self._parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._target, version)
        del self._headers["upgrade"]
        lines = "".join([f"{name}: {value}\r\n" for name, value in self._headers.items()])
        return line + lines.encode() + b"\r\n"

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, after those before it."""
        if self._drops:
            return
        self._drops = True
        self._fail(status, message)
        if self._coming is not None:
            self._coming.keep_alive = False
        if self.current is None and self.transport is not None:
            text, reason = message.encode(errors="replace"), REASONS[status]
            head = f"HTTP/1.0 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: "
            self.transport.write(head.encode() + b"%d\r\n\r\n%b" % (len(text), text))
            self._linger()

    def _fail(self, status: int, message: str) -> None:
        """Drop the requests that wait, and the body that comes."""
        for request in (*self._waiting, self._coming):
            if request is not None:
                request.fail(RequestError(status, message))
        self._waiting.clear()

    # -- of the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target, self._headers, self._size = b"", Headers(), 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > HEAD_BYTES:
            raise ValueError("its URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > HEAD_BYTES:
            raise ValueError("its head is too long")
        if self._coming is not None:
            return  # a trailer
        key, text = name.decode("latin-1").lower(), value.decode("utf-8", "replace")
        before = dict.get(self._headers, key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        method = self._parser.get_method().decode()
        if self._parser.should_upgrade() and method != "CONNECT":
            return  # it comes again
        self._came = True
        target = self._target.decode("utf-8", "surrogateescape")
        if not target.startswith("/"):
            parts = urlsplit(target)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = self._coming = HttpRequest(
            self,
            method,
            target,
            self._headers,
            http_1_0=self._parser.get_http_version() < "1.1",
            keep_alive=self._parser.should_keep_alive(),
        )
        self.requested = True
        if self.current is None:
            self._begin(request)
        else:
            self._waiting.append(request)
            if self.transport is not None:
                self.transport.pause_reading()

    def on_body(self, data: bytes) -> None:
        self._came = True
        if self._coming is not None:
            self._coming.feed(data, self._others.body_bytes)

    def on_message_complete(self) -> None:
        if self._coming is not None:
            self._coming.end()
            self._coming = None

    # -- answers -----------------------------------------------------------------------------------

    def _begin(self, request: HttpRequest) -> None:
        self.current = self._loop.create_task(self._answer(request))

    async def _answer(self, request: HttpRequest) -> None:
        try:
            response = await self._others.handle(request)
            await response.send(request)
        except ConnectionError:
            request.keep_alive = False  # the client is gone
        except asyncio.CancelledError:
            request.keep_alive = False
            raise
        except Exception:
            request.keep_alive = False
            _LOG.exception("a request to %s failed", request.path)
        finally:
            request.release()
            self.current, self.since_s = None, self._loop.time()
            self._next(request)

    def _next(self, last: HttpRequest) -> None:
        if self.transport is None or self.transport.is_closing():
            return  # a task that is cancelled before it begins would not release its body
        if not last.keep_alive or self._drops or self._others.ends:
            if last.complete:
                self.transport.close()
            else:
                self._linger()
        elif self._waiting:
            self._begin(self._waiting.popleft())
            if not self._waiting:
                self.transport.resume_reading()

    def _linger(self) -> None:
        """Close it when the client has, or after some time."""
        self._drops = True
        if self.transport is not None:
            with suppress(OSError, RuntimeError):
                self.transport.write_eof()
            self._loop.call_later(LINGER_S, self.close)

    def close(self) -> None:
        """Send what is written, and close."""
        if self.transport is not None:
            self.transport.close()

    def write(self, data: bytes) -> None:
        """Send data.

        Raises:
            ConnectionResetError: the client is gone.
        """
        if self.transport is None or self.transport.is_closing():
            raise ConnectionResetError
        self.transport.write(data)

    def pause_writing(self) -> None:
        self._full = self._loop.create_future()

    def resume_writing(self) -> None:
        full, self._full = self._full, None
        if full is not None and not full.done():
            full.set_result(None)

    async def drained(self) -> None:
        """Wait until the client has read enough for more to be written."""
        if self._full is not None:
            await self._full


class OpenConnections:
    """What the connections of a server share."""

    def __init__(self, handle: Handle, *, body_bytes: int) -> None:
        self.handle, self.body_bytes = handle, body_bytes
        self.receiving = Receiving(max(RECEIVED_BYTES, 4 * body_bytes))
        self.connections: set[Connection] = set()
        self.ends = False

    async def close_silent(self, limit_s: float) -> None:
        """Close connections that have sent no request head for `limit_s`, or none for longer."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(limit_s, KEEP_ALIVE_S / 4))
            now_s = loop.time()
            for each in list(self.connections):
                most_s = KEEP_ALIVE_S if each.requested else limit_s
                if each.current is None and now_s - each.since_s > most_s:
                    if each.transport is not None and each.transport.is_closing():
                        each.transport.abort()  # its client does not read its answer
                    each.close()

    async def end(self, grace_s: float) -> None:
        """Wait for the requests under way, `grace_s` at most, and close all connections."""
        self.ends = True
        under_way = [each.current for each in self.connections if each.current is not None]
        for each in list(self.connections):
            if each.current is None:
                each.close()
        if under_way:
            await asyncio.wait(under_way, timeout=grace_s)
        for left in range(10, -1, -1):
            for each in list(self.connections):
                if each.transport is not None and not (left and each.current is None):
                    each.transport.abort()
            if not self.connections:
                break
            await asyncio.sleep(0.01)
        await asyncio.wait([*under_way, asyncio.ensure_future(asyncio.sleep(0))])


@asynccontextmanager
async def serving(
    handle: Handle, *, host: str, port: int, body_bytes: int, head_s: float, grace_s: float
) -> AsyncIterator[int]:
    """Answer requests inside the block; yields the port, which is a free one for 0.

    Raises:
        OSError: the address cannot be used.
    """
    opened, loop = OpenConnections(handle, body_bytes=body_bytes), asyncio.get_running_loop()
    where: dict[str, Any] = {"host": host, "port": port}
    if host == "::":  # which asyncio takes for IPv6 alone, and vLLM for both
        dual = socket.has_dualstack_ipv6()
        made = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=dual)
        where = {"sock": made}
    listener = await loop.create_server(lambda: Connection(opened), **where, backlog=BACKLOG)
    closing = loop.create_task(opened.close_silent(head_s))
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        closing.cancel()
        listener.close()
        await opened.end(grace_s)
