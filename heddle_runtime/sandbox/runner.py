"""Runs Python programs that a model wrote, each in a process of its own, limited, without network.

docs/live-agents.md lists what the sandbox prevents and what it does not. It stops accidents and
runaway programs. It is no defence against attacks on the kernel.
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

IsolationMode: TypeAlias = Literal["namespaces", "filter"]
"""How a program is isolated: by its own namespaces and a filter of system calls or, where those are
not permitted, by the filter and Landlock."""
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
    print("isolated", end="")
"""
_GRACE_S = 60.0
"""For the supervisor to start and to clean up, on a busy machine."""
_KILL_AFTER_S = 20.0
"""For the supervisor to end after its input was closed."""
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
    """A program could not be run; the program is not the reason."""


class SandboxLimitError(ValueError):
    """A limit that cannot be used; the message names it."""


class SandboxUnavailableError(SandboxError):
    """This machine permits no isolation mode; the message says what was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one program.

    Raises:
        SandboxLimitError: a limit out of its range.
    """

    wall_s: float = 30.0
    """Seconds from its start until it is ended."""
    cpu_s: int = 10
    """CPU seconds of each of its processes."""
    memory_bytes: int = 512 * _MIB
    """Address space of each of its processes."""
    file_bytes: int = 16 * _MIB
    """Size of a file."""
    disk_bytes: int = 64 * _MIB
    """All of its files together, in memory. Not counted without namespaces."""
    files: int = 256
    """Files and folders. Not counted without namespaces."""
    open_files: int = 64
    """Open files of each of its processes."""
    processes: int = 16
    """Processes and threads. Without namespaces: one process, and threads as memory allows."""
    output_bytes: int = 65_536
    """Of standard output, and of standard error; a program that writes more is ended."""

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
    """How a program ended."""

    status: Status
    exit_code: int | None
    """None unless it ended by itself."""
    signal: str
    """Name of the signal that ended it; "" for all but status `signal`."""
    stdout: str
    stderr: str
    """Its output up to the limit; bytes that are not UTF-8 are replaced."""
    wall_s: float
    """Seconds from its start until none of its processes was left."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.status == "ok"


class Sandbox:
    """Runs programs, many at once. An async context manager; entering it finds the isolation mode.

    No process of a program is left, however a call, this object or Heddle itself ends: a supervisor
    ends each, see `heddle_runtime.sandbox.supervisor`.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        mode: IsolationMode | None = None,
        max_running: int = 64,
    ) -> None:
        """`mode` None: the best that this machine permits. Programs beyond `max_running` wait.

        Raises:
            SandboxLimitError: `max_running` below 1.
        """
        if max_running < 1:
            raise SandboxLimitError(f"max_running: found {max_running}; give at least 1")
        self.limits = limits or SandboxLimits()
        self.note = ""
        """What the user should know about the mode; "" for the best one."""
        self._wanted, self._mode = mode, mode
        self._slots = asyncio.Semaphore(max_running)
        self._calls: dict[asyncio.Task[Any], None] = {}
        """Those with a program."""
        self._ending: dict[asyncio.Task[None], None] = {}
        self._folder = ""

    @property
    def mode(self) -> IsolationMode:
        """How programs are isolated; known once entered."""
        assert self._mode is not None, "enter the sandbox first: async with Sandbox() as sandbox"
        return self._mode

    async def __aenter__(self) -> Self:
        """Find the mode that this machine permits, with a first program.

        Raises:
            SandboxUnavailableError: it permits none.
        """
        assert not self._folder, "entered twice"
        self._folder = tempfile.mkdtemp(prefix="heddle-sandbox-")
        try:
            await self._find_mode()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all programs by cancelling their calls; it can be entered again."""
        await self._close()

    async def run(self, source: str) -> SandboxResult:
        """Run a program to its end or its first limit.

        It has an empty working folder, removed afterwards, no input, none of Heddle's environment
        variables, and Python's standard library only. A cancelled call leaves no process.

        Raises:
            SandboxError: it could not be run; the program is not the reason.
        """
        async with self._slots:
            if not self._folder:
                raise SandboxError("the sandbox is closed")
            call = asyncio.current_task()
            assert call is not None
            self._calls[call] = None
            try:
                report = await self._run_supervised(source)
            finally:
                del self._calls[call]
        if "refused" in report:
            raise SandboxUnavailableError(f"a program could not be isolated: {report['refused']}")
        return SandboxResult(
            status=report["status"],
            exit_code=report.get("exit_code"),
            signal=report.get("signal", ""),
            stdout=report["stdout"],
            stderr=report["stderr"],
            wall_s=report["wall_s"],
        )

    async def _find_mode(self) -> None:
        reasons: list[str] = []
        modes: tuple[IsolationMode, ...] = (
            (self._wanted,) if self._wanted else ("namespaces", "filter")
        )
        for mode in modes:
            self._mode = mode
            try:
                result = await self.run(_PROBE)
            except SandboxUnavailableError as error:
                reasons.append(f"{mode}: {error}")
                continue
            if result.stdout == "isolated":
                if mode == "filter":
                    reason = reasons[0] if reasons else "as chosen"
                    self.note = _FILTER_NOTE.format(reason=reason)
                return
            said = (result.stderr.strip() or result.stdout.strip()).rpartition("\n")[2]
            reasons.append(f"{mode}: a first program ended with {result.status} ({said})")
        raise SandboxUnavailableError(
            "this machine cannot isolate programs that a model wrote, so they do not run. Tried "
            + "; ".join(reasons)
            + ". Needed is Linux 5.14 or newer with user namespaces, or 5.13 or newer with Landlock"
        )

    async def _run_supervised(self, source: str) -> dict[str, Any]:
        """Run one program under a supervisor; however it ends, wait for the supervisor's end."""
        request = asdict(self.limits) | {
            "source": source,
            "mode": self.mode,
            "folder": self._folder,
        }
        try:
            supervisor = await asyncio.create_subprocess_exec(
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
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        try:
            async with asyncio.timeout(self.limits.wall_s + _GRACE_S):
                with suppress(ConnectionError):  # it died; its output is read below
                    supervisor.stdin.write(json.dumps(request).encode() + b"\n")
                    await supervisor.stdin.drain()
                said = await supervisor.stdout.read()
        except TimeoutError:
            raise SandboxError(
                f"a program was not ended {_GRACE_S:.0f} s after its limit"
            ) from None
        finally:
            await self._end_supervisor(supervisor)
        try:
            report: dict[str, Any] = json.loads(said)
        except ValueError:
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise SandboxError(
                f"the supervisor of a program failed with status {supervisor.returncode}: {last}"
            ) from None
        return report

    async def _end_supervisor(self, supervisor: asyncio.subprocess.Process) -> None:
        """End a supervisor and wait for it, even when the call is cancelled again."""
        task = asyncio.get_running_loop().create_task(_end_supervisor(supervisor))
        self._ending[task] = None
        task.add_done_callback(self._ending.pop)
        await asyncio.shield(task)

    async def _close(self) -> None:
        folder, self._folder = self._folder, ""
        for call in self._calls:
            if not call.cancelling():  # a second time would cut its clean-up short
                call.cancel()
        while waited := [*self._calls, *self._ending]:
            await asyncio.wait(waited)
        shutil.rmtree(folder, ignore_errors=True)


async def _end_supervisor(supervisor: asyncio.subprocess.Process) -> None:
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    try:
        async with asyncio.timeout(_KILL_AFTER_S):
            await supervisor.wait()
    except TimeoutError:
        # The kernel ends its processes too: each has PR_SET_PDEATHSIG.
        with suppress(ProcessLookupError):
            supervisor.kill()
        await supervisor.wait()


def _interpreter() -> str:
    """The base interpreter of the virtual environment, if there is one."""
    base: str | None = getattr(sys, "_base_executable", None)
    return base or sys.executable
