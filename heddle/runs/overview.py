"""What a folder of runs has: comparisons and single runs, each in a few facts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heddle.runs.comparison_folder import INDEX, PAGE, ComparisonIndex, read_index, runs_in
from heddle.runs.directory import Run, load_run
from heddle.runs.files import MANIFEST, SUMMARY, RunError, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A comparison or a single run."""

    path: Path
    kind: str
    """``comparison`` or ``run``."""
    status: str
    """``finished``, ``running``, ``interrupted``, ``failed``; ``unfinished`` of a comparison;
    ``damaged`` where its files cannot be read."""
    trace: str = ""
    policies: tuple[str, ...] = ()
    """Of a finished comparison, the best first."""
    runs: int = 1
    makespan_s: float | None = None
    """Of the best policy; None until it has finished."""
    page: Path | None = None
    """Its page, if there is one."""

    def plain(self) -> dict[str, Any]:
        page = None if self.page is None else str(self.page)
        return asdict(self) | {"path": str(self.path), "page": page}


def listed_runs(folder: Path) -> list[ListedRun]:
    """Return the comparisons and runs in a folder, the oldest first by name.

    Raises:
        RunError: it is no folder.
        OSError: it cannot be read.
    """
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; run something first, or name another with --in")
    found = []
    for path in sorted(folder.iterdir()):
        if not path.is_dir() or path.name.startswith("."):
            continue
        if (path / MANIFEST).is_file():
            found.append(_one(path))
        elif (path / INDEX).is_file() or runs_in(path):
            found.append(_comparison(path))
    return found


def _one(path: Path) -> ListedRun:
    try:
        run = load_run(path, unfinished=True)
        makespan_s = _makespan_s(run)
    except RunError:
        return ListedRun(path=path, kind="run", status="damaged")
    return ListedRun(
        path=path,
        kind="run",
        status=run.status,
        trace=run.manifest["trace"]["name"],
        policies=(run.manifest["policy"],),
        makespan_s=makespan_s,
        page=_page(path),
    )


def _page(path: Path) -> Path | None:
    page = path / PAGE
    return page if page.is_file() else None


def _makespan_s(run: Run) -> float | None:
    if run.status != "finished":
        return None
    found = read_json(run.path / SUMMARY).get("makespan_s")
    return float(found) if isinstance(found, int | float) else None


def _comparison(path: Path) -> ListedRun:
    runs = runs_in(path)
    if not (path / INDEX).is_file():
        return _unfinished(path, runs)
    try:
        index = read_index(path)
        makespan_s = _of_best(index)
    except RunError:
        return ListedRun(path=path, kind="comparison", status="damaged", runs=len(runs))
    return ListedRun(
        path=path,
        kind="comparison",
        status="finished",
        trace=index.trace.name,
        policies=index.ranking,
        runs=len(runs),
        makespan_s=makespan_s,
        page=_page(path),
    )


def _of_best(index: ComparisonIndex) -> float:
    for row in index.policies:
        if row.policy in index.ranking[:1]:
            return row.makespan_s.mean
    raise RunError("the best of the ranking has no row")


def _unfinished(path: Path, runs: Sequence[Path]) -> ListedRun:
    """A comparison that ended before its last run, or still runs."""
    each = [_one(run) for run in runs]
    names = dict.fromkeys(name for run in each for name in run.policies)
    return ListedRun(
        path=path,
        kind="comparison",
        status="unfinished",
        trace=next((run.trace for run in each if run.trace), ""),
        policies=tuple(names),
        runs=len(runs),
    )
