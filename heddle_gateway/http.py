"""Requests of HTTP as handlers read them, and the answers that they write."""

import asyncio
import time
import zlib
from collections.abc import Mapping
from email.utils import formatdate
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from heddle_gateway.client_step import ClientStep
from heddle_gateway.errors import ApiError
from heddle_runtime.vllm_http.probe import GATEWAY_HEADER

if TYPE_CHECKING:
    from heddle_gateway.http_server import Connection

REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


_SMALL, _FEW = 4096, 16
"""After a few pieces of a body, small ones are joined: each object takes 40 bytes more."""
LARGE_BYTES: Final = 1 << 20
"""Larger bodies have a limit of their own."""


class RequestError(ApiError):
    """A body that cannot be read; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message, ours=True)
        if status == 503:
            self.error["type"], self.retry_after_s = "service_unavailable_error", 5


class Headers(dict[str, str]):
    """Headers, by names in lower case; those that come twice are joined."""

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(str(name).lower())


class Receiving:
    """Bytes of bodies that come, and of those whose requests are under way."""

    def __init__(self, limit: int) -> None:
        """`limit` is of small ones, and of large ones: those take no room from the small."""
        self.limit = limit
        self.used = {False: 0, True: 0}
        """Of small ones and of large ones."""


class HttpQuery(dict[str, str]):
    """Fields of a query, the first of each name."""

    def __init__(self, text: str) -> None:
        self._all = parse_qsl(text, keep_blank_values=True)
        super().__init__(reversed(self._all))

    def every(self, name: str) -> list[str]:
        """Return all values of a field."""
        return [value for each, value in self._all if each == name]


class HttpRequest:
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
        self._pieces: list[bytes | bytearray] = []
        self._size = self.held = 0
        self._error: RequestError | None = None
        self._read: bytes | None = None
        self._came: asyncio.Future[None] | None = None

    @cached_property
    def query(self) -> HttpQuery:
        return HttpQuery(self.query_string)

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
        # Python reads no number of thousands of digits, and leading zeros are permitted.
        return int(self.headers.get("content-length", "").lstrip("0") or 0)

    @property
    def size(self) -> int:
        """Bytes of its body, unpacked, from when it was read until it is dropped."""
        return len(self._read or b"")

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
            return
        if self._error is None:
            try:
                self.hold(self.held + len(data))
            except RequestError as error:
                self.fail(RequestError(error.status, str(error)))
        if self._error is not None:
            return
        joins = len(data) < _SMALL and len(self._pieces) >= _FEW
        if joins and isinstance(last := self._pieces[-1], bytearray):
            last += data
        else:
            self._pieces.append(bytearray(data) if joins else data)

    def end(self) -> None:
        """Its body is complete."""
        self.complete = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Its body cannot be read."""
        self._error = error
        self.release()
        self._wake()

    def hold(self, size: int) -> None:
        """Count so many bytes of its body, and of what is made of it.

        Raises:
            RequestError: they are too many, alone or with those of other requests.
        """
        receiving, was, held = self.connection.receiving, self.held > LARGE_BYTES, self.held
        large = size > LARGE_BYTES
        others = receiving.used[large] - held * (was == large)
        if size > receiving.limit:
            text = f"the request takes {size:,} bytes with its answers: send less, ask for fewer"
            raise RequestError(413, text)
        if size > held and others + size > receiving.limit:
            kind = "large bodies" if large else "bodies"
            text = f"{kind} that come or wait have more than {receiving.limit:,} bytes"
            raise RequestError(503, f"{text}: send the same again later")
        receiving.used[was] -= held
        receiving.used[large] += size
        self.held = size

    def release(self) -> None:
        """Drop its body: it is answered, or what came of it is not read."""
        self.hold(0)
        self.drop_body()

    def drop_body(self) -> None:
        """Its body is not read again; what was made of it counts as long as it does."""
        self._read = None
        self._pieces.clear()

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
            if "expect" in self.headers and not self.http_1_0:
                self.connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._came = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(limit_s):
                    await self._came
            except TimeoutError:
                self.fail(RequestError(408, f"the body did not come in {limit_s:g} s"))
        if self._error is not None:
            # Another object each time: raised, this one would hold itself with its frames.
            raise RequestError(self._error.status, str(self._error))
        packed = b"".join(self._pieces)
        self._pieces.clear()
        try:
            found = _unpacked(packed, self.headers.get("content-encoding", ""), limit)
            self.hold(len(found))
        except RequestError as error:
            self._error = RequestError(error.status, str(error))  # for a second read
            raise
        self._read = found
        return found


def _unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    if encoding.lower() not in ("gzip", "deflate"):
        return data
    # Of deflate, some clients leave out zlib's head.
    plain = encoding.lower() == "deflate" and data[:1] and data[0] & 15 != 8
    unpack = zlib.decompressobj(-15 if plain else 47)
    try:
        found = unpack.decompress(data, limit + 1)
    except zlib.error as error:
        raise RequestError(400, f"the body cannot be read: {error}") from None
    if len(found) > limit:
        raise RequestError(413, f"the body is larger than {limit:,} bytes")
    if data and (not unpack.eof or unpack.unused_data):
        raise RequestError(400, "the body cannot be read: it is not one whole compressed stream")
    return found


class Response:
    """A whole answer."""

    def __init__(
        self, body: bytes = b"", *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        self.status, self._body = status, body
        self._headers = dict(headers or {})

    def _head(self, request: HttpRequest, length: str) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in self._headers.items()])
        if lines.count("\n") != len(self._headers):
            raise ValueError("a header has more than one line")
        if not request.keep_alive:
            length += "Connection: close\r\n"
        elif request.http_1_0:
            length += "Connection: keep-alive\r\n"
        status = f"HTTP/1.1 {self.status} {REASONS.get(self.status, '')}\r\n"
        head = f"{status}{_dated(int(time.time()))}{lines}{length}\r\n"
        return head.encode("utf-8", "surrogateescape")

    def _bodiless(self, request: HttpRequest) -> bool:
        """Whether clients take what follows the head for the next answer."""
        return request.method == "HEAD" or self.status in (204, 304)

    async def send(self, request: HttpRequest) -> None:
        """Send what has not been sent."""
        request.keep_alive = request.keep_alive and request.complete
        head = self._head(request, f"Content-Length: {len(self._body)}\r\n")
        request.connection.write(head if self._bodiless(request) else head + self._body)
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
        self, request: HttpRequest, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status=status, headers=headers)
        self._request = request
        self._chunked = not (request.http_1_0 or self._bodiless(request))
        self.begun = False

    async def begin(self, data: bytes = b"") -> None:
        """Send the head, if it has not been sent, and some data."""
        request, head = self._request, b""
        if not self.begun:
            self.begun = True
            request.keep_alive = request.keep_alive and request.complete and not request.http_1_0
            head = self._head(request, "Transfer-Encoding: chunked\r\n" * self._chunked)
        if self._bodiless(request):
            data = b""
        if data and self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        request.connection.write(head + data)
        await request.connection.drained()

    async def send(self, request: HttpRequest) -> None:
        """Send the end."""
        await self.begin()
        if self._chunked:
            request.connection.write(b"0\r\n\r\n")
