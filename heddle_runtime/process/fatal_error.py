"""How the process of an engine ends after a fatal error: it reports the reason and exits."""

import contextlib
import os
import threading
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

from heddle_runtime.process.wire import Broken, Channel, ClosedError

BROKEN = 70
"""Exit status of an engine that has reported its reason."""


def fatal_error(channel: Channel[Any], error: BaseException) -> NoReturn:
    """Report the reason to the driver and in the log, and exit."""
    traceback.print_exception(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    with contextlib.suppress(ClosedError):
        channel.send(Broken(reason))
    os._exit(BROKEN)


@contextlib.contextmanager
def fail_on_thread_death(channel: Channel[Any]) -> Iterator[None]:
    """Exit when a thread dies inside the block: vLLM would wait for it without end.

    For the start of an engine: NIXL's listener thread dies when its port is taken. Nothing else
    may use the channel meanwhile.
    """

    def died(thread: threading.ExceptHookArgs) -> None:
        fatal_error(channel, thread.exc_value or RuntimeError("a thread died"))

    threading.excepthook = died
    try:
        yield
    finally:
        threading.excepthook = threading.__excepthook__
