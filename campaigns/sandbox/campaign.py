"""The campaign `sandbox`: some attacks at once in one way of isolation a case."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Final, Literal
from unittest.mock import patch

import msgspec

from campaigns.campaign import Failure, Outcome
from campaigns.processes import adopting_orphans, descendants, wait_until_gone
from campaigns.sandbox.attacks import ATTACKS, program
from heddle_runtime.sandbox.runner import (
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailableError,
)

LIMITS: Final = SandboxLimits(wall_s=2.0, cpu_s=2, memory_bytes=256 << 20, output_bytes=4096)


class SandboxCase(msgspec.Struct, frozen=True, kw_only=True):
    """Programs that run at once."""

    mode: Literal["namespaces", "filter"]
    attacks: tuple[str, ...]


class SandboxAttacks:
    """The list of attacks, in every order and company."""

    name = "sandbox"
    unit = "groups of attacks"
    tolerated = 0.0
    saves = True
    most_wall_s = 600.0
    case_type = SandboxCase

    def begin(self, folder: str) -> None:
        """Nothing to prepare."""

    def case(self, rng: Random) -> SandboxCase:
        """Draw a case."""
        return SandboxCase(
            mode=rng.choice(("namespaces", "filter")),
            attacks=tuple(rng.sample(list(ATTACKS), rng.choice((1, 4, 8)))),
        )

    def run(self, case: SandboxCase) -> Outcome:
        """Run the programs of a case, and look at what is outside afterwards."""
        if not permitted(case.mode):
            return Outcome(counts={f"{case.mode} not permitted here": 1})
        with ExitStack() as stack:
            outside = Outside(stack)
            try:
                done = asyncio.run(_run(case, outside))
            except SandboxError as error:
                own = "outliving: no death signal", "signals: kill the supervisor"
                if not any(name in own for name in case.attacks):
                    return Outcome(Failure(f"supervisor {case.mode}", str(error)))
                done = []
            failure = outside.harmed(case, done)
        return Outcome(failure, {f"attacks, {case.mode}": len(case.attacks)})

    def smaller(self, case: SandboxCase) -> Iterator[SandboxCase]:
        """Each attack alone, then all but one."""
        if len(case.attacks) > 1:
            for name in case.attacks:
                yield msgspec.structs.replace(case, attacks=(name,))
            for i in range(len(case.attacks)):
                fewer = case.attacks[:i] + case.attacks[i + 1 :]
                yield msgspec.structs.replace(case, attacks=fewer)


class Outside:
    """What the attacks want: a process, a file, and sockets that listen."""

    def __init__(self, stack: ExitStack) -> None:
        stack.enter_context(adopting_orphans())
        self.before = descendants()
        self.folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="heddle-attack-"))
        )
        self.file = self.folder / "file"
        self.file.write_text("keep")
        self.file.chmod(0o640)
        self.tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = self.tcp.getsockname()[1]
        self.unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        self.unix.bind(str(self.folder / "socket"))
        self.unix.listen()
        self.udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.udp.bind(("127.0.0.1", self.port))
        stack.enter_context(patch.dict(os.environ, {"HEDDLE_CAMPAIGN_SECRET": "x"}))
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(1e6)"], start_new_session=True
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.state = self._state()
        self.names = sorted(os.listdir(self.folder))

    def source(self, attack: str) -> str:
        """The program of an attack on this."""
        return program(
            attack,
            PID=self.process.pid,
            FILE=str(self.file),
            FOLDER=str(self.folder),
            PORT=self.port,
            SOCKET=str(self.folder / "socket"),
        )

    def _state(self) -> tuple[object, ...]:
        pid, file = self.process.pid, self.file.stat()
        return (
            os.getpriority(os.PRIO_PROCESS, pid),
            sorted(os.sched_getaffinity(pid)),
            os.sched_getscheduler(pid),
            (file.st_mode, file.st_mtime_ns, file.st_nlink, file.st_uid, file.st_gid),
            self.file.read_text(),
        )

    def harmed(self, case: SandboxCase, done: list[SandboxResult]) -> Failure | None:
        """Return what an attack did outside; what it left running is ended."""
        kind = f"{case.mode} {case.attacks[0] if len(case.attacks) == 1 else ''}".strip()
        for result in done:
            if "ESCAPED" in result.stdout:
                return Failure(f"escape {result.stdout.split()[1]} {case.mode}", result.stdout)
        if self.process.poll() is not None:
            status = self.process.returncode
            return Failure("process outside ended", f"{kind}: status {status}: {case.attacks}")
        try:
            after = self._state()
        except OSError as error:
            return Failure("file outside", f"{kind}: {error}")
        if after != self.state or sorted(os.listdir(self.folder)) != self.names:
            return Failure("state outside", f"{kind}: {self.state} became {after}")
        for listening in (self.tcp, self.unix):
            listening.setblocking(False)
            try:
                listening.accept()
            except BlockingIOError:
                continue
            return Failure("connection", f"{kind}: {listening.getsockname()}")
        left = descendants(besides=[*self.before, self.process.pid])
        left = wait_until_gone(left)
        for process in left:
            os.kill(process, 9)
        if left:
            return Failure("process left", f"{kind}: {len(left)} of {case.attacks}")
        return None


@lru_cache
def permitted(mode: Literal["namespaces", "filter"]) -> bool:
    """Whether this machine permits a way of isolation."""

    async def attempt() -> None:
        async with Sandbox(LIMITS, mode=mode):
            pass

    try:
        asyncio.run(attempt())
    except SandboxUnavailableError:
        return False
    return True


async def _run(case: SandboxCase, outside: Outside) -> list[SandboxResult]:
    async with Sandbox(LIMITS, mode=case.mode) as sandbox:
        calls = (sandbox.run(outside.source(name)) for name in case.attacks)
        done = await asyncio.gather(*calls, return_exceptions=True)
    results = [r for r in done if isinstance(r, SandboxResult)]
    for r in done:
        if isinstance(r, BaseException) and not isinstance(r, SandboxError):
            raise r
    errors = [r for r in done if isinstance(r, SandboxError)]
    if errors and "signals: kill the supervisor" not in case.attacks:
        raise errors[0]
    return results
