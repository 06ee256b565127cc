"""The campaign `kill`: one command, disturbed and then repeated in the same folder, a case."""

import gzip
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Final, Literal, TypeAlias

import msgspec

from campaigns.campaign import Failure, Outcome
from campaigns.fuzz.folder import fill
from campaigns.fuzz.inputs import CLUSTER
from campaigns.kill.process import (
    DEFECT,
    CommandEnd,
    disk_full,
    nothing,
    signalled,
    started,
    without_privileges,
)
from campaigns.processes import adopting_orphans, descendants, wait_until_gone
from heddle.runs import load_run
from heddle.runs.files import RunError

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "one run": ("compare", "in.jsonl", "--policies", "verl", *CLUSTER),
    "one run of heddle": (
        "compare",
        "in.jsonl",
        "--policies",
        "heddle",
        "--set",
        "cluster.failures=e0@1",
        *CLUSTER,
    ),
    "compare": ("compare", "in.jsonl", "--policies", "verl,slime", "--jobs", "1", *CLUSTER),
    "synth": ("trace", "synth", "coding", "--trajectories", "16", "-o", "out.jsonl.gz"),
    "resample": (
        *("trace", "resample", "in.jsonl", "2", "2"),
        *("-o", "out.jsonl"),
    ),
    "import": ("trace", "import", "logs/openai_chat.jsonl", "-o", "out.jsonl"),
    "extract": ("trace", "extract", "run", "-o", "out.jsonl"),
    "profile": ("profile", "from-config", "model.json", "--gpu", "h100", "-o", "out.json"),
    "report": ("report", "run", "-o", "out.html"),
    "replay": ("replay", "run"),
}
LIBRARIES: Final = (
    "rich_click",
    "numpy",
    "pandas",
    "pyarrow.parquet",
    "scipy.optimize",
    "scipy.stats",
    "simpy",
)
OUTPUTS: Final = ("out.jsonl.gz", "out.jsonl", "out.json", "out.html")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

Kind: TypeAlias = Literal["signal", "disk full", "read-only", "twice"]
KINDS: Final[tuple[Kind, ...]] = ("signal", "disk full", "read-only", "twice")


class KillCase(msgspec.Struct, frozen=True, kw_only=True):
    """A command and what happens to it."""

    command: str
    kind: Kind
    signal: int = 0
    share: float = 0.0
    """Of the command's Python calls, after which the signal comes."""
    file_bytes: int = 0
    """With a full disk: largest size of a file."""


class Kills:
    """Signals, a full disk, no permission, and two of the same at once."""

    name = "kill"
    unit = "kills"
    tolerated = 0.0
    saves = True
    most_wall_s = 1800.0
    case_type = KillCase

    def begin(self, folder: str) -> None:
        """Import what others wrote; modules of Heddle are imported by every command itself."""
        tempfile.tempdir = folder
        for name in LIBRARIES:
            import_module(name)

    def case(self, rng: Random) -> KillCase:
        (kind,) = rng.choices(KINDS, weights=(12, 4, 1, 1))
        return KillCase(
            command=rng.choice(list(COMMANDS)),
            kind=kind,
            signal=int(rng.choice(SIGNALS)) if kind == "signal" else 0,
            share=round(rng.random(), 6) if kind == "signal" else 0.0,
            file_bytes=rng.choice((0, 1, 100, 1000, 4096, 20_000)) if kind == "disk full" else 0,
        )

    def run(self, case: KillCase) -> Outcome:
        """Run the command disturbed, look at what it left, and run it again."""
        with adopting_orphans():
            return self._run(case)

    def _run(self, case: KillCase) -> Outcome:
        before = descendants()
        with tempfile.TemporaryDirectory(prefix="heddle-kill-") as name:
            folder = Path(name)
            fill(folder)
            inputs = _files(folder)
            try:
                ended = _disturbed(case, folder)
                failure = _judged(case, folder, ended, inputs) or _again(case, folder)
            except TimeoutError as error:
                failure = Failure(f"hang {case.command}", str(error))
            folder.chmod(0o755)
        left = wait_until_gone(descendants(besides=before))
        for process in left:
            os.kill(process, signal.SIGKILL)
        if left and failure is None:
            failure = Failure(f"processes left {case.command}", str(case))
        return Outcome(failure, {case.kind: 1})

    def smaller(self, case: KillCase) -> Iterator[KillCase]:
        """No case is simpler than another."""
        yield from ()


