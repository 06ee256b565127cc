"""HTTP load on one address: closed loop, open loop, all at once, open streams."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from gateway.prompts import STEPS

ANSWER_S = 60.0
"""How long an answer may take before it counts as none."""
MakeBody = Callable[[int, int], bytes]
"""Of session and step."""
_sessions = itertools.count(1)


class LoadError(Exception):
    """An answer was not 200, or none came; the message says which."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go, and as what."""

    port: int
    path: str
    make_body: MakeBody
    headers: bytes = b""
    """For every request, each line with its end."""

    def request(self, session: int, step: int) -> bytes:
        """Return the request of a step; its session ends with the last."""
        body = self.make_body(session, step)
        final = b"X-Dynamo-Session-Final: true\r\n" if step == STEPS - 1 else b""
        return (
            b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"X-Session-ID: bench-%d\r\n%b%bContent-Length: %d\r\n\r\n%b"
        ) % (self.path.encode(), session, final, self.headers, len(body), body)


class Connection(asyncio.Protocol):
    """A connection that sends one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self._data = bytearray()
        self.transport: asyncio.Transport | None = None
        self.events = 0
        """Server-sent events with data that came, in the answer under way or the last one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request under way."""
        self.transport = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(
                LoadError(f"the connection was closed: {exc or 'no answer'}")
            )

    def send(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        """Send a request; its status and body will follow."""
        if self.transport is None:
            raise LoadError("the connection is closed")
        self._data.clear()
        self.events = 0
        self._waiter = self._loop.create_future()
        self.transport.write(request)
        return self._waiter

    def data_received(self, data: bytes) -> None:
        """Look for the end of the answer."""
        self._data += data
        self.events += data.count(b"data: {")
        end = self._data.find(b"\r\n\r\n")
        if end < 0 or self._waiter is None or self._waiter.done():
            return
        head = bytes(self._data[:end]).lower()
        found = head.find(b"\r\ncontent-length:")
        if found >= 0:
            length = int(head[found + 17 :].split(b"\r\n", 1)[0])
            whole = len(self._data) >= end + 4 + length
        else:
            whole = self._data.endswith(b"0\r\n\r\n")
        if whole:
            self._waiter.set_result((int(head[9:12]), bytes(self._data[end + 4 :])))


async def connect(port: int) -> Connection:
    """Return an open connection."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
    return connection


def _close(connections: list[Connection]) -> None:
    for connection in connections:
        if connection.transport is not None:
            connection.transport.close()


async def call(port: int, method: str, path: str) -> tuple[int, bytes]:
    """Make one call without a body."""
    connection = await connect(port)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
    try:
        return await asyncio.wait_for(connection.send(head.encode()), ANSWER_S)
    finally:
        _close([connection])


def _steps() -> Iterator[tuple[int, int]]:
    """One session after another, step by step."""
    while True:
        session = next(_sessions)
        for step in range(STEPS):
            yield session, step


async def _answered(connection: Connection, request: bytes) -> float:
    """Seconds from the request to the end of its answer.

    Raises:
        LoadError: the answer was not 200.
    """
    began_s = time.perf_counter()
    status, body = await connection.send(request)
    took_s = time.perf_counter() - began_s
    if status != 200:
        raise LoadError(f"status {status}: {body[:300].decode(errors='replace')}")
    return took_s


@dataclass(slots=True)
class Latencies:
    """Seconds of each answer, and of all of them together."""

    seconds: list[float] = field(default_factory=list)
    span_s: float = 0.0

    def at(self, share: float) -> float:
        """Return the latency that this share of the answers has at most."""
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return len(self.seconds) / self.span_s


async def closed_loop(to: Address, *, concurrency: int, for_s: float) -> Latencies:
    """Send from so many clients, each after its last answer, each one session after another."""
    found = Latencies()
    connections = await asyncio.gather(*(connect(to.port) for _ in range(concurrency)))
    began_s = time.perf_counter()

    async def client(connection: Connection) -> None:
        for session, step in _steps():
            if time.perf_counter() - began_s >= for_s:
                return
            found.seconds.append(await _answered(connection, to.request(session, step)))

    async with asyncio.timeout(for_s + ANSWER_S):
        await asyncio.gather(*(client(each) for each in connections))
    found.span_s = time.perf_counter() - began_s
    _close(connections)
    return found


async def closed_loop_of(to: Address, connections: list[Connection], requests: int) -> None:
    """Send so many requests or a few more, whole sessions, each client after its last answer."""
    left = requests

    async def client(connection: Connection) -> None:
        nonlocal left
        for session, step in _steps():
            if left <= 0 and step == 0:
                return
            left -= 1
            await _answered(connection, to.request(session, step))

    await asyncio.gather(*map(client, connections))


