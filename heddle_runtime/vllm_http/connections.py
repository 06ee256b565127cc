"""HTTP/1.1 calls by pooled connections: requests are whole, answers whole or as they come."""

import asyncio
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, cast

import httptools

CONNECT_LIMIT_S: Final = 5.0
IDLE_S: Final = 4.0
"""A connection that was idle for longer is not used again: vLLM's server closes it after 5."""
HEAD_BYTES: Final = 64 << 10
"""Of an answer outside its body: its head, and its trailers."""
_AHEAD_BYTES: Final = 1 << 20
"""Of an answer that nobody has taken yet: then its server has to wait."""


class BrokenError(Exception):
    """A call broke off, or its answer is no HTTP; the message says how."""


class ConnectError(BrokenError):
    """There is no connection; the message is that of the system."""


class Origin(NamedTuple):
    """Where connections go."""

    host: str
    port: int
    tls: bool


class _Connection(asyncio.Protocol):
    """A connection that makes one call at a time; its parser calls the methods `on_...`."""

    def __init__(self, pool: "Connections", idle: "dict[_Connection, None]") -> None:
        self._pool, self._idle, self._loop = pool, idle, asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self.paused = self._reusable = False
        self.received_s = 0.0
        self.error: BaseException | None = None
        self.complete = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.open.add(self)

    @property
    def closes(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes) -> None:
        """Begin a call."""
        self.status, self.headers, self.pieces = 0, dict[str, str](), list[bytes]()
        self.size = self._outside_bytes = 0
        self.complete, self.received_s = False, self._loop.time()
        if self._transport is None or self.closes:
            self.fail(BrokenError("the server has closed the connection"))
        else:
            self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.received_s = self._loop.time()
        self._outside_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(BrokenError(f"its answer is no HTTP: {error}"))
            return
        if self._outside_bytes > HEAD_BYTES:
            text = f"its answer has more than {HEAD_BYTES} bytes outside its body"
            self.fail(BrokenError(text))
            return
        if not self.status:
            return
        if self.size > _AHEAD_BYTES and not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._pool.open.discard(self)
        self._idle.pop(self, None)
        if self.complete:
            return
        sized = self.headers.keys() & {"content-length", "transfer-encoding"}
        if self.status and exc is None and self.error is None and not sized:
            self.complete = True
        self.fail(BrokenError(str(exc or "the server has closed the connection")))
        self._wake()

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            text = value.decode("utf-8", "surrogateescape")
            self.headers[name.decode("latin-1").lower()] = text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
        else:
            self.status, self._reusable = status, self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._outside_bytes = 0
        self.pieces.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.complete = self.status > 0

    def fail(self, error: BaseException) -> None:
        """End the call, and the connection with it."""
        if self.error is None and not self.complete:
            self.error = error
        self._wake()
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until something of the answer has come.

        Raises:
            BrokenError: nothing will.
            TimeoutError: it took too long.
        """
        if self.error is not None:
            raise self.error
        self._waiter = self._loop.create_future()
        await self._waiter
        if self.error is not None and not (self.pieces and self.status):
            raise self.error

    def take(self) -> bytes:
        """Return what has come of the answer's body."""
        pieces, self.pieces, self.size = self.pieces, [], 0
        if self.paused and self._transport is not None:
            self.paused, self.received_s = False, self._loop.time()
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def release(self) -> None:
        """The call is over: keep the connection, if another one can use it."""
        whole = self.complete and self.error is None and self._transport is not None
        if whole and self._reusable and not self.paused:
            self._idle[self] = None
        elif self._transport is not None:
            self._transport.abort()