def _disturbed(case: KillCase, folder: Path) -> list[CommandEnd]:
    arguments = COMMANDS[case.command]
    match case.kind:
        case "signal":
            call = max(1, int(case.share * calls_of(case.command)))
            return [started(arguments, folder, signalled(case.signal, call)).wait()]
        case "disk full":
            return [started(arguments, folder, disk_full(case.file_bytes)).wait()]
        case "read-only":
            folder.chmod(0o555)
            done = [started(arguments, folder, without_privileges).wait()]
            folder.chmod(0o755)
            return done
        case "twice":
            both = [started(arguments, folder, nothing) for _ in range(2)]
            return [command.wait() for command in both]


@lru_cache
def calls_of(command: str) -> int:
    """Python calls of a command that nothing disturbs."""
    return _whole(command)[0]


@lru_cache
def _whole(command: str) -> tuple[int, dict[str, bytes]]:
    """Calls and outputs of a command that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="heddle-kill-") as name:
        folder = Path(name)
        fill(folder)
        ended = started(COMMANDS[command], folder, nothing, counts_calls=True).wait()
        assert ended.status == 0, f"{command}: {ended.output}"
        return ended.calls, {o: _content(folder / o) for o in OUTPUTS if (folder / o).exists()}


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _judged(
    case: KillCase, folder: Path, ended: list[CommandEnd], inputs: set[str]
) -> Failure | None:
    """Return what a disturbed command did that it must not do."""
    for one in ended:
        expected = {0, 1, 2}
        if case.kind == "signal":
            expected = {0, 128 + case.signal, -case.signal}
        if case.kind == "twice":
            expected = {0, 2}
        if "Traceback (most recent" in one.output or one.status == DEFECT:
            return Failure(f"traceback {case.kind} {case.command}", one.output)
        if one.status not in expected:
            text = f"status {one.status}, not of {sorted(expected)}\n{one.output}"
            return Failure(f"status {case.kind} {case.command}", text)
    return _outputs(case, folder) or _runs(case, folder) or _strange(case, folder, inputs)


def _outputs(case: KillCase, folder: Path) -> Failure | None:
    """Every output is whole, or is not there."""
    for name, whole in _whole(case.command)[1].items():
        path = folder / name
        if not path.exists():
            continue
        data = _content(path) if path.stat().st_size else b""
        complete = data == whole
        if name.endswith("html"):
            complete = data.rstrip().endswith(b"</html>")
        if not complete:
            return Failure(f"half-written {case.kind} {case.command}", f"{name}: {len(data)}")
    return None


def _runs(case: KillCase, folder: Path) -> Failure | None:
    """Every run says how it ended, and one that is finished replays."""
    killed = case.signal == signal.SIGKILL
    for run in sorted(_run_folders(folder / "runs")):
        try:
            status = load_run(run, unfinished=True).status
        except RunError as error:
            if killed:
                continue
            return Failure(f"no run {case.kind} {case.command}", f"{run.name}: {error}")
        if status == "finished":
            checked = started(("replay", str(run)), folder, nothing).wait()
            if checked.status:
                return Failure(f"finished run {case.kind} {case.command}", checked.output)
        elif status == "running" and not killed:
            return Failure(f"run left running {case.kind} {case.command}", run.name)
    return None


def _run_folders(out: Path) -> Iterator[Path]:
    """Folders of runs; those of a comparison are in its folder, which is none if it is empty."""
    for path in out.glob("*"):
        inside = [p for p in path.glob("*") if p.is_dir()] if path.match("*-compare*") else []
        yield from inside or [path]


def _strange(case: KillCase, folder: Path, inputs: set[str]) -> Failure | None:
    """Nothing else is left, but by SIGKILL."""
    new = {n for n in _files(folder) - inputs if not n.startswith(("runs", "run/figures"))}
    strange = new - set(OUTPUTS)
    if strange and case.signal != signal.SIGKILL:
        return Failure(f"file left {case.kind} {case.command}", ", ".join(sorted(strange)))
    return None


def _again(case: KillCase, folder: Path) -> Failure | None:
    """Run the command in the same folder, undisturbed: it succeeds."""
    for name in OUTPUTS:
        (folder / name).unlink(missing_ok=True)
    ended = started(COMMANDS[case.command], folder, nothing).wait()
    if ended.status != 0:
        return Failure(
            f"again {case.kind} {case.command}", f"status {ended.status}\n{ended.output}"
        )
    return None