async def open_loop(to: Address, *, per_s: float, for_s: float, seed: int) -> Latencies:
    """Send at exponential intervals whatever has been answered, sessions in rotation.

    A latency begins when its request is sent: a timer that is late is the load's, not the router's.
    """
    draw, found = random.Random(seed), Latencies()
    idle = [_steps() for _ in range(64)]
    connections = list(await asyncio.gather(*(connect(to.port) for _ in range(16))))
    free = list(connections)
    began_s = time.perf_counter()

    async def one(session: int, step: int, steps: Iterator[tuple[int, int]]) -> None:
        if not free:
            connections.append(await connect(to.port))
            free.append(connections[-1])
        connection = free.pop()
        found.seconds.append(await _answered(connection, to.request(session, step)))
        free.append(connection)
        idle.append(steps)

    due_s, sent = 0.0, []
    while (due_s := due_s + draw.expovariate(per_s)) < for_s:
        await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        steps = idle.pop(0) if idle else _steps()
        sent.append(asyncio.create_task(one(*next(steps), steps)))
    async with asyncio.timeout(ANSWER_S):
        await asyncio.gather(*sent)
    found.span_s = time.perf_counter() - began_s
    _close(connections)
    return found


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of many requests at once. Seconds since the first was sent."""

    sent_s: float
    """When the last was sent."""
    admitted: int
    admitted_s: float
    refused: int
    answered_s: float
    """From the moment at which engines began to answer."""


async def burst(
    to: Address,
    *,
    requests: int,
    count_admitted: Callable[[], Awaitable[int]],
    release: Callable[[], Awaitable[object]],
    limit_s: float,
) -> Burst:
    """Send as many requests as there are, each on a connection of its own, to engines that hold.

    `count_admitted` says how many have been taken in; `release` lets engines answer.
    """
    refused = 0

    async def client() -> None:
        nonlocal refused
        try:
            connection = await connect(to.port)
            connections.append(connection)
            await _answered(connection, to.request(next(_sessions), STEPS - 1))
        except (LoadError, OSError):
            refused += 1

    connections: list[Connection] = []
    began_s = time.perf_counter()
    clients = [asyncio.create_task(client()) for _ in range(requests)]
    while len(connections) + refused < requests and time.perf_counter() - began_s < limit_s:
        await asyncio.sleep(0.01)
    sent_s = time.perf_counter() - began_s
    admitted, admitted_s = 0, 0.0
    while admitted + refused < requests and time.perf_counter() - began_s < limit_s:
        now = await count_admitted()
        if now > admitted:
            admitted, admitted_s = now, time.perf_counter() - began_s
        await asyncio.sleep(0.1)
    released_s = time.perf_counter()
    await release()
    _, late = await asyncio.wait(clients, timeout=ANSWER_S)
    for each in late:
        each.cancel()
    answered_s = time.perf_counter() - released_s
    _close(connections)
    return Burst(sent_s, admitted, admitted_s, refused + len(late), answered_s)


@dataclass(frozen=True, slots=True)
class Streams:
    """What many open streams brought while they were watched."""

    open: int
    events_per_s: float
    watched_s: float


async def open_streams(
    to: Address, *, streams: int, watch_s: float, on_watch: Callable[[], None], limit_s: float
) -> Streams:
    """Open so many streams, and count the events of `watch_s`; `on_watch` is called before it."""
    connections: list[Connection] = []
    answers: list[asyncio.Future[tuple[int, bytes]]] = []
    for first in range(0, streams, 128):  # each a little after the last: the start is not judged
        few = await asyncio.gather(
            *(connect(to.port) for _ in range(first, min(first + 128, streams)))
        )
        connections += few
        answers += [each.send(to.request(next(_sessions), STEPS - 1)) for each in few]
        await asyncio.sleep(0.02)
    until_s = time.perf_counter() + limit_s
    while sum(c.events > 0 for c in connections) < streams and time.perf_counter() < until_s:
        await asyncio.sleep(0.1)
    before, began_s = sum(c.events for c in connections), time.perf_counter()
    on_watch()
    await asyncio.sleep(watch_s)
    watched_s = time.perf_counter() - began_s
    events = sum(c.events for c in connections) - before
    still = sum(c.events > 0 and not a.done() for c, a in zip(connections, answers, strict=True))
    _close(connections)
    await asyncio.gather(*answers, return_exceptions=True)
    return Streams(still, events / watched_s, watched_s)
