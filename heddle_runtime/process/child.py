"""A child process, seen from the driver: started, watched, and ended with all that it started.

It leads its own process group: Ctrl-C at the terminal reaches only the driver, and the driver can
end everything that the process started. If the driver is killed, the kernel kills the process (see
`heddle_runtime.process.connection`), and its socket closes.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from heddle_runtime.process.async_channel import AsyncChannel
from heddle_runtime.process.wire import Channel, WireMessage

HANG_S = 10.0
"""How long a process may take to end after it has closed its socket."""
TAIL_BYTES = 4096
PART_DIED = 71
"""Exit status of an engine that lost a TP process. A number, because the last line of the log may
come from the other TP processes."""


In = TypeVar("In")


class ChildProcess(Generic[In]):
    """A running process of this machine, its socket, and two callbacks from the event loop."""

    def __init__(
        self,
        module: str,
        *,
        reads: Any,
        environment: Mapping[str, str],
        log: Path,
        on_report: Callable[[In], None],
        on_exit: Callable[[str], None],
    ) -> None:
        """Start `python -m module`, its output appended to `log`.

        `on_report` gets every message, of type `reads`. Then `on_exit` gets the reason, once, when
        the process is reaped and all that it started is gone.

        Raises:
            OSError: the process cannot be started or its log cannot be written.
        """
        self._log, self._on_report, self._on_exit = log, on_report, on_exit
        self._silent = False
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        try:
            with theirs, log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            ours.close()
            raise
        self._open = True
        # Watched apart from the socket, which a process that it started may keep open.
        self._loop.add_reader(self._pidfd, self._exited)
        self._channel: AsyncChannel[In] = AsyncChannel(
            Channel(ours, reads), on_message=self._report, on_close=self._closed
        )

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    def cpu_s(self) -> float:
        """CPU seconds of all processes of its group so far."""
        ticks = sum(int(each[11]) + int(each[12]) for each in _group(self.pid).values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped a process of its group."""
        return any(each[0] in "Tt" for each in _group(self.pid).values())

    def send(self, message: WireMessage) -> None:
        """Send a message; one to a dead process is lost, since its exit is reported anyway."""
        self._channel.send(message)

    def kill(self, *, silent: bool = False) -> None:
        """End the whole group now. `silent`: report nothing more, not even its exit reason."""
        self._silent = self._silent or silent
        members = group_members(self.pid) if self._open else []
        unlink_shared_memory(members)
        for member in members:
            if not _is_tracker(member):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)

    def _report(self, report: In) -> None:
        if not self._silent:
            self._on_report(report)

    def _closed(self) -> None:
        self._loop.call_later(HANG_S, self.kill)

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._channel.deliver_rest()
        self._channel.close()
        # Before it is reaped: until then no other process gets its number or the group's.
        self.kill()
        self._open = False
        reason = self._describe(self._process.wait())
        self._when_empty(reason, self._loop.time() + HANG_S)

    def _when_empty(self, reason: str, limit_s: float) -> None:
        """Report the exit once the whole group is gone, and its resources are free."""
        members = group_members(self.pid)
        if members and self._loop.time() < limit_s:
            self._loop.call_later(0.01, self._when_empty, reason, limit_s)
            return
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        self._on_exit("" if self._silent else reason)

    def _describe(self, status: int) -> str:
        if status < 0:
            try:
                return f"killed by {signal.Signals(-status).name}"
            except ValueError:
                return f"killed by signal {-status}"
        if status == PART_DIED:
            return "one of its TP processes died"
        last = last_line(self._log)
        return f"exit status {status}" + (f": {last}" if last else "")


def last_line(log: Path) -> str:
    """The last line of a log that has something in it; empty if there is none."""
    try:
        with log.open("rb") as opened:
            opened.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = opened.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _is_tracker(process: int) -> bool:
    """Whether it is the resource tracker of Python's multiprocessing.

    It ends by itself and removes shared memory that others leave; killed, it could not.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def unlink_shared_memory(processes: Sequence[int]) -> None:
    """Unlink the shared memory of vLLM's CPU collectives that these processes have open.

    It would stay after them: vLLM leaves it to a normal exit.
    """
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                name = line.partition("/dev/shm/")[2]
                if name.startswith("vllm_"):
                    Path("/dev/shm", name).unlink(missing_ok=True)


def group_members(group: int) -> list[int]:
    """Return the live processes of a process group; zombies hold no resources."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    return list(_group(group))


def _group(group: int) -> dict[int, list[str]]:
    """Fields of /proc/PID/stat, from the state on, of each live process of a group."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            # After the name, which may have any characters: state, parent, group.
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        if int(fields[2]) == group and fields[0] not in "ZX":
            found[int(entry)] = fields
    return found
