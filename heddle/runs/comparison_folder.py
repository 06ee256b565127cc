"""The folder of a comparison: its runs, `index.json` with the results, and `report.html`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from heddle.runs.files import MANIFEST, RunError, check_out, new_folder, read_json, write_json

SCHEMA = "heddle.compare/2"
"""Of the index, and of what `heddle compare --json` prints."""
INDEX = "index.json"
PAGE = "report.html"
MOST_SHOWN = 12
"""Runs that a page has at most; of more, it has those of the first seed."""


@contextmanager
def new_comparison_folder(out: Path, trace: str) -> Iterator[Path]:
    """Make a new folder in `out`, named by the start in UTC and the trace.

    If the comparison ends before its first run, the folders that were made are removed again.

    Raises:
        RunError: `out` has no parent directory, or is a file.
        OSError: the folder cannot be made.
    """
    check_out(out)
    first = not out.exists()
    out.mkdir(exist_ok=True)
    try:
        folder = new_folder(out, _name(trace))
        try:
            yield folder
        except BaseException:
            with suppress(OSError):
                folder.rmdir()
            raise
    except BaseException:
        if first:
            with suppress(OSError):
                out.rmdir()
        raise


def _name(trace: str) -> str:
    stem = Path(trace).name.split(".")[0] or "trace"
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in stem)[:120]
    return f"{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{plain}-compare"


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories in a folder, by name; none if it cannot be listed."""
    try:
        return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    except OSError:
        return []


class MeanSeconds(msgspec.Struct, frozen=True):
    """A mean over seeds, and the interval of one rollout."""

    mean: float
    low: float | None
    high: float | None


class IndexRow(msgspec.Struct, frozen=True):
    """A policy, or one of the settings of a policy that were tried."""

    policy: str
    """The name of the row."""
    makespan_s: MeanSeconds
    preset: str | None = None
    """The policy without its setting; this and what follows only where settings were tried."""
    tp: int = 0
    max_running: int = 0
    best: bool = True
    roles: str | None = None
    speculation: str | None = None


class IndexRun(msgspec.Struct, frozen=True):
    run: str
    policy: str
    seed: int


class IndexTrace(msgspec.Struct, frozen=True):
    name: str


class ComparisonIndex(msgspec.Struct, frozen=True):
    schema: str
    trace: IndexTrace
    ranking: tuple[str, ...]
    policies: tuple[IndexRow, ...]
    runs: tuple[IndexRun, ...]
    verdict: str | None = None
    """What to run; None where every policy sees the future."""


def write_index(folder: Path, result: dict[str, Any]) -> None:
    """Write the index of a comparison whose runs are in a folder.

    Raises:
        OSError: it cannot be written.
    """
    write_json(folder / INDEX, result)


def read_index(folder: Path) -> ComparisonIndex:
    """Read the index of a comparison.

    Raises:
        RunError: it is missing or damaged.
    """
    path = folder / INDEX
    try:
        index = msgspec.convert(read_json(path), ComparisonIndex)
    except msgspec.ValidationError as error:
        raise RunError(f"{path}: damaged: {error}") from None
    if index.schema != SCHEMA:
        raise RunError(f"{path}: damaged: its schema is not {SCHEMA}")
    return index


def said_of(runs: Sequence[Path]) -> dict[str, Any] | None:
    """What the comparison of these runs says, over all of its seeds, as JSON for a page.

    None for runs of several folders, or of one without an index or a verdict.
    """
    folders = {run.resolve().parent for run in runs}
    try:
        (folder,) = folders
        index = read_index(folder)
    except (ValueError, RunError):
        return None
    if index.verdict is None:
        return None
    rows = {row.policy: row for row in index.policies}
    names = {run.resolve().name for run in runs}
    return {
        "verdict": index.verdict,
        "seeds": len({run.seed for run in index.runs}),
        "shown": len({run.seed for run in index.runs if Path(run.run).name in names}),
        "rows": [
            {
                "policy": name,
                "mean": rows[name].makespan_s.mean,
                "low": rows[name].makespan_s.low,
                "high": rows[name].makespan_s.high,
            }
            for name in index.ranking
        ],
    }


def shown_runs(folder: Path) -> list[Path]:
    """Return the runs of a comparison's table, in its order: each policy at its best setting.

    Without an index they are all runs in the folder, by name.
    """
    try:
        index = read_index(folder)
    except RunError:
        return runs_in(folder)
    rows = [row.policy for row in index.policies if row.best]
    runs = [run for run in index.runs if run.policy in rows]
    if len(runs) > MOST_SHOWN:
        first = min(run.seed for run in runs)
        runs = [run for run in runs if run.seed == first]
    return [folder / Path(run.run).name for run in runs] or runs_in(folder)


def in_order_of_table(runs: Sequence[Path]) -> list[Path]:
    """Runs of one comparison in the order of its table, if they came as a folder lists them.

    Runs in any other order are left in it.
    """
    paths = [run.resolve() for run in runs]
    names = [path.name for path in paths]
    folder = paths[0].parent
    if names != sorted(names) or any(path.parent != folder for path in paths):
        return list(runs)
    try:
        places = {Path(run.run).name: at for at, run in enumerate(read_index(folder).runs)}
    except RunError:
        return list(runs)
    if not all(name in places for name in names):
        return list(runs)
    return [run for _, run in sorted(zip(map(places.get, names), runs, strict=True))]
