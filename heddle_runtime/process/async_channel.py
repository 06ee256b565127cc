"""A channel on the event loop: messages by a callback, orders kept until the socket takes them."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

from heddle_runtime.process.wire import Channel, ClosedError, WireMessage

In = TypeVar("In")


class AsyncChannel(Generic[In]):
    """One end of a stream socket, inside a running event loop."""

    def __init__(
        self,
        channel: Channel[In],
        *,
        on_message: Callable[[In], None],
        on_close: Callable[[], None],
    ) -> None:
        """`on_message` gets every message.

        `on_close` is called once, when the other side is gone; not after `close`.
        """
        self._channel = channel
        self._on_message, self._on_close = on_message, on_close
        self._loop = asyncio.get_running_loop()
        self._open = self._reading = True
        self._loop.add_reader(channel.fileno(), self._readable)

    @property
    def over(self) -> bool:
        """Whether no more messages can come."""
        return not self._reading

    def send(self, message: WireMessage) -> None:
        """Send a message; it is lost if the other side is gone."""
        if not self._open:
            return
        with contextlib.suppress(ClosedError):
            self._channel.send(message)
            if self._channel.clogged:
                self._loop.add_writer(self._channel.fileno(), self._writable)

    def deliver_rest(self) -> None:
        """Deliver what has come in already."""
        if self._reading:
            with contextlib.suppress(ClosedError):
                while messages := self._channel.receive():
                    for message in messages:
                        self._on_message(message)

    def close(self) -> None:
        if self._open:
            self._open = self._reading = False
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    def _writable(self) -> None:
        try:
            self._channel.flush()
        except ClosedError:
            self._loop.remove_writer(self._channel.fileno())
            return
        if not self._channel.clogged:
            self._loop.remove_writer(self._channel.fileno())

    def _readable(self) -> None:
        try:
            messages = self._channel.receive()
        except ClosedError:
            self._reading = False
            self._loop.remove_reader(self._channel.fileno())
            self._on_close()
            return
        for message in messages:
            self._on_message(message)
