"""The server alone: what requests may look like, and what clients may do to it."""

import asyncio
import gc
import gzip
import os
import re
import socket
import struct
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from socket import has_dualstack_ipv6
from typing import Any
from weakref import ref

import pytest

from tests.gateway.served import NO_AIOHTTP

pytest.importorskip("aiohttp", reason=NO_AIOHTTP)

from heddle_gateway import http, http_server
from heddle_gateway.front import _is_local
from heddle_gateway.http import HttpRequest, RequestError, Response, Stream
from heddle_gateway.http_server import serving

LIMIT = 100_000
HEAD = b"Host: x\r\nContent-Type: application/json\r\n"


class Server:
    """Answers with what it was sent."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[HttpRequest] = []
        self.read = list[HttpRequest]()
        self.cancelled = 0
        self.held = asyncio.Event()

    async def __call__(self, request: HttpRequest) -> Response:
        self.asked.append(request)
        try:
            return await self._answer(request)
        except RequestError as error:
            with pytest.raises(RequestError, match=re.escape(str(error))):
                await request.read(LIMIT, 60.0)
            return Response(str(error).encode(), status=error.status)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: HttpRequest) -> Response:
        if request.path == "/early":
            return Response(b"no", status=401)
        if request.path == "/held":
            await self.held.wait()
        body = await request.read(LIMIT, 0.3)
        if request.path == "/read":
            self.read.append(request)
            await self.held.wait()
        if request.path == "/stream":
            stream = Stream(request, headers={"Content-Type": "text/plain"})
            for piece in (b"one", b"two"):
                await stream.begin(piece)
            return stream
        if request.path in ("/204", "/named"):
            header = {"X": "a\udcff"} if request.path == "/named" else {}
            stream = Stream(request, status=int(request.query_string or 204), headers=header)
            await stream.begin(body)
            return stream
        if request.path == "/large":
            return Response(b"x" * (4 << 20))
        return Response(f"{request.method} {request.target} ".encode() + body)

    async def raw(self, *sent: bytes, until_closed: bool = False) -> bytes:
        """Send some pieces, and return what comes until nothing more does."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for piece in sent:
            writer.write(piece)
            await asyncio.sleep(0.01)
        found = b""
        try:
            async with asyncio.timeout(20.0 if until_closed else 0.3):
                while more := await reader.read(1 << 20):
                    found += more
        except TimeoutError:
            assert not until_closed
        writer.close()
        return found