class HttpCall:
    """A call, to be used by `async with`; then status and headers (lower case) are there."""

    def __init__(
        self,
        pool: "Connections",
        origin: Origin,
        request: bytes,
        *,
        limit_s: float | None,
        silence_s: float | None = None,
    ) -> None:
        """`limit_s` is of the whole call, `silence_s` of each wait for bytes."""
        self._pool, self._origin, self._request = pool, origin, request
        self._limit_s, self._silence_s = limit_s, silence_s
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "HttpCall":
        """Send the request, and wait for the head of the answer.

        Raises:
            ConnectError: it cannot be connected.
            BrokenError: there is no answer.
            TimeoutError: it took too long.
        """
        loop = asyncio.get_running_loop()
        self._until_s = float("inf") if self._limit_s is None else loop.time() + self._limit_s
        while True:
            connection = self._pool.idle(self._origin)
            used = connection is not None
            if connection is None:
                connection = await self._pool.connect(self._origin, self._limit_s)
            self._connection = connection
            try:
                connection.send(self._request)
                if self._request[:4] != b"GET ":  # it is sent once, and its answer may take hours
                    self._request = b""
                if self._timer is None and (self._limit_s or self._silence_s):
                    self._look(loop)
                while not connection.status:
                    await connection.wait()
            except BaseException as error:
                self._end()
                # Its server may have closed it just then.
                stale = used and isinstance(error, BrokenError) and self._request[:4] == b"GET "
                if not stale:
                    raise
            else:
                return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection.release()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the call if it takes too long; else look again when it may."""
        until_s = self._until_s
        if self._silence_s is not None:
            received_s = loop.time() if self._connection.paused else self._connection.received_s
            until_s = min(until_s, received_s + self._silence_s)
        if (left_s := until_s - loop.time()) > 0:
            self._timer = loop.call_later(left_s, self._look, loop)
        else:
            self._connection.fail(TimeoutError())

    @property
    def status(self) -> int:
        return self._connection.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._connection.headers

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def some(self) -> bytes:
        """Return what has come of the body since the last call; b"" after its end.

        Raises:
            BrokenError: it broke off.
            TimeoutError: it took too long.
        """
        connection = self._connection
        while not connection.pieces:
            if connection.complete:
                return b""
            await connection.wait()
        return connection.take()

    async def read(self, most_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            BrokenError: it broke off, or has more than `most_bytes`.
            TimeoutError: it took too long.
        """
        found = await self.some()
        if self._connection.complete and not self._connection.pieces:
            return found
        whole = bytearray(found)
        while found := await self.some():
            whole += found
            if len(whole) > most_bytes:
                raise BrokenError(f"the answer has more than {most_bytes >> 20} MiB")
        return bytes(whole)


class Connections:
    """Connections of any number of servers, as many as there are calls; one event loop uses it."""

    def __init__(self) -> None:
        self._idle: dict[Origin, dict[_Connection, None]] = {}
        self.open: set[_Connection] = set()
        self._tls: ssl.SSLContext | None = None

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """End every connection, and the calls on them."""
        for connection in list(self.open):
            connection.fail(BrokenError("the gateway is ending"))
        while self.open:
            await asyncio.sleep(0)

    def idle(self, origin: Origin) -> _Connection | None:
        """Take a connection that is idle, the one that was used last."""
        found = self._idle.get(origin)
        if not found:
            return None
        connection, _ = found.popitem()
        if connection.closes:
            return self.idle(origin)
        if asyncio.get_running_loop().time() - connection.received_s <= IDLE_S:
            return connection
        for old in (connection, *found):
            old.fail(BrokenError("it was idle"))
        found.clear()
        return None

    async def connect(self, origin: Origin, limit_s: float | None) -> _Connection:
        """Return a new connection.

        Raises:
            ConnectError: there is none.
            TimeoutError: it took too long.
        """
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        connection = _Connection(self, self._idle.setdefault(origin, {}))
        made = asyncio.get_running_loop().create_connection(
            lambda: connection,
            origin.host,
            origin.port,
            ssl=self._tls if origin.tls else None,
        )
        try:
            async with asyncio.timeout(min(CONNECT_LIMIT_S, limit_s or CONNECT_LIMIT_S)):
                await made
        except BaseException as error:
            # uvloop does not say so where it is cancelled with the connection made.
            connection.connection_lost(None)
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise ConnectError(str(error.strerror or error)) from None
            raise
        return connection
