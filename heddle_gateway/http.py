"""The gateway's HTTP/1.1 server: requests that handlers read, and the answers that they write."""

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from functools import cached_property
from http import HTTPStatus
from typing import Any, Final, cast
from urllib.parse import parse_qsl, urlsplit

import httptools

from heddle_gateway.client_step import ClientStep
from heddle_runtime.vllm_http.probe import GATEWAY_HEADER

BACKLOG: Final = 65_535
"""Connections that wait to be accepted; the system has a limit of its own."""
HEAD_BYTES: Final = 64 << 10
"""Of a request's head."""
KEEP_ALIVE_S: Final = 75.0
"""A connection without a request is closed after this."""
LINGER_S: Final = 5.0
"""What comes of a body after its answer is dropped for so long: else clients may not see that."""
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}
_LOG: Final = logging.getLogger(__name__)


class RequestError(Exception):
    """A body that cannot be read; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Headers(dict[str, str]):
    """Headers, by names in lower case; those that come twice are joined."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())


class Query(dict[str, str]):
    """Fields of a query, the first of each name."""

    def __init__(self, text: str) -> None:
        self._all = parse_qsl(text, keep_blank_values=True)
        super().__init__(reversed(self._all))

    def every(self, name: str) -> list[str]:
        """Return all values of a field."""
        return [value for each, value in self._all if each == name]


