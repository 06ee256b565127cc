"""Pooled connections: what is used again, what breaks off, and how long calls may take."""

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("httptools", reason="httptools is missing; pip install 'heddle-rl[serve]'")

from heddle_runtime.vllm_http.connections import BrokenError, ConnectError, Connections, Origin
from heddle_runtime.vllm_http.endpoint import Endpoint, SlowError, UnreachableError, UrlError

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Raw:
    """A server that answers each request by what it is told, whatever was asked."""

    def __init__(self, *answers: bytes | None) -> None:
        """None: it closes the connection instead."""
        self._answers = list(answers)
        self.connections = 0
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                found = head.lower().partition(b"content-length: ")[2]
                await reader.readexactly(int(found.partition(b"\r")[0] or 0))
                if (answer := self._answers.pop(0)) is None:
                    break
                writer.write(answer)
            else:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def run(server: Any, use: Callable[[Endpoint], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        listener = await asyncio.start_server(server, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        async with Connections() as connections, asyncio.timeout(60.0):
            await use(Endpoint(f"http://127.0.0.1:{port}/base", connections, api_key="k"))
        listener.close()
        await listener.wait_closed()

    asyncio.run(main())


def test_a_connection_is_used_again_after_whole_answers_and_after_streams():
    server = Raw(OK, STREAM + b"3\r\nabc\r\n0\r\n\r\n", OK)

    async def use(at: Endpoint) -> None:
        assert (await at.call("/a b?c=%20", {"x": 1}, limit_s=5.0)).json() == {}
        async with at.post("/s", {}, limit_s=None, silence_s=5.0) as stream:
            assert stream.content_type == "text/event-stream"
            assert await stream.read(9) == b"abc"
        assert (await at.call("/c", limit_s=5.0)).status == 200

    run(server, use)
    assert server.connections == 1
    assert server.heads[0].startswith(b"POST /base/a%20b?c=%20 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer k\r\n" in server.heads[0]
    assert server.heads[2].startswith(b"GET /base/c ")


@pytest.mark.parametrize(
    "answer",
    [
        OK.replace(b"Content-Length: 2", b"Connection: close\r\nContent-Length: 2"),
        OK.replace(b"Content-Length: 2\r\n", b""),
        OK + b"more",
        b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" + OK.replace(b"200", b"404"),
    ],
    ids=["close", "until closed", "more than one", "no content", "early hints"],
)
def test_answers_of_any_form_are_read_and_the_next_call_is_answered(answer: bytes):
    server = Raw(answer, None, OK) if b"Length" not in answer else Raw(answer, OK)

    async def use(at: Endpoint) -> None:
        if b"HTTP/1.1 200" in answer and b"Length" not in answer:
            asyncio.get_running_loop().call_later(0.1, server._answers.clear)
            with pytest.raises(SlowError):  # it ends with its connection
                await at.call("/a", limit_s=0.05)
            return
        first = await at.call("/a", limit_s=5.0)
        assert first.status in (200, 204, 404)
        assert first.data in (b"{}", b"")

    run(server, use)


@pytest.mark.parametrize(
    "answer",
    [None, b"SSH-2.0\r\n\r\n", OK[:-1], STREAM + b"zz\r\n", STREAM + b"5\r\nab"],
    ids=["nothing", "no HTTP", "cut", "no chunk", "cut chunk"],
)
def test_a_broken_answer_is_an_error_that_says_so(answer: bytes | None):
    server = Raw(answer, None)

    async def use(at: Endpoint) -> None:
        with pytest.raises(UnreachableError, match=r"^/a (broke off|did not answer in 0\.3 s)"):
            await at.call("/a", {}, limit_s=0.3)

    run(server, use)


@pytest.mark.parametrize("begin", [b"", STREAM + b"2;", STREAM + b"2\r\n{}\r\n0\r\nX: "])
def test_what_is_beside_an_answers_body_has_an_end(begin: bytes):
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begin)
        with suppress(ConnectionError):
            while True:
                writer.write(b"y" * 10_000)
                await writer.drain()
                await asyncio.sleep(0)

    async def use(at: Endpoint) -> None:
        with pytest.raises(UnreachableError, match=r"bytes outside its body|no HTTP"):
            await at.call("/a", limit_s=30.0)

    if not begin:
        begin = OK[:17] + b"X: "
    run(endless, use)


def test_a_call_that_takes_too_long_ends_and_so_does_a_stream_that_is_silent():
    server = Raw(b"HTTP/1.1 200 OK\r\n", STREAM + b"1\r\na\r\n", OK)

    async def use(at: Endpoint) -> None:
        with pytest.raises(SlowError, match=r"did not answer in 0\.05 s"):
            await at.call("/a", {}, limit_s=0.05)
        async with at.post("/s", {}, limit_s=None, silence_s=0.05) as stream:
            assert await stream.some() == b"a"
            with pytest.raises(TimeoutError):
                await stream.some()
        assert (await at.call("/c", limit_s=5.0)).status == 200

    run(server, use)
    assert server.connections == 3


def test_a_body_is_dropped_once_it_is_sent():
    async def use(endpoint: Endpoint) -> None:
        body = {"text": "x" * 4_000_000}
        tracemalloc.start()
        try:
            async with endpoint.post("/generate", body, limit_s=20.0) as answer:
                assert answer.status == 200
                gc.collect()
                held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 2_000_000

    run(Raw(STREAM), use)


def test_a_cancelled_call_closes_its_connection():
    async def use(at: Endpoint) -> None:
        call = asyncio.create_task(at.call("/a", {}, limit_s=5.0))
        while not server.heads:
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await at.call("/b", limit_s=5.0)).status == 200

    server = Raw(b"HTTP/1.1 200 OK\r\n", OK)
    run(server, use)
    assert server.connections == 2


@pytest.mark.parametrize("turns", range(8))
def test_a_connection_whose_opening_is_cancelled_is_forgotten(turns: int):
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        http = Connections()
        origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1], tls=False)
        opening = asyncio.create_task(http.connect(origin, None))
        for _ in range(turns):
            await asyncio.sleep(0)
        if opening.cancel():
            with suppress(asyncio.CancelledError):
                await opening
        await asyncio.sleep(0.05)
        # One that is kept here is waited for at the end, for ever.
        assert not http.open
        await http.close()
        server.close()

    for loop_factory in (uvloop.new_event_loop, None):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main())


