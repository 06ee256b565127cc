"""`heddle serve` under clients that want to harm it: its memory, and the answers of the others.

    PYTHONPATH=.:benchmarks python -m gateway.hostile [--idle 10000] [--rounds 3]

The gateway is a process with fake engines, whose replies are known. Some clients hold sessions with
it, first alone. Then others hold idle connections, half a head or half a body, send bodies byte by
byte, and in each round what `ATTACKS` has, all at once. Each must get the status that is its due,
and each answer to the first clients must be the reply of its step. The status is 1 if the gateway
had more than 1 GB at any time.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import resource
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gateway.load import Address, Latencies, LoadError, connect
from gateway.processes import Process, free_port
from gateway.prompts import STEPS, chat_body
from gateway.routers import CHAT, GENERATE
from gateway.soak import resident_mb

CLIENTS, SLOW, LEAVING = 16, 200, 200
MOST_MB = 1_000.0
ALONE_S = 3.0
BODY_BYTES = 32 << 20
"""Most that the gateway reads of a body."""
_NEARLY = BODY_BYTES - 1_000
_PIECE = 256 << 10
REPLIES = tuple(f"reply {step} of its session and of no other" for step in range(STEPS))


def _head(path: str, *lines: str) -> bytes:
    kind = "Content-Type: application/json"
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: 127.0.0.1", kind, *lines, "", "")).encode()


def _whole(path: str, body: bytes, *lines: str) -> Iterator[bytes]:
    yield _head(path, f"Content-Length: {len(body)}", *lines)
    yield from (body[at : at + _PIECE] for at in range(0, len(body), _PIECE))


def _filled(begin: bytes, piece: bytes, end: bytes) -> bytes:
    """A body of nearly `BODY_BYTES`."""
    return begin + piece * ((_NEARLY - len(begin) - len(end)) // len(piece)) + end


def _chunks() -> Iterator[bytes]:
    yield _head(CHAT, "Transfer-Encoding: chunked")
    chunk = b"%x\r\n%b\r\n" % (_PIECE, b" " * _PIECE)
    yield from itertools.repeat(chunk, (64 << 20) // _PIECE)


def _long_headers() -> Iterator[bytes]:
    yield b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    yield from (b"X-%d: %b\r\n" % (n, b"v" * 100) for n in range(100_000))


def _endless_header() -> Iterator[bytes]:
    yield b"GET /livez HTTP/1.1\r\nX: "
    yield from itertools.repeat(b"v" * _PIECE, 256)


def _packed() -> Iterator[bytes]:
    return _whole(CHAT, gzip.compress(bytes(64 << 20)), "Content-Encoding: gzip")


_MESSAGES = b'{"max_tokens":4,"messages":['
_USER = b'{"role":"user","content":"'
_WORD = b"a" * 99 + b" "
"""Long: fake engines have a token for each."""

ATTACKS: dict[str, tuple[Callable[[], Iterator[bytes]], int]] = {
    "64 MB of JSON": (lambda: _whole(CHAT, b'{"messages":[%b]}' % (b" " * (64 << 20))), 413),
    "64 MB in chunks": (_chunks, 413),
    "64 MB packed": (_packed, 413),
    "arrays": (lambda: _whole(CHAT, _filled(_MESSAGES, b"[],", b"[]]}")), 413),
    "arrays beside a prompt": (
        lambda: _whole(CHAT, _filled(_MESSAGES + _USER + b'a"}],"x":[', b"[[[]]],", b"[]]}")),
        413,
    ),
    "texts": (lambda: _whole(CHAT, _filled(_MESSAGES, b'"ab",', b'""]}')), 413),
    "deep nesting": (lambda: _whole(CHAT, _filled(_MESSAGES, b"[", b"")), 413),
    "deep nesting, short": (lambda: _whole(CHAT, _MESSAGES + b"[" * 100_000), 400),
    "a long text": (lambda: _whole(CHAT, _filled(_MESSAGES + _USER, _WORD, b'"}]}')), 400),
    "many ids": (lambda: _whole(GENERATE, _filled(b'{"token_ids":[', b"9999,", b"1]}")), 400),
    "many headers": (_long_headers, 400),
    "a header without end": (_endless_header, 400),
}
"""What is sent, and the status of its answer."""


@dataclass
class Found:
    """What was seen. Memory in MB; the latencies of answers without hostile clients, and beside."""

    start_mb: float = 0.0
    held_mb: float = 0.0
    """With the connections that are held open."""
    end_mb: float = 0.0
    peak_mb: float = 0.0
    alone: Latencies = field(default_factory=Latencies)
    beside: Latencies = field(default_factory=Latencies)


async def attacked(port: int, name: str) -> None:
    """Send an attack until it is answered.

    Raises:
        LoadError: the status is another than its due.
    """
    pieces, due = ATTACKS[name]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
        with suppress(OSError):
            for piece in pieces():
                writer.write(piece)
                await writer.drain()

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(120.0):
            line = await reader.readline()
    finally:
        sending.cancel()
        writer.transport.abort()
    if int(line[9:12] or 0) != due:
        raise LoadError(f"{name}: {line!r}, and {due} was due")


async def _held(port: int, sent: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return writer


async def _sends_slowly(port: int) -> None:
    writer = await _held(port, _head(CHAT, "Content-Length: 1000000"))
    try:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.5)
    finally:
        writer.transport.abort()


async def _leaves(port: int) -> None:
    """Send half a body, and reset the connection."""
    writer = await _held(port, _head(CHAT, "Content-Length: 100000") + b" " * 50_000)
    await asyncio.sleep(0.2)
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hold_sessions(port: int, numbers: Iterator[int], into: Callable[[], Latencies]) -> None:
    """Hold sessions, one after another.

    Raises:
        LoadError: an answer is not the reply of its step.
    """
    to, connection = Address(port, CHAT, chat_body), await connect(port)
    try:
        for session in numbers:
            for step in range(STEPS):
                began_s = time.perf_counter()
                status, body = await connection.send(to.request(session, step))
                into().seconds.append(time.perf_counter() - began_s)
                said = json.loads(body)["choices"][0]["message"]["content"] if status == 200 else ""
                if said != REPLIES[step]:
                    raise LoadError(f"session {session}, step {step}: status {status}, {body!r}")
    finally:
        if connection.transport is not None:
            connection.transport.close()


async def _run(process: Process, port: int, idle: int, rounds: int, found: Found) -> None:
    now, numbers = [found.alone], itertools.count(1)
    clients = [hold_sessions(port, numbers, lambda: now[0]) for _ in range(CLIENTS)]
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(each) for each in clients]
        await asyncio.sleep(ALONE_S)
        found.start_mb, now[0] = resident_mb(process), found.beside
        held = [await _held(port, b"") for _ in range(idle)]
        half = _head(CHAT, "Content-Length: 10")[:-2]
        held += [await _held(port, half) for _ in range(SLOW)]
        others += [group.create_task(_sends_slowly(port)) for _ in range(SLOW)]
        await asyncio.sleep(ALONE_S)
        found.held_mb = resident_mb(process)
        for _ in range(rounds):
            leaving = (_leaves(port) for _ in range(LEAVING))
            await asyncio.gather(*leaving, *(attacked(port, name) for name in ATTACKS))
        found.end_mb, found.peak_mb = resident_mb(process), process.peak_mb()
        await asyncio.sleep(ALONE_S)
        for writer in held:
            writer.transport.abort()
        for each in others:
            each.cancel()


def hostile(*, idle: int, rounds: int, core: int) -> Found:
    """Return what was seen.

    Raises:
        LoadError: an attack got another status than its due, or a client another's reply.
    """
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        port, log = free_port(), Path(folder) / "gateway.log"
        replies = Path(folder) / "replies.jsonl"
        replies.write_text("".join(json.dumps({"content": said}) + "\n" for said in REPLIES))
        command = (
            *(sys.executable, "-m", "heddle.cli", "serve", "--engine", "fake"),
            *("--port", str(port), "--out", folder),
            *("--set", f"serve.fake_replies={replies}", "--set", 'serve.names=["mock"]'),
        )
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = Process(command, core=core, log=log, environment=environment)
        try:
            process.wait_until_answers(f"http://127.0.0.1:{port}/health")
            asyncio.run(_run(process, port, idle, rounds, found))
        finally:
            process.end()
        if "Traceback" in (text := log.read_text(errors="replace")):
            raise LoadError(text[-2_000:])
    return found


def raise_file_limit() -> None:
    """Permit a file for each connection: as many as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    """Return the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--idle", type=int, default=10_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--router-core", type=int, default=0)
    given = options.parse_args()
    raise_file_limit()
    found = hostile(idle=given.idle, rounds=given.rounds, core=given.router_core)
    memory = f"{found.start_mb:.0f} MB, {found.held_mb:.0f} with {given.idle:,} idle connections, "
    print(f"{memory}{found.end_mb:.0f} at the end, {found.peak_mb:.0f} at most")
    for name, of in (("alone", found.alone), ("beside hostile ones", found.beside)):
        times = ", ".join(f"{1e3 * of.at(share):.0f}" for share in (0.5, 0.99, 1.0))
        print(f"{len(of.seconds):,} right answers {name}; p50, p99 and most: {times} ms")
    return int(found.peak_mb > MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
