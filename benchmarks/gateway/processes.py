"""Processes of the benchmark: mock engines and routers, each on its core."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_S = 120.0


class StartError(Exception):
    """A process did not begin to serve; the message has the end of its log."""


class Process:
    """A process and those that it started."""

    def __init__(
        self, command: Sequence[str], *, core: int, log: Path, environment: dict[str, str]
    ) -> None:
        """Start `command` on one core."""
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ("taskset", "-c", str(core), *command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                cwd=log.parent,
            )

    @property
    def pids(self) -> list[int]:
        """Of the process and its descendants."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                parents[int(entry.parent.name)] = int(_fields(entry.parent)[1])
        found = [self._process.pid]
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found

    def cpu_s(self) -> float:
        """CPU seconds so far, in user and system."""
        ticks = 0
        for pid in self.pids:
            with suppress(OSError):
                ticks += sum(map(int, _fields(Path(f"/proc/{pid}"))[11:13]))
        return ticks / TICKS_PER_S

    def peak_mb(self) -> float:
        """The largest resident size of each process, added up, in MB."""
        kib = 0
        for pid in self.pids:
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        kib += int(line.split()[1])
        return kib * 1024 / 1e6

    def wait_until_answers(self, url: str) -> None:
        """Wait for status 200.

        Raises:
            StartError: the process ended, or did not answer in time.
        """
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=2):
                return
            time.sleep(0.1)
        why = "did not answer" if self._process.poll() is None else "ended"
        raise StartError(f"{url} {why}:\n{self._log.read_text(errors='replace')[-2000:]}")

    def end(self) -> None:
        """End it, and what it started."""
        pids = self.pids
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in pids[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def _fields(process: Path) -> list[str]:
    """The fields of ``stat`` after the name."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def mock_engines(count: int, *, core: int, logs: Path) -> Iterator[list[int]]:
    """Run mock engines; yields their ports."""
    started: list[Process] = []
    ports = [free_port() for _ in range(count)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    try:
        for port in ports:
            command = (sys.executable, "-m", "gateway.mock_engine", str(port))
            log = logs / f"engine-{port}.log"
            started.append(Process(command, core=core, log=log, environment=environment))
        for process, port in zip(started, ports, strict=True):
            process.wait_until_answers(f"http://127.0.0.1:{port}/health")
        yield ports
    finally:
        for process in started:
            process.end()
