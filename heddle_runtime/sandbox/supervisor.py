"""The supervisor process of one tool call.

It reads a `ProgramRequest` as a line of JSON from its input, runs the program in the sandbox, and
writes a `Report` as JSON to its output. It reads and limits the program's output, and it ends only
when no process of the program is left. The end of its input cancels the call; the kernel closes the
input however Heddle ends.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn, TypedDict

from heddle_runtime.sandbox import namespaces
from heddle_runtime.sandbox.kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    IsolationError,
    numbers,
    prctl,
)
from heddle_runtime.sandbox.program import ProgramRequest, run_first_process
from heddle_runtime.sandbox.remove import remove_folder


class Report(TypedDict, total=False):
    """How the program ended; or `refused` alone: why it could not run."""

    refused: str
    status: str
    exit_code: int | None
    signal: str
    stdout: str
    stderr: str
    wall_s: float


_CHUNK = 1 << 16


def main() -> None:
    """Read the request, run it, write the report."""
    try:
        numbers()
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, _exit)
        os.umask(0o022)
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            return  # cancelled before it began
        report = _run(json.loads(line))
    except IsolationError as error:
        report = Report(refused=str(error))
    if report is not None:
        sys.stdout.write(json.dumps(report))
        sys.stdout.flush()


def _exit(*_: object) -> NoReturn:
    sys.exit(1)


def _run(request: ProgramRequest) -> Report | None:
    """Return the report; None when the call was cancelled."""
    if request["mode"] == "namespaces":
        namespaces.enter()
        return _Call(request).run()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    request["folder"] = folder = f"{request['folder']}/{os.getpid()}"
    os.mkdir(folder, 0o700)
    try:
        report = _Call(request).run()
    finally:
        remove_folder(folder)
    if report is not None and "refused" not in report:
        # The name differs each time; without it, equal programs give equal observations.
        report["stdout"] = report["stdout"].replace(folder, "")
        report["stderr"] = report["stderr"].replace(folder, "")
    return report


class _Call:
    """One program, seen from the supervisor."""

    def __init__(self, request: ProgramRequest) -> None:
        self._request = request
        self._output: dict[int, bytearray] = {}
        """By the pipe's read end: standard output, then standard error."""
        self._status = bytearray()
        """The report of the first process, a line of JSON."""

    def run(self) -> Report | None:
        """Run the program to its end or to its first limit; leave no process of it."""
        pipes = [os.pipe() for _ in range(3)]
        started_s = time.monotonic()
        first = os.fork()
        if first == 0:
            run_first_process(self._request, *(write for _, write in pipes))
        try:
            for _, write in pipes:
                os.close(write)
            out, err, status = (read for read, _ in pipes)
            self._output = {out: bytearray(), err: bytearray()}
            cut = self._watch(status, started_s + self._request["wall_s"])
        finally:
            _end_all(first)
        wall_s = time.monotonic() - started_s
        if cut == "cancelled":
            return None
        for pipe in self._output:
            while data := os.read(pipe, _CHUNK):
                if self._keep(pipe, data) and not cut:
                    cut = "output"
        first_report: dict[str, Any] = json.loads(self._status.partition(b"\n")[0] or b"{}")
        if "refused" in first_report:
            return Report(refused=first_report["refused"])
        out_text, err_text = (data.decode("utf-8", "replace") for data in self._output.values())
        report = Report(stdout=out_text, stderr=err_text, wall_s=wall_s)
        report.update(Report(status=cut) if cut else self._own_end(first_report))
        return report

    def _watch(self, status: int, until_s: float) -> str:
        """Read the pipes until the program ends; return the limit that ended it, or ""."""
        poll = select.poll()
        for pipe in (0, status, *self._output):
            poll.register(pipe, select.POLLIN)
        while (left_s := until_s - time.monotonic()) > 0:
            for pipe, _ in poll.poll(left_s * 1000):
                if pipe == 0:
                    return "cancelled"
                data = os.read(pipe, _CHUNK)
                if pipe == status:
                    self._status += data
                    if not data or data.endswith(b"\n"):
                        return ""
                elif not data:
                    poll.unregister(pipe)
                elif self._keep(pipe, data):
                    return "output"
        return "time"

    def _keep(self, pipe: int, data: bytes) -> bool:
        """Keep data up to the limit; return whether there was more."""
        kept = self._output[pipe]
        free = self._request["output_bytes"] - len(kept)
        kept += data[:free]
        return len(data) > free

    def _own_end(self, first_report: dict[str, Any]) -> Report:
        if (
            not first_report
        ):  # the first process itself was killed: the machine has run out of memory
            return Report(status="signal", signal="SIGKILL")
        wait_status = first_report["wait_status"]
        if os.WIFEXITED(wait_status):
            code = os.WEXITSTATUS(wait_status)
            return Report(status="error" if code else "ok", exit_code=code)
        number = os.WTERMSIG(wait_status)
        spent = number == signal.SIGKILL and first_report["cpu_s"] >= self._request["cpu_s"]
        if spent or number == signal.SIGXCPU:
            return Report(status="cpu")
        known = number in list(signal.Signals)
        return Report(
            status="signal", signal=signal.Signals(number).name if known else f"signal {number}"
        )


def _end_all(first: int) -> None:
    """Kill the first process, and wait until all are gone.

    With namespaces it is process 1 of its own, and the kernel ends the others before it can be
    reaped. Without them its child dies with it (PR_SET_PDEATHSIG), unless it has changed that:
    it then has this process as parent, and is killed here.
    """
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    with suppress(ChildProcessError):
        while True:
            for child in _children():
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    """Children of this process; they stay in this list until they are reaped."""
    this, found = str(os.getpid()), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as f:
            # Its second field, the name of the program, may have spaces and parentheses.
            if f.read().rpartition(")")[2].split()[1] == this:
                found.append(int(name))
    return found
