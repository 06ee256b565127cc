"""TCP connections that both sides authenticate by a token, which itself is never sent.

The driver listens. Each side sends random bytes and proves by their HMAC-SHA256 that it has the
token. A peer that cannot is closed without another byte. What follows is not encrypted.
"""

import asyncio
import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable
from typing import TypeAlias

Address: TypeAlias = tuple[str, int]

ID_BYTES, NONCE_BYTES, PROOF_BYTES = 16, 32, 32
HANDSHAKE_S = 10.0
"""How long a peer may take to prove that it has the token."""
SILENT_S = 15
"""A peer that answers nothing for so long, not even TCP's own probes, is gone."""
MOST_UNPROVEN = 256
"""Connections without a proof at once; more are closed."""


class RefusedError(ConnectionError):
    """The other side did not prove that it has the token."""


def new_token() -> bytes:
    """A token of one run."""
    return secrets.token_bytes(32)


def new_id() -> bytes:
    """The name of one connection."""
    return secrets.token_bytes(ID_BYTES)


def _proof(token: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"heddle 1 " + side + b"".join(parts), "sha256")


async def connect(address: Address, token: bytes, connection: bytes) -> socket.socket:
    """Connect to a driver; the socket does not block.

    Raises:
        RefusedError: the driver has another token, or does not expect this connection.
        OSError: it cannot be reached.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    try:
        _set_up(sock)
        async with asyncio.timeout(HANDSHAKE_S):
            await loop.sock_connect(sock, address)
            theirs = await _read(sock, NONCE_BYTES)
            ours = secrets.token_bytes(NONCE_BYTES)
            proof = _proof(token, b"node", connection, theirs, ours)
            await loop.sock_sendall(sock, connection + ours + proof)
            answer = await _read(sock, PROOF_BYTES)
        if not hmac.compare_digest(answer, _proof(token, b"driver", connection, ours, theirs)):
            raise RefusedError("the driver does not have the token of this run")
    except BaseException:
        sock.close()
        raise
    return sock


class Listener:
    """Accepts the connections that are expected, in a running event loop."""

    def __init__(self, host: str, token: bytes) -> None:
        """Listen on a free port of `host`, an address of this machine.

        Raises:
            OSError: it is none.
        """
        self._token = token
        self._expected: dict[bytes, Callable[[socket.socket], None]] = {}
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self._socket.bind((host, 0))
        self._socket.listen()
        self.address: Address = self._socket.getsockname()[:2]
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def expect(self, connection: bytes, on_connected: Callable[[socket.socket], None]) -> None:
        """Call `on_connected` once, with the socket, when this connection has come."""
        self._expected[connection] = on_connected

    def forget(self, connection: bytes) -> None:
        """Refuse a connection that was expected."""
        self._expected.pop(connection, None)

    def close(self) -> None:
        """Listen no more; connections that were handed over stay."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for task in self._unproven:
            task.cancel()

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return  # it has gone again, or there are too many files: the next call tries again
        if len(self._unproven) >= MOST_UNPROVEN:
            sock.close()
            return
        task = self._loop.create_task(self._prove(sock))
        self._unproven[task] = None
        task.add_done_callback(lambda done: self._unproven.pop(done, None))

    async def _prove(self, sock: socket.socket) -> None:
        handed_over = False
        try:
            _set_up(sock)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(HANDSHAKE_S):
                    ours = secrets.token_bytes(NONCE_BYTES)
                    await self._loop.sock_sendall(sock, ours)
                    said = await _read(sock, ID_BYTES + NONCE_BYTES + PROOF_BYTES)
                    connection, theirs = said[:ID_BYTES], said[ID_BYTES:-PROOF_BYTES]
                    proof = _proof(self._token, b"node", connection, ours, theirs)
                    if not hmac.compare_digest(said[-PROOF_BYTES:], proof):
                        return
                    on_connected = self._expected.pop(connection, None)
                    if on_connected is None:
                        return
                    answer = _proof(self._token, b"driver", connection, theirs, ours)
                    await self._loop.sock_sendall(sock, answer)
                    handed_over = True
                    on_connected(sock)
        finally:
            if not handed_over:
                sock.close()


async def _read(sock: socket.socket, size: int) -> bytes:
    """Read so many bytes.

    Raises:
        RefusedError: the other side has closed the connection.
    """
    came = b""
    while len(came) < size:
        data = await asyncio.get_running_loop().sock_recv(sock, size - len(came))
        if not data:
            raise RefusedError("the connection was closed: the other side has another token")
        came += data
    return came


def _set_up(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", SILENT_S // 3),
        ("TCP_KEEPINTVL", SILENT_S // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", SILENT_S * 1000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
