"""Processes forked from one that has imported vLLM already, where tests start many engines.

An import of vLLM takes ten seconds of CPU, and is the same each time. `Forks.popen` stands in for
`subprocess.Popen` of `python -m MODULE`: from there on the process runs as one that was started so,
with its own session, environment, output and descriptors, and is a child of this process.

`python -m tests.runtime.forks DESCRIPTOR IMPORT...` is the process that is forked.
"""

import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, BinaryIO, Final

from campaigns.processes import adopting_orphans

_LEAST_DESCRIPTOR: Final = 200
"""Above those that a process was promised by number."""
_LARGEST: Final = 1 << 17
"""Bytes of an order: mostly its environment."""


class Forked:
    """A process; as much of `subprocess.Popen` as its owner uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def wait(self) -> int:
        """Reap it; negative if a signal ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


class Forks:
    """The process that is forked, seen from the tests. It ends with them."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        """`environment` is that of the imports; each fork then gets its own."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def run(self, module: str, *arguments: str, output: BinaryIO) -> int:
        """Run a module to its end, with this process's environment; return its status."""
        command = [sys.executable, "-m", module, *arguments]
        nothing, both = subprocess.DEVNULL, subprocess.STDOUT
        return self.popen(
            command,
            stdin=nothing,
            stdout=output,
            stderr=both,
            env=os.environ,
            pass_fds=(),
            start_new_session=True,
        ).wait()

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: BinaryIO,
        stderr: int,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        start_new_session: bool,
    ) -> Forked:
        """Fork it, and let it run the module of `command`.

        Raises:
            OSError: the process that is forked has ended.
        """
        python, flag, module, *arguments = command
        assert (python, flag) == (sys.executable, "-m")
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
        assert start_new_session
        order = {
            "module": module,
            "arguments": arguments,
            "environment": dict(env),
            "descriptors": list(pass_fds),
        }
        with adopting_orphans():
            message = json.dumps(order).encode()
            socket.send_fds(self._socket, [message], [stdout.fileno(), *pass_fds])
            answer = self._socket.recv(_LARGEST)
        if not answer:
            raise OSError("the process that has imported vLLM has ended")
        return Forked(int(answer))


def subprocess_with(forks: Forks) -> SimpleNamespace:
    """What stands in for the module `subprocess` where a child process is started."""
    return SimpleNamespace(Popen=forks.popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)


def _next_order(orders: socket.socket) -> dict[str, Any] | None:
    """Wait for an order; return it in the process that was forked for it, and None at the end."""
    while True:
        message, received, _, _ = socket.recv_fds(orders, _LARGEST, 8)
        if not message:
            return None
        order: dict[str, Any] = json.loads(message)
        reads, writes = os.pipe()
        if child := os.fork():
            os.close(writes)
            for descriptor in received:
                os.close(descriptor)
            os.waitpid(child, 0)
            orders.send(os.read(reads, 32))
            os.close(reads)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.001)
        os.setsid()
        orders.close()
        os.write(writes, str(os.getpid()).encode())
        os.close(reads)
        os.close(writes)
        _take_descriptors(received, order["descriptors"])
        return order


def _take_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Let the first be the output of this process, and the others have the given numbers."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _LEAST_DESCRIPTOR) for one in received]
    for descriptor in received:
        os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in zip(
        (nothing, moved[0], moved[0], *moved[1:]), (0, 1, 2, *numbers), strict=True
    ):
        os.dup2(descriptor, number)
    for descriptor in (nothing, *moved):
        if descriptor not in (0, 1, 2, *numbers):
            os.close(descriptor)


def main(descriptor: str, *imports: str) -> None:
    """Import, and fork for each order; a fork runs the module that it was made for."""
    orders = socket.socket(fileno=int(descriptor))
    orders.set_inheritable(False)
    for name in imports:
        import_module(name)
    # What was imported is left out of each fork's collections of garbage.
    gc.freeze()
    order = _next_order(orders)
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None
    sys.argv = [order["module"], *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
