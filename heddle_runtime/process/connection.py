"""How a child process connects to its parent, and ends with it."""

import ctypes
import os
import select
import signal
import socket
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from heddle_runtime.process.wire import Channel

_PR_SET_PDEATHSIG = 1


class FirstMessage(Protocol):
    """What a parent sends first."""

    @property
    def parent(self) -> int: ...


First = TypeVar("First", bound=FirstMessage)


def connect(descriptor: int, reads: Any, first: type[First]) -> tuple[Channel[Any], First]:
    """Open the socket that this process inherited, and read the first message.

    `reads` is the type of all messages, `first` that of the first. From now on, this process and
    those that it forks end with the parent.

    Raises:
        ClosedError: the parent is gone.
    """
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    own = os.getpid()

    def in_child() -> None:
        # With a copy of the socket open, the parent would not see that this process died.
        os.close(sock.detach())
        die_with(own)

    os.register_at_fork(after_in_child=in_child)
    channel: Channel[Any] = Channel(sock, reads)
    messages: Sequence[Any] = ()
    while not messages:
        select.select([channel], [], [])
        messages = channel.receive()
    boot = messages[0]
    assert isinstance(boot, first), f"the first message is {first.__name__}"
    die_with(boot.parent)
    return channel, boot


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, of that process id, dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before this call
