"""One command in a process of its own, ended at a chosen Python call or limited by the kernel.

Moments are numbers of calls, not times: the same number is the same moment on every machine.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from heddle import command

PATIENCE_S: Final = 600.0
"""For a command that waits for ever; on a busy machine a short one takes long too."""
MOST_CPU_S: Final = 120
DEFECT: Final = 70
"""Status of a process in which an error got past the command line."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How a command ended."""

    status: int
    """As of `subprocess`: negative by a signal."""
    output: str
    """Of both streams."""
    calls: int
    """Python calls until its end; 0 where they are not counted."""


def started(
    arguments: tuple[str, ...],
    folder: Path,
    prepare: Callable[[], None],
    *,
    counts_calls: bool = False,
) -> "Running":
    """Start a command in a folder; `prepare` is called in its process."""
    out_read, out_write = os.pipe()
    count_read, count_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out_read)
        os.close(count_read)
        try:
            _command(arguments, folder, prepare, out_write, count_write if counts_calls else None)
        except KeyboardInterrupt:  # between the end of the command and that of its process
            os._exit(128 + signal.SIGINT)
        finally:  # never out of here: the callers would remove the folders of their other process
            os._exit(DEFECT)
    os.close(out_write)
    os.close(count_write)
    return Running(pid, out_read, count_read)


class Running:
    """A command that was started."""

    def __init__(self, pid: int, out: int, count: int) -> None:
        self._pid, self._out, self._count = pid, out, count

    def wait(self) -> CommandEnd:
        """Wait for its end, and not for processes that it leaves.

        Raises:
            TimeoutError: it waits for ever; it was killed.
        """
        chunks: list[bytes] = []
        until_s, pid = time.monotonic() + PATIENCE_S, 0
        while pid == 0:
            if select.select([self._out], [], [], 0.02)[0]:
                chunks.append(os.read(self._out, 1 << 16))
                if not chunks[-1]:
                    pid, status = os.waitpid(self._pid, 0)
                    break
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if time.monotonic() > until_s:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                raise TimeoutError(f"no end after {PATIENCE_S:.0f} s")
        while select.select([self._out], [], [], 0)[0]:
            chunks.append(os.read(self._out, 1 << 16))
            if not chunks[-1]:
                break
        os.close(self._out)
        counted = b""
        if select.select([self._count], [], [], 0)[0]:
            counted = os.read(self._count, 64)
        os.close(self._count)
        return CommandEnd(
            status=os.waitstatus_to_exitcode(status),
            output=b"".join(chunks).decode(errors="replace"),
            calls=int(counted or 0),
        )


def _command(
    arguments: tuple[str, ...],
    folder: Path,
    prepare: Callable[[], None],
    out: int,
    count: int | None,
) -> NoReturn:
    status = DEFECT
    calls = [0]
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        if count is not None:
            sys.settrace(_counting(calls))
        prepare()
        sys.argv = ["heddle", *arguments]
        command.main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.settrace(None)
        traceback.print_exc()
    sys.settrace(None)
    writing = sys.modules.get("heddle_trace.writing")
    if writing is not None:  # the only one of the functions of atexit that matters here
        writing.remove_unfinished()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 1
    if count is not None:
        os.write(count, str(calls[0]).encode())
    os._exit(status)


def _counting(calls: list[int]) -> Callable[..., Any]:
    def on_call(frame: Any, event: str, argument: Any) -> None:
        calls[0] += not _is_first(frame)

    return on_call


def _is_first(frame: Any) -> bool:
    """Whether a call is that of the command itself, in which nothing can be handled yet."""
    return frame.f_code is command.main.__code__


def signalled(number: int, call: int) -> Callable[[], None]:
    """Make the preparation that sends a signal at a call."""
    left = [call]

    def on_call(frame: Any, event: str, argument: Any) -> None:
        left[0] -= not _is_first(frame)
        if left[0] == 0:
            sys.settrace(None)
            os.kill(os.getpid(), number)

    return lambda: sys.settrace(on_call)


def disk_full(size: int) -> Callable[[], None]:
    """Make the preparation after which no file grows above so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def without_privileges() -> None:
    """Give up the right to write where permissions refuse it, which the administrator has."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def nothing() -> None:
    """Prepare nothing."""