@asynccontextmanager
async def server(**options: Any) -> AsyncIterator[Server]:
    made = Server(0)
    given = {"host": "127.0.0.1", "port": 0, "body_bytes": LIMIT, "head_s": 60.0, "grace_s": 0.2}
    async with asyncio.timeout(60.0), serving(made, **(given | options)) as made.port:
        yield made


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def bodies(answer: bytes) -> list[bytes]:
    """Bodies of answers with a length, in their order."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
        found.append(rest[:length])
        answer = rest[length:]
    return found


def test_requests_that_come_before_their_answers_are_answered_in_their_order():
    async def main() -> None:
        async with server() as at:
            sent = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in range(50))
            assert bodies(await at.raw(sent)) == [b"GET /%d " % n for n in range(50)]
            one, *rest = b"POST /a HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\nhi", sent
            assert bodies(await at.raw(one[:-1], one[-1:] + rest[0]))[:2] == [
                b"POST /a hi",
                b"GET /0 ",
            ]
            at.asked.clear()
            held = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
            assert await at.raw(held + sent) == b""
            assert [each.path for each in at.asked] == ["/held"]

    run(main())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_come_in_pieces_chunked_and_packed(chunked: bool, packed: bool):
    async def main() -> None:
        body = gzip.compress(b"hello") if packed else b"hello"
        head = b"POST /a?b=c HTTP/1.1\r\n" + HEAD + b"Content-Encoding: gzip\r\n" * packed
        if chunked:
            sent = head + b"Transfer-Encoding: chunked\r\n\r\n"
            sent += b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n"
        else:
            sent = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        async with server() as at:
            assert bodies(await at.raw(sent)) == [b"POST /a?b=c hello"]
            pieces = [sent[n : n + 9] for n in range(0, len(sent), 9)]
            assert bodies(await at.raw(*pieces)) == [b"POST /a?b=c hello"]

    run(main())


def test_a_client_that_waits_for_leave_gets_it_and_one_whose_request_is_refused_does_not():
    async def main() -> None:
        async with server() as at:
            head = HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
            answer = await at.raw(b"POST /a HTTP/1.1\r\n" + head, b"hi")
            assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
            old = await at.raw(b"POST /a HTTP/1.0\r\n" + head, b"hi")
            assert old.startswith(b"HTTP/1.1 200 OK\r\n")
            refused = await at.raw(b"POST /early HTTP/1.1\r\n" + head, until_closed=True)
            assert refused.startswith(b"HTTP/1.1 401")
            assert b"Connection: close" in refused

    run(main())


def test_old_and_odd_clients_are_answered():
    async def main() -> None:
        async with server() as at:
            old = await at.raw(b"GET /stream HTTP/1.0\r\n\r\n", until_closed=True)
            assert old.endswith(b"\r\n\r\nonetwo")
            assert b"chunked" not in old
            kept = await at.raw(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert b"Connection: keep-alive" in kept
            new = await at.raw(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert new.endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
            for sent, asked in (
                (b"GET http://x/a?b HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /a?b "),
                (b"\r\n\r\nGET /%20 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /%20 "),
            ):
                assert bodies(await at.raw(sent)) == [asked]

    run(main())


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_another_protocol_is_not_taken_and_the_body_is_read(chunked: bool):
    async def main() -> None:
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 2"
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nX:\r\n" + length
        head = b"POST /a HTTP/1.1\r\n" + HEAD + offer + b"\r\n\r\n"
        body = b"2\r\nhi\r\n0\r\n\r\n" if chunked else b"hi"
        plain = b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
        expected = [b"POST /a hi"] * 2 + [b"GET /b "]
        async with server() as at:
            assert bodies(await at.raw(head, body + head, body + plain)) == expected
            assert bodies(await at.raw((head + body) * 2 + plain)) == expected
            offered = plain.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost")
            last = plain.replace(b"Host", b"Connection: close\r\nHost")
            found = bodies(await at.raw(offered * 2_000 + last, until_closed=True))
            assert len(found) == 2_001
            assert at.asked[0].headers["x"] == ""
            tunnel = await at.raw(b"CONNECT x:1 HTTP/1.1\r\n\r\n" + plain, until_closed=True)
            assert tunnel.count(b"HTTP/1.1 200 OK") == 1

    run(main())


def test_answers_without_a_body_have_none_and_the_next_one_follows():
    async def main() -> None:
        plain = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
        async with server() as at:
            for sent in (
                b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n",
                b"HEAD /stream HTTP/1.1\r\nHost: x\r\n\r\n",
                b"POST /204?204 HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\nhi",
                b"POST /204?304 HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\nhi",
            ):
                first, _, second = (await at.raw(sent + plain)).partition(b"\r\n\r\n")
                assert bodies(second) == [b"GET /a "]
                assert b"chunked" not in first
            # A header of another server need not be UTF-8.
            assert b"\r\nX: a\xff\r\n" in await at.raw(plain.replace(b"/a", b"/named"))

    run(main())


def test_packed_bodies_are_whole_and_without_a_head_of_zlib_as_well():
    async def main() -> None:
        head = (
            b"POST /a HTTP/1.1\r\n" + HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n"
        )
        packed = gzip.compress(b"hello")
        bare = zlib.compress(b"hello")[2:-4]
        async with server() as at:
            for kind, body in ((b"deflate", bare), (b"deflate", zlib.compress(b"hello"))):
                answer = await at.raw(head % (kind, len(body)) + body)
                assert bodies(answer) == [b"POST /a hello"]
            for body in (packed[:-1], packed[:-8], packed + packed, packed + b"x"):
                answer = await at.raw(head % (b"gzip", len(body)) + body)
                assert answer.startswith(b"HTTP/1.1 400")

    run(main())


def test_the_address_of_every_interface_is_of_ipv4_too():
    async def main() -> None:
        async def handle(request: HttpRequest) -> Response:
            return Response(str(_is_local(request)).encode())

        limits: dict[str, Any] = {"body_bytes": LIMIT, "head_s": 60.0, "grace_s": 0.1}
        async with serving(handle, host="::", port=0, **limits) as port:
            for host in ("127.0.0.1", "::1"):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                assert (await reader.read()).endswith(b"True")
                writer.close()

    if not has_dualstack_ipv6():
        pytest.skip("this system has no sockets of both")
    run(main())


def test_trailers_change_no_header():
    async def main() -> None:
        async with server() as at:
            head = b"POST /a HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
            end = b"0\r\nContent-Encoding: gzip\r\nX-Session-ID: s\r\n\r\n"
            assert bodies(await at.raw(head + b"2\r\nhi\r\n" + end)) == [b"POST /a hi"]
            assert "x-session-id" not in at.asked[0].headers

    run(main())


@pytest.mark.parametrize("begin", [b"2;", b"0\r\nX: ", b"0\r\n"])
def test_what_is_beside_a_body_has_an_end(begin: bytes):
    async def main() -> None:
        async with server() as at:
            head = b"POST /a HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
            sent = [b"y" * 50_000] * 3
            if begin.endswith(b"\n"):
                sent = [b"".join(b"X-%d: y\r\n" % n for n in range(20_000))]
            assert (await at.raw(head + begin, *sent)).startswith(b"HTTP/1.1 400")

    run(main())


def test_a_head_that_comes_in_pieces_after_a_long_body_is_read():
    async def main() -> None:
        async with server() as at:
            head = b"POST /a HTTP/1.1\r\n" + HEAD + b"Content-Length: %d\r\n\r\n"
            body = b"y" * 90_000
            answer = await at.raw(head % len(body) + body + head[:20], head[20:] % 0)
            assert bodies(answer) == [b"POST /a " + body, b"POST /a "]

    run(main())


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"X-%d: y\r\n" % n for n in range(20_000)),
        b"X: " + b"y" * 2 * http_server.HEAD_BYTES,
        b"y" * 2 * http_server.HEAD_BYTES + b": x",
    ],
    ids=["many", "long", "long name"],
)
def test_heads_without_end_are_refused(head: bytes):
    async def main() -> None:
        async with server() as at:
            pieces = [head[n : n + 10_000] for n in range(0, len(head), 10_000)]
            answer = await at.raw(b"GET /a HTTP/1.1\r\n", *pieces, until_closed=True)
            assert answer.startswith(b"HTTP/1.0 400 Bad Request")
            assert not at.asked
            # A connection may have any number of heads.
            sent = b"GET /a HTTP/1.1\r\nX: " + b"y" * 1_000 + b"\r\n\r\n"
            assert len(bodies(await at.raw(*[sent * 10] * 10))) == 100

    run(main())


def test_bodies_without_end_are_refused_while_they_come():
    async def main() -> None:
        async with server() as at:
            head = b"POST /a HTTP/1.1\r\n" + HEAD
            chunk = b"4000\r\n" + b"y" * 0x4000 + b"\r\n"
            endless = [head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 10]
            assert (await at.raw(*endless)).startswith(b"HTTP/1.1 413")
            said = await at.raw(head + b"Content-Length: 100001\r\n\r\n", *[b"y" * 20_000] * 5)
            assert said.startswith(b"HTTP/1.1 413")
            slow = await at.raw(head + b"Content-Length: 9\r\n\r\n", b"y")
            assert slow == b"" or slow.startswith(b"HTTP/1.1 408")
            cut = await at.raw(head + b"Transfer-Encoding: chunked\r\n\r\n", b"zz\r\n")
            assert cut.startswith(b"HTTP/1.1 400")

    run(main())


def test_a_client_that_leaves_ends_its_request():
    async def main() -> None:
        async with server() as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
            while not at.asked:
                await asyncio.sleep(0.001)
            writer.transport.abort()
            while not at.cancelled:
                await asyncio.sleep(0.001)
            assert at.asked[0].transport is None

    run(main())


def test_a_client_that_reads_slowly_holds_nobody_up_and_gets_everything():
    async def main() -> None:
        async with server() as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            await asyncio.sleep(0.05)
            assert bodies(await at.raw(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n")) == [b"GET /a "]
            assert len(bodies(await reader.read())[0]) == 4 << 20
            writer.close()

    run(main())


def test_silent_connections_are_closed_and_those_with_a_request_stay(monkeypatch):
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.4)

    async def main() -> None:
        async with server(head_s=0.1) as at:
            held = asyncio.create_task(
                at.raw(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n", until_closed=True)
            )
            assert await at.raw(b"", until_closed=True) == b""
            assert await at.raw(b"GET /a HTT", until_closed=True) == b""
            used = await at.raw(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\nGET", until_closed=True)
            assert used.startswith(b"HTTP/1.1 200")
            assert not held.done()
            at.held.set()
            assert (await held).startswith(b"HTTP/1.1 200")

    run(main())


def test_a_connection_whose_client_does_not_read_its_answer_ends(monkeypatch):
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)

    async def main() -> None:
        async with server(head_s=0.1) as at:
            sent = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
            _, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(sent)
            while not at.asked:
                await asyncio.sleep(0.001)
            at.asked[0].connection.close()  # type: ignore[attr-defined]
            at.asked[0].connection.resume_writing()  # type: ignore[attr-defined]
            while at.asked[0].transport is not None:
                await asyncio.sleep(0.01)
            writer.close()

    run(main())


@contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def cut(at: Server, sent: bytes) -> Any:
    """A weak reference to the request of a client that sends this and leaves."""
    _, writer = await asyncio.open_connection("127.0.0.1", at.port)
    writer.write(sent)
    while not at.asked:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    writer.transport.abort()
    request = at.asked.pop()
    while request.transport is not None:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    return ref(request)


def test_bodies_that_are_cut_off_or_refused_are_gone_without_a_collection():
    head = b"POST /a HTTP/1.1\r\n" + HEAD

    async def main() -> None:
        async with server() as at:
            with no_collection():
                for rest in (
                    b"Content-Length: 90000\r\n\r\n" + b"y" * 80_000,
                    b"Content-Length: 90000\r\n\r\n" + b"y" * 90_000,
                    b"Content-Length: 9\r\nContent-Encoding: gzip\r\n\r\n" + b"y" * 9,
                    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                ):
                    assert (await cut(at, head + rest))() is None

    run(main())


def test_bodies_that_come_at_the_same_time_have_one_limit(monkeypatch):
    monkeypatch.setattr(http_server, "RECEIVED_BYTES", 4 * LIMIT)
    head = b"POST /held HTTP/1.1\r\n" + HEAD + b"Content-Length: 100000\r\n\r\n"

    async def main() -> None:
        async with server() as at:
            stalled = []
            for n in range(4):
                _, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(head + b"y" * 99_990)
                stalled.append(writer)
                while len(at.asked) <= n:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            at.held.set()
            over = head.replace(b"/held", b"/a") + b"y" * 50_000
            assert (await at.raw(over, b"y" * 50_000)).startswith(b"HTTP/1.1 503")
            for writer in stalled:
                writer.transport.abort()
            while any(each.transport is not None for each in at.asked):
                await asyncio.sleep(0.001)
            whole = head.replace(b"/held", b"/a") + b"y" * 100_000
            for _ in range(5):
                assert (await at.raw(whole)).startswith(b"HTTP/1.1 200")

    run(main())


def test_bodies_count_until_their_answers_and_large_ones_take_no_room_from_small_ones(monkeypatch):
    monkeypatch.setattr(http_server, "RECEIVED_BYTES", 4 * LIMIT)
    monkeypatch.setattr(http, "LARGE_BYTES", 50_000)

    def request(path: str, size: int, packed: bool = False) -> bytes:
        body = gzip.compress(b"y" * size) if packed else b"y" * size
        head = b"Content-Encoding: gzip\r\n" * packed + b"Content-Length: %d" % len(body)
        return b"POST %b HTTP/1.1\r\n" % path.encode() + HEAD + head + b"\r\n\r\n" + body

    async def main() -> None:
        async with server() as at:
            waiting = []

            async def waits(size: int, packed: bool) -> None:
                _, writer = await asyncio.open_connection("127.0.0.1", at.port)
                writer.write(request("/read", size, packed))
                waiting.append(writer)
                while len(at.read) < len(waiting):
                    await asyncio.sleep(0.001)

            for n in range(7):
                await waits(50_000, packed=n % 2 == 0)
            for n in range(4):
                await waits(99_000, packed=n % 2 == 0)
            for packed in (False, True):
                assert (await at.raw(request("/a", 99_000, packed))).startswith(b"HTTP/1.1 503")
            for _ in range(20):  # what is small has room of its own
                assert (await at.raw(request("/a", 40_000))).startswith(b"HTTP/1.1 200")
            await waits(50_000, packed=False)
            for packed in (False, True):
                assert (await at.raw(request("/a", 1_000, packed))).startswith(b"HTTP/1.1 503")
            at.held.set()
            while any(each.connection.current for each in at.asked):
                await asyncio.sleep(0.001)
            assert at.asked[0].connection.receiving.used == {False: 0, True: 0}
            assert (await at.raw(request("/a", 99_000))).startswith(b"HTTP/1.1 200")
            for writer in waiting:
                writer.close()

    run(main())


def test_a_body_in_tiny_chunks_takes_little_more_than_its_bytes():
    head = b"POST /held HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    chunks = b"2\r\nyy\r\n" * 5_000

    async def main() -> None:
        async with server(body_bytes=1 << 20) as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(head)
            while not at.asked:
                await asyncio.sleep(0.001)
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(20):
                    writer.write(chunks)
                    await writer.drain()
                while at.asked[0].connection.receiving.used[False] < 200_000:
                    await asyncio.sleep(0.001)
                now, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert now - before < 1_000_000
            writer.close()

    run(main())


def test_at_the_end_requests_under_way_are_answered_and_late_ones_cancelled():
    async def main() -> None:
        for answered in (True, False):
            async with server() as at:
                held = asyncio.create_task(
                    at.raw(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n", until_closed=True)
                )
                idle = asyncio.create_task(at.raw(b"", until_closed=True))
                while not at.asked:
                    await asyncio.sleep(0.001)
                if answered:
                    asyncio.get_running_loop().call_later(0.05, at.held.set)
            assert (await held != b"") is answered
            assert await idle == b""
            assert at.cancelled == (not answered)

    run(main())


@pytest.mark.parametrize("rest", [b"", b"\0\0"], ids=["its client is gone", "no HTTP follows"])
def test_the_body_of_a_request_that_never_begins_counts_no_more(monkeypatch, rest: bytes):
    receiving = http.Receiving(LIMIT)
    monkeypatch.setattr(http_server, "Receiving", lambda limit: receiving)
    sent = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\nPOST /a HTTP/1.1\r\n" + HEAD
    sent += b"Content-Length: 5000\r\n\r\n" + b"y" * 5_000 + rest

    async def main() -> None:
        async with server() as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(sent)
            while not (receiving.used[False] or (rest and at.asked)):
                await asyncio.sleep(0.001)
            if not rest:
                reset = struct.pack("ii", 1, 0)
                used = writer.get_extra_info("socket")
                used.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                writer.transport.abort()
                await asyncio.sleep(0.05)
            at.held.set()  # a client that is gone is seen by its answer
            while at.asked[0].transport is not None:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            assert receiving.used == {False: 0, True: 0}
            assert [each.path for each in at.asked] == ["/held"]
            writer.close()

    run(main())


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([], 4 << 30),
        (["max\n", "9223372036854771712\n"], 4 << 30),
        (["max\n", f"{32 << 30}\n"], 2 << 30),
        ([f"{1 << 30}\n"], 384 << 20),
    ],
)
def test_bodies_may_have_a_share_of_the_memory(monkeypatch, tmp_path, limits, expected):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 24}.get)
    paths = [tmp_path / f"{n}" for n in range(len(limits))]
    for path, limit in zip(paths, limits, strict=True):
        path.write_text(limit)
    assert http_server._share_of_memory([*map(str, paths), "/nowhere/memory.max"]) == expected
