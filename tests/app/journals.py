"""Small journals written by hand, and types the tests share."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa
from click.testing import Result

from heddle.runs.journal_buffer import JournalBuffer
from heddle.runs.journal_columns import Journal, all_columns
from heddle.runs.metrics import Measured, SoloTpot, measure
from heddle_core.commands import Command, Dispatch
from heddle_core.events import EngineReady, Event, StepFinished, TrajectoryArrived
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.journal import Entry

Heddle: TypeAlias = Callable[..., Result]
ONE_RUN = ("compare", "--policies", "verl", "--set", "report.page=false")
"""Words of a command that simulates one run; a further --policies names another policy."""

BRIEF = ("--set", "plan.budget_s=0.001")
"""With which `heddle plan` ends its search after the first round."""


def last_run(folder: str | Path = "runs") -> Path:
    """The run that began last in a folder of comparisons and runs."""
    found = [path.parent for path in Path(folder).rglob("manifest.json")]
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def run_of(done: Result) -> Any:
    """What --json says of the only run."""
    assert done.exit_code == 0, done.output
    (run,) = json.loads(done.stdout)["runs"]
    return run


def batches(*parts: Sequence[Entry]) -> list[pa.RecordBatch]:
    """The parts of one journal as its writer makes them: a batch each."""
    journal, made = JournalBuffer(), []
    for part in parts:
        for each in part:
            journal.record(each.event, each.commands)
        made.append(journal.take())
    return made


def table(entries: Sequence[Entry]) -> pa.Table:
    return pa.Table.from_batches(batches(entries))


def of_table(table: pa.Table) -> Journal:
    """All columns of a journal."""
    return all_columns(table.unify_dictionaries().to_batches())


def measured(entries: Sequence[Entry], solo_tpot: SoloTpot | None = None) -> Measured:
    return measure(of_table(table(entries)), solo_tpot)


def steps_of(entries: Sequence[Entry]) -> pa.Table:
    parts: list[pa.Table] = []
    measure(of_table(table(entries)), on_steps=parts.append)
    return pa.concat_tables(parts)


def entry(event: Event, *commands: Command) -> Entry:
    return Entry(event, commands)


def numbered(*entries: Entry) -> list[Entry]:
    """The entries with the causes that a controller gives: the number of each command's event."""
    return [
        Entry(e.event, tuple(msgspec.structs.replace(c, cause=number) for c in e.commands))
        for number, e in enumerate(entries)
    ]


def ready(engine: str, *, at: float = 0.0, tp: int = 1) -> EngineReady:
    return EngineReady(
        time_s=at,
        engine=EngineId(engine),
        shape=EngineShape("h100", tp),
        kv_capacity_tokens=10_000,
        max_running=4,
    )


def arrived(trajectory: str, *, at: float = 0.0, prompt: int = 100) -> TrajectoryArrived:
    return TrajectoryArrived(
        time_s=at,
        rollout=RolloutId("r"),
        trajectory=TrajectoryId(trajectory),
        group=GroupId("g"),
        task="coding",
        prompt_tokens=prompt,
    )


def dispatch(trajectory: str, step: int, engine: str, priority: float = 0.0) -> Dispatch:
    return Dispatch(
        trajectory=TrajectoryId(trajectory), step=step, engine=EngineId(engine), priority=priority
    )


def done(
    trajectory: str, step: int, engine: str, *, at: float, tokens: int, **more: Any
) -> StepFinished:
    return StepFinished(
        time_s=at,
        trajectory=TrajectoryId(trajectory),
        step=step,
        engine=EngineId(engine),
        output_tokens=tokens,
        **{"reason": "tool_call", **more},
    )


def unlisted(run: Path) -> Path:
    """Make a run one of a version that listed no files: what is in them is checked all the same."""
    path = run / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    return run
