"""A listening socket that can be closed and opened again on its port, for `mock_vllm`."""

import asyncio
from typing import Final

from aiohttp import web

ACCEPTS: Final = 3
"""Iterations of an event loop from the readiness of a listening socket until it has accepted."""


class MockPort:
    """Answers HTTP with an application, or refuses connections."""

    def __init__(self) -> None:
        self.port = 0
        """Any free one at first, and the same from then on."""
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None

    async def start(self, app: web.Application) -> None:
        """Begin to listen."""
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        await self.listen()

    async def listen(self) -> None:
        """Take connections."""
        assert self._runner is not None
        assert self._runner.server is not None
        if self._listening is None:
            loop = asyncio.get_running_loop()
            self._listening = await loop.create_server(
                self._runner.server, "127.0.0.1", self.port, backlog=1024
            )
            self.port = self._listening.sockets[0].getsockname()[1]

    async def refuse(self, *, cut: bool) -> None:
        """Close the listening socket; with `cut`, every connection too."""
        listening, self._listening = self._listening, None
        if listening is None:
            return
        for each in listening.sockets:
            asyncio.get_running_loop().remove_reader(each.fileno())
        for _ in range(ACCEPTS):  # what is being accepted would be left open
            await asyncio.sleep(0)
        listening.close()
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections) if cut else ():
            if connection.transport is not None:
                connection.transport.abort()

    async def close(self) -> None:
        if self._runner is not None:
            await self.refuse(cut=True)
            await self._runner.cleanup()