class Request:
    """A request; its body may still come."""

    tenant = ""
    """Who sent it."""
    steps: list[ClientStep] | None = None
    """What was generated for it."""

    def __init__(
        self,
        connection: "Connection",
        method: str,
        target: str,
        headers: Headers,
        *,
        http_1_0: bool = False,
        keep_alive: bool = True,
    ) -> None:
        self.connection, self.method, self.target, self.headers = (
            connection,
            method,
            target,
            headers,
        )
        self.http_1_0, self.keep_alive = http_1_0, keep_alive
        self.path, _, self.query_string = target.partition("?")
        self.match_info: Mapping[str, str] = {}
        self.complete = False
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: RequestError | None = None
        self._read: bytes | None = None
        self._came: asyncio.Future[None] | None = None

    @cached_property
    def query(self) -> Query:
        return Query(self.query_string)

    @property
    def transport(self) -> asyncio.Transport | None:
        """None: its client is gone."""
        return self.connection.transport

    @property
    def remote(self) -> str | None:
        """The address of its client."""
        peer = self.transport and self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else None

    @property
    def content_length(self) -> int:
        """Of its body, as far as that is said."""
        return int(self.headers.get("content-length", 0))

    @property
    def has_body(self) -> bool:
        return self.content_length > 0 or "transfer-encoding" in self.headers

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        kind: str = self.headers.get("content-type", "")
        return kind.partition(";")[0].strip().lower()

    def feed(self, data: bytes, limit: int) -> None:
        """Take some of its body."""
        self._size += len(data)
        if self._size > limit:
            self.fail(RequestError(413, f"the body is larger than {limit:,} bytes"))
        elif self._error is None:
            self._pieces.append(data)

    def end(self) -> None:
        """Its body is complete."""
        self.complete = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Its body cannot be read."""
        self._error = error
        self._pieces.clear()
        self._wake()

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def read(self, limit: int, limit_s: float) -> bytes:
        """Return its body, unpacked.

        Raises:
            RequestError: it is larger than `limit` bytes, is broken, or does not come in `limit_s`.
        """
        if self._read is not None:
            return self._read
        if self.content_length > limit:
            raise RequestError(413, f"the body is larger than {limit:,} bytes")
        if not (self.complete or self._error):
            if "expect" in self.headers:
                self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._came = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(limit_s):
                    await self._came
            except TimeoutError:
                text = f"the body did not come in {limit_s:g} s"
                raise RequestError(408, text) from None
        if self._error is not None:
            raise self._error
        packed = b"".join(self._pieces)
        self._pieces.clear()
        self._read = _unpacked(packed, self.headers.get("content-encoding", ""), limit)
        return self._read


def _unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    if encoding.lower() not in ("gzip", "deflate"):
        return data
    unpack = zlib.decompressobj(47 if encoding.lower() == "gzip" else 15)
    try:
        found = unpack.decompress(data, limit + 1)
    except zlib.error as error:
        raise RequestError(400, f"the body cannot be read: {error}") from None
    if len(found) > limit:
        raise RequestError(413, f"the body is larger than {limit:,} bytes")
    return found


class Response:
    """A whole answer."""

    def __init__(
        self, body: bytes = b"", *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self._body = status, body
        self._headers = dict(headers or {})

    def _head(self, request: Request, length: str) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in self._headers.items()])
        if lines.count("\n") != len(self._headers):
            raise ValueError("a header has more than one line")
        if not request.keep_alive:
            length += "Connection: close\r\n"
        elif request.http_1_0:
            length += "Connection: keep-alive\r\n"
        status = f"HTTP/1.1 {self.status} {_REASONS.get(self.status, '')}\r\n"
        return f"{status}{_dated(int(time.time()))}{lines}{length}\r\n".encode()

    async def send(self, request: Request) -> None:
        """Send what has not been sent."""
        request.keep_alive = request.keep_alive and request.complete
        head = self._head(request, f"Content-Length: {len(self._body)}\r\n")
        request.connection.write(head + self._body)
        await request.connection.drained()


_date: tuple[int, str] = 0, ""


def _dated(now_s: int) -> str:
    """Lines of every answer."""
    global _date
    if _date[0] != now_s:
        _date = now_s, f"Date: {formatdate(now_s, usegmt=True)}\r\n{GATEWAY_HEADER}: heddle\r\n"
    return _date[1]


class Stream(Response):
    """An answer that is sent as it is made."""

    def __init__(
        self, request: Request, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status=status, headers=headers)
        self._request = request
        self.begun = False

    async def begin(self, data: bytes = b"") -> None:
        """Send the head, if it has not been sent, and some data."""
        request, head = self._request, b""
        if not self.begun:
            self.begun = True
            request.keep_alive = request.keep_alive and request.complete and not request.http_1_0
            chunked = "" if request.http_1_0 else "Transfer-Encoding: chunked\r\n"
            head = self._head(request, chunked)
        if data and not request.http_1_0:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        request.connection.write(head + data)
        await request.connection.drained()

    async def send(self, request: Request) -> None:
        """Send the end."""
        await self.begin()
        if not request.http_1_0:
            request.connection.write(b"0\r\n\r\n")


Handle = Callable[[Request], Awaitable[Response]]


class Connection(asyncio.Protocol):
    """A client's connection; its parser calls the methods `on_...`."""

    def __init__(self, server: "Server") -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self.current: asyncio.Task[None] | None = None
        """The request under way."""
        self._coming: Request | None = None
        """The request whose body comes."""
        self._in_head, self._head_bytes = False, 0
        self._drops = False
        """Whether nothing that comes is read any more."""
        self._full: asyncio.Future[None] | None = None
        self.requested = False
        self.since_s = self._loop.time()
        """Its beginning, or the end of its last answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._server.connections.discard(self)
        self._waiting.clear()
        if self.current is not None:
            self.current.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._drops:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._drops = True  # the request is answered, and what follows is another protocol
            self._last()
        except httptools.HttpParserError as error:
            self._refuse(400, f"the request is no HTTP: {error.__context__ or error}")
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(400, f"the head of the request has more than {HEAD_BYTES} bytes")

    def _last(self) -> None:
        """The request that came last is the last one."""
        for request in (self._coming, *self._waiting):
            if request is not None:
                request.keep_alive = False

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, after those before it."""
        if self._drops:
            return
        self._drops = True
        self._waiting.clear()
        if self._coming is not None and not self._coming.complete:
            self._coming.fail(RequestError(status, message))
        if self._coming is not None:
            self._coming.keep_alive = False
        if self.current is None and self.transport is not None:
            text, reason = message.encode(errors="replace"), _REASONS[status]
            head = f"HTTP/1.0 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: "
            self.transport.write(head.encode() + b"%d\r\n\r\n%b" % (len(text), text))
            self._linger()

    # -- of the parser -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target, self._headers, self._size = b"", Headers(), 0
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > HEAD_BYTES:
            raise ValueError("its URL is too long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > HEAD_BYTES:
            raise ValueError("its head is too long")
        key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
        before = dict.get(self._headers, key)
        self._headers[key] = text if before is None else f"{before}, {text}"

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        target = self._target.decode("utf-8", "surrogateescape")
        if not target.startswith("/"):
            parts = urlsplit(target)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = self._coming = Request(
            self,
            self._parser.get_method().decode(),
            target,
            self._headers,
            http_1_0=self._parser.get_http_version() == "1.0",
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
        if self._coming is not None:
            self._coming.feed(data, self._server.body_bytes)

    def on_message_complete(self) -> None:
        if self._coming is not None:
            self._coming.end()
            self._coming = None

    # -- answers -----------------------------------------------------------------------------------

    def _begin(self, request: Request) -> None:
        self.current = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._server.handle(request)
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
            self.current, self.since_s = None, self._loop.time()
            self._next(request)

    def _next(self, last: Request) -> None:
        if self.transport is None:
            return
        if not last.keep_alive or self._drops or self._server.ends:
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


class Server:
    """What the connections of a server share."""

    def __init__(self, handle: Handle, *, body_bytes: int) -> None:
        self.handle, self.body_bytes = handle, body_bytes
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
    server, loop = Server(handle, body_bytes=body_bytes), asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Connection(server), host, port, backlog=BACKLOG)
    closing = loop.create_task(server.close_silent(head_s))
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        closing.cancel()
        listener.close()
        await server.end(grace_s)