def test_a_get_on_a_connection_that_its_server_has_closed_is_sent_again_and_a_post_is_not():
    async def use(at: Endpoint) -> None:
        for _ in range(2):
            assert (await at.call("/a", limit_s=5.0)).status == 200
        with pytest.raises(UnreachableError, match="broke off"):
            await at.call("/b", {}, limit_s=5.0)

    run(Raw(OK, None, OK, None), use)


def test_an_idle_connection_that_is_closing_is_not_used():
    async def use(at: Endpoint) -> None:
        assert (await at.call("/a", {}, limit_s=5.0)).status == 200
        [connection] = at._connections.open
        connection._transport.close()  # type: ignore[union-attr]
        assert (await at.call("/b", {}, limit_s=5.0)).status == 200

    run(Raw(OK, OK), use)


def test_a_server_that_has_to_wait_is_not_silent():
    body = b"10000\r\n" + b"y" * 0x10000 + b"\r\n"

    async def use(at: Endpoint) -> None:
        async with at.post("/s", {}, limit_s=None, silence_s=0.1) as stream:
            found = len(await stream.some())
            await asyncio.sleep(0.5)
            while more := await stream.some():
                found += len(more)
            assert found == 100 << 16

    run(Raw(STREAM + body * 100 + b"0\r\n\r\n"), use)


def test_where_nothing_listens_that_is_said_and_a_port_that_cannot_be_is_no_url():
    async def main() -> None:
        async with Connections() as connections:
            with pytest.raises(UnreachableError, match=r"^/a cannot be reached: "):
                await Endpoint("http://127.0.0.1:9", connections).call("/a", limit_s=5.0)
            with pytest.raises(ConnectError):
                async with Endpoint("http://127.0.0.1:9", connections).post("/", 1, limit_s=5.0):
                    pass
            with pytest.raises(UrlError):
                Endpoint("http://127.0.0.1:99999", connections)

    asyncio.run(main())
    assert issubclass(ConnectError, BrokenError)
