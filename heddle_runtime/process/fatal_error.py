"""How the process of an engine that cannot go on ends: it says why, and waits for nothing."""

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator
from typing import NoReturn

from heddle_runtime.process.wire import Broken, Channel, ClosedError, Order

BROKEN = 70
"""Exit status of an engine that has said why."""


def give_up(channel: Channel[Order], error: BaseException) -> NoReturn:
    """Say why, to the driver and in the log, and end."""
    traceback.print_exception(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    with contextlib.suppress(ClosedError):
        channel.send(Broken(reason))
    os._exit(BROKEN)


@contextlib.contextmanager
def threads_matter(channel: Channel[Order]) -> Iterator[None]:
    """Give up when a thread dies inside the block: vLLM would wait for it without end.

    It is for the start of an engine: NIXL's listener dies when its port is taken, and is waited
    for. Nobody else may use the channel meanwhile.
    """

    def died(thread: threading.ExceptHookArgs) -> None:
        give_up(channel, thread.exc_value or RuntimeError("a thread died"))

    threading.excepthook = died
    try:
        yield
    finally:
        threading.excepthook = threading.__excepthook__
