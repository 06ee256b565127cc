"""Runs Python that a model wrote: in a process of its own, behind limits, without a network.

The fence itself is in `heddle_runtime.sandbox`; docs/live-agents.md says what it keeps out and what
not. It stops accidents and runaway programs. It is no defence against somebody who looks for a hole
in the kernel.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

Way: TypeAlias = Literal["namespaces", "filter"]
"""How a program is kept in: by namespaces of its own and a filter of system calls, or, where those
are not permitted, by the filter and Landlock."""
Status: TypeAlias = Literal["ok", "error", "signal", "cpu", "time", "output"]
"""How a program ended: by itself with exit code 0 or another, by a signal, or cut by the limit on
its CPU seconds, its wall-clock seconds or its output."""

_BOOT: Final = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from heddle_runtime.sandbox.supervisor import main; main()"
)
_PROBE: Final = """
import socket
try:
    socket.socket()
except PermissionError:
    print("fenced", end="")
"""
_GRACE_S = 60.0
"""For the warden to begin and to clean up, on a machine that has much else to do."""
_KILL_AFTER_S = 20.0
"""For the warden to end after it was told to."""
_MIB = 1 << 20
_FILTER_NOTE: Final = (
    "tool calls run without namespaces of their own ({reason}): they have no network and read no "
    "files but the interpreter's, as ever, but they can start no processes, they can see which "
    "files exist, and the number of files they make is not limited"
)

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "wall_s": (0.1, 86_400.0),
    "cpu_s": (1, 86_400),
    "memory_bytes": (64 * _MIB, 1 << 50),
    "file_bytes": (1, 1 << 50),
    "disk_bytes": (1 << 16, 1 << 50),
    "files": (1, 1_000_000),
    "open_files": (16, 100_000),
    "processes": (1, 10_000),
    "output_bytes": (1, 64 * _MIB),
}


class SandboxError(RuntimeError):
    """A program could not be run, through no fault of its own."""


class SandboxLimitError(ValueError):
    """A limit that cannot be used; the message names it."""


class SandboxUnavailableError(SandboxError):
    """This machine has nothing that would keep a program in; the message says what was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may use.

    Raises:
        SandboxLimitError: a limit out of its range.
    """

    wall_s: float = 30.0
    """Seconds from its start, after which it is cut."""
    cpu_s: int = 10
    """CPU seconds of each of its processes."""
    memory_bytes: int = 512 * _MIB
    """Address space of each of its processes."""
    file_bytes: int = 16 * _MIB
    """Size of a file."""
    disk_bytes: int = 64 * _MIB
    """All of its files together, which are in memory. Not counted without namespaces."""
    files: int = 256
    """Files and folders. Not counted without namespaces."""
    open_files: int = 64
    """Open at once, in each of its processes."""
    processes: int = 16
    """Processes and threads. Without namespaces: one process, and threads as memory allows."""
    output_bytes: int = 65_536
    """Of standard output, and of standard error; a program that writes more is cut."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            kinds = (int, float) if name == "wall_s" else (int,)
            fits = isinstance(value, kinds) and not isinstance(value, bool)
            if not fits or not least <= value <= most:
                kind = "seconds" if name == "wall_s" else "a whole number"
                raise SandboxLimitError(
                    f"sandbox limit {name}: found {value!r}; give {kind} from {least:,} to {most:,}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What a program came to."""

    status: Status
    exit_code: int | None
    """None unless it ended by itself."""
    signal: str
    """Name of the signal that ended it; "" for all but status `signal`."""
    stdout: str
    stderr: str
    """What it wrote up to the limit; bytes that are not UTF-8 are replaced."""
    wall_s: float
    """Seconds from its start until none of its processes was left."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.status == "ok"


class Sandbox:
    """Runs programs, many at once. An async context manager: entered, it has found its way.

    Whatever happens to a call, to this object or to Heddle itself, no process of a program is left:
    each has a warden that ends it, see `heddle_runtime.sandbox.supervisor`.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        way: Way | None = None,
        max_running: int = 64,
    ) -> None:
        """`way` None: the best that this machine permits. Programs beyond `max_running` wait.

        Raises:
            SandboxLimitError: `max_running` below 1.
        """
        if max_running < 1:
            raise SandboxLimitError(f"max_running: found {max_running}; give at least 1")
        self.limits = limits or SandboxLimits()
        self.note = ""
        """What the user should know about the way that was found; "" for the best one."""
        self._wanted, self._way = way, way
        self._room = asyncio.Semaphore(max_running)
        self._ending: dict[asyncio.Task[None], None] = {}
        self._folder = ""

    @property
    def way(self) -> Way:
        """How programs are kept in; known once it was entered."""
        assert self._way is not None, "enter the sandbox first: async with Sandbox() as sandbox"
        return self._way

    async def __aenter__(self) -> Self:
        """Find out what this machine permits, by a first program.

        Raises:
            SandboxUnavailableError: nothing that would do.
        """
        assert not self._folder, "entered twice"
        self._folder = tempfile.mkdtemp(prefix="heddle-sandbox-")
        try:
            await self._find_way()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is left; it can be entered again."""
        await self._close()

    async def run(self, source: str) -> SandboxResult:
        """Run a program to its end or its first limit.

        It finds an empty working folder, which is gone afterwards, no input, an environment without
        anything of Heddle's, and Python's standard library only. A cancelled call has no process
        left when it returns.

        Raises:
            SandboxError: it could not be run; this says nothing about the program.
        """
        async with self._room:
            if not self._folder:
                raise SandboxError("the sandbox is closed")
            report = await self._ask_warden(source)
        if "refused" in report:
            raise SandboxUnavailableError(f"a program could not be fenced in: {report['refused']}")
        return SandboxResult(
            status=report["status"],
            exit_code=report.get("exit_code"),
            signal=report.get("signal", ""),
            stdout=report["stdout"],
            stderr=report["stderr"],
            wall_s=report["wall_s"],
        )

    async def _find_way(self) -> None:
        reasons: list[str] = []
        ways: tuple[Way, ...] = (self._wanted,) if self._wanted else ("namespaces", "filter")
        for way in ways:
            self._way = way
            try:
                result = await self.run(_PROBE)
            except SandboxUnavailableError as error:
                reasons.append(f"{way}: {error}")
                continue
            if result.stdout == "fenced":
                if way == "filter":
                    reason = reasons[0] if reasons else "as was asked for"
                    self.note = _FILTER_NOTE.format(reason=reason)
                return
            said = (result.stderr.strip() or result.stdout.strip()).rpartition("\n")[2]
            reasons.append(f"{way}: a first program ended with {result.status} ({said})")
        raise SandboxUnavailableError(
            "this machine cannot fence in programs that a model wrote, so they are not run. Tried "
            + "; ".join(reasons)
            + ". Needed is Linux 5.14 or newer with user namespaces, or 5.13 or newer with Landlock"
        )

    async def _ask_warden(self, source: str) -> dict[str, Any]:
        """Have one program run; on any way out, wait until its warden is gone."""
        request = asdict(self.limits) | {
            "source": source,
            "way": self.way,
            "folder": self._folder,
        }
        try:
            warden = await asyncio.create_subprocess_exec(
                *(_interpreter(), "-s", "-S", "-P", "-X", "utf8", "-c", _BOOT),
                str(Path(__file__).resolve().parents[2]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"no process could be started for a program: {error}") from None
        assert warden.stdin is not None
        assert warden.stdout is not None
        try:
            async with asyncio.timeout(self.limits.wall_s + _GRACE_S):
                with suppress(ConnectionError):  # it died; its last words are read below
                    warden.stdin.write(json.dumps(request).encode() + b"\n")
                    await warden.stdin.drain()
                said = await warden.stdout.read()
        except TimeoutError:
            raise SandboxError(
                f"a program was not ended {_GRACE_S:.0f} s after its limit"
            ) from None
        finally:
            await self._see_off(warden)
        try:
            report: dict[str, Any] = json.loads(said)
        except ValueError:
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise SandboxError(
                f"the warden of a program failed with status {warden.returncode}: {last}"
            ) from None
        return report

    async def _see_off(self, warden: asyncio.subprocess.Process) -> None:
        """Tell a warden to end, and wait for it, even when the call is cancelled once more."""
        task = asyncio.get_running_loop().create_task(_see_off(warden))
        self._ending[task] = None
        task.add_done_callback(self._ending.pop)
        await asyncio.shield(task)

    async def _close(self) -> None:
        folder, self._folder = self._folder, ""
        if self._ending:
            await asyncio.wait(list(self._ending))
        shutil.rmtree(folder, ignore_errors=True)


async def _see_off(warden: asyncio.subprocess.Process) -> None:
    assert warden.stdin is not None
    warden.stdin.close()
    try:
        async with asyncio.timeout(_KILL_AFTER_S):
            await warden.wait()
    except TimeoutError:
        # The kernel ends what it watches over: each of its processes is tied to it.
        with suppress(ProcessLookupError):
            warden.kill()
        await warden.wait()


def _interpreter() -> str:
    """The interpreter that the virtual environment, if there is one, was made from."""
    base: str | None = getattr(sys, "_base_executable", None)
    return base or sys.executable
