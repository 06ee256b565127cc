"""Runs a command until it ends, or until standard input does; then all that it started is killed.

python -m heddle_runtime.process.guard COMMAND ARGUMENT...

The process that starts it holds the other end of standard input, which closes with that process.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

STOP_S = 15.0
"""How long the command may take to end after SIGTERM."""


def main() -> None:
    """Run the command, and end with its status."""
    # What kills the children of the process that started it, as Ray does, leaves this one its work.
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_input, args=(command,), daemon=True).start()
    status = command.wait()
    _kill_group(command)
    sys.exit(status & 0xFF)


def _end_with_input(command: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    command.terminate()
    with suppress(subprocess.TimeoutExpired):
        command.wait(STOP_S)
    _kill_group(command)


def _kill_group(command: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(command.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
