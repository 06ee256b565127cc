"""The process that stands between Heddle and one tool call.

Reads a `Request` as one line of JSON from its input, runs the program behind the fence, and writes
a `Report` as JSON to its output. It reads the program's own output, so that a flood never reaches
Heddle, and it ends only when no process of the program is left. The end of its input, which comes
however Heddle ends, tells it to give up.
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
    FenceError,
    numbers,
    prctl,
)
from heddle_runtime.sandbox.program import Request, run_first_process
from heddle_runtime.sandbox.remove import remove_folder


class Report(TypedDict, total=False):
    """How the program ended; or `refused` alone: why it could not be run."""

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
        signal.signal(signal.SIGTERM, _give_up)
        os.umask(0o022)
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            return  # given up before it began
        report = _run(json.loads(line))
    except FenceError as error:
        report = Report(refused=str(error))
    if report is not None:
        sys.stdout.write(json.dumps(report))
        sys.stdout.flush()


def _give_up(*_: object) -> NoReturn:
    sys.exit(1)


def _run(request: Request) -> Report | None:
    """Return the report; None when Heddle has lost interest."""
    if request["way"] == "namespaces":
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
        # A name that differs each time would make equal programs give different observations.
        report["stdout"] = report["stdout"].replace(folder, "")
        report["stderr"] = report["stderr"].replace(folder, "")
    return report


class _Call:
    """One program, as seen from outside."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._output: dict[int, bytearray] = {}
        """By the end of the pipe that it is read from: standard output, then standard error."""
        self._news = bytearray()
        """What the first process has told, as a line of JSON."""

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
            out, err, news = (read for read, _ in pipes)
            self._output = {out: bytearray(), err: bytearray()}
            cut = self._watch(news, started_s + self._request["wall_s"])
        finally:
            _end_all(first)
        wall_s = time.monotonic() - started_s
        if cut == "given up":
            return None
        for pipe in self._output:
            while data := os.read(pipe, _CHUNK):
                if self._keep(pipe, data) and not cut:
                    cut = "output"
        told: dict[str, Any] = json.loads(self._news.partition(b"\n")[0] or b"{}")
        if "refused" in told:
            return Report(refused=told["refused"])
        out_text, err_text = (data.decode("utf-8", "replace") for data in self._output.values())
        report = Report(stdout=out_text, stderr=err_text, wall_s=wall_s)
        report.update(Report(status=cut) if cut else self._own_end(told))
        return report

    def _watch(self, news: int, until_s: float) -> str:
        """Read what comes until the program ends; return what cut it, or "" for its own end."""
        poll = select.poll()
        for pipe in (0, news, *self._output):
            poll.register(pipe, select.POLLIN)
        while (left_s := until_s - time.monotonic()) > 0:
            for pipe, _ in poll.poll(left_s * 1000):
                if pipe == 0:
                    return "given up"
                data = os.read(pipe, _CHUNK)
                if pipe == news:
                    self._news += data
                    if not data or data.endswith(b"\n"):
                        return ""
                elif not data:
                    poll.unregister(pipe)
                elif self._keep(pipe, data):
                    return "output"
        return "time"

    def _keep(self, pipe: int, data: bytes) -> bool:
        """Keep what there is room for; return whether it was too much."""
        kept = self._output[pipe]
        room = self._request["output_bytes"] - len(kept)
        kept += data[:room]
        return len(data) > room

    def _own_end(self, told: dict[str, Any]) -> Report:
        if not told:  # the first process itself was killed: the machine has run out of memory
            return Report(status="signal", signal="SIGKILL")
        wait_status = told["wait_status"]
        if os.WIFEXITED(wait_status):
            code = os.WEXITSTATUS(wait_status)
            return Report(status="error" if code else "ok", exit_code=code)
        number = os.WTERMSIG(wait_status)
        spent = number == signal.SIGKILL and told["cpu_s"] >= self._request["cpu_s"]
        if spent or number == signal.SIGXCPU:
            return Report(status="cpu")
        known = number in list(signal.Signals)
        return Report(
            status="signal", signal=signal.Signals(number).name if known else f"signal {number}"
        )


def _end_all(first: int) -> None:
    """Kill the first process, and wait until all are gone.

    With namespaces it is the first of its own, and the kernel ends the others before it lets it be
    reaped. Without, its one child dies with it, as was asked of the kernel, and is reaped here.
    """
    os.kill(first, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
