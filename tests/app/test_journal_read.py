"""A run is measured from some columns of its journal, by blocks: the same as from all of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.runs import load_run, metrics
from heddle.runs.journal_columns import Column, Journal, JournalReader
from heddle.runs.metrics import MetricsError, measure
from heddle.runs.tables import MEASURED
from heddle.setup import prepare
from heddle.simulation import simulate
from heddle_core.events import EngineFailed, TrajectoryArrived
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.journal import Entry
from heddle_trace import synth, write_trace
from tests.app.journals import arrived, batches, dispatch, done, entry, of_table, ready, table
from tests.app.test_metrics import finished, story
from tests.patience import PATIENCE_S

WORDS = ("trajectory", "engine", "reason", "tool", "group", "task", "outcome")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "coding.jsonl.gz"
    write_trace(path, synth("coding", 64, 5, 16))
    return path


def config(trace: Path, policy: str) -> RunConfig:
    """Engines that are short of slots and KV, and two of them die."""
    cluster = ClusterConfig(
        gpus=4, max_running=6, failures="e0@40,e1@90", engine_start_s=20.0, prediction_s=0.5
    )
    return RunConfig(trace=str(trace), cluster=cluster, policy=PolicyConfig(preset=policy))


def plain(table: pa.Table) -> pa.Table:
    """A table with words in the place of their codes, which have no meaning."""
    types = [
        pa.string() if name in WORDS else table.schema.field(name).type
        for name in table.schema.names
    ]
    return table.cast(pa.schema(list(zip(table.schema.names, types, strict=True))))


def all_of(journal: Journal, tpot: Any = None) -> tuple[Any, pa.Table, pa.Table]:
    steps: list[pa.Table] = []
    measured = measure(journal, tpot, on_steps=lambda part: steps.append(plain(part)))
    return measured.summary, pa.concat_tables(steps), plain(measured.trajectories)


def read(entries: Sequence[Entry], *, chunk: int = 5) -> Journal:
    parts = [entries[start : start + chunk] for start in range(0, len(entries), chunk)]
    reader = JournalReader(MEASURED)
    for batch in batches(*parts):
        reader.add(batch)
    return reader.journal()


def test_runs_are_measured_as_their_whole_journals(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: set[str] = set()
    for policy in ("heddle-paper", "heddle", "verl+progressive+follow_rank+served"):
        setup = prepare(config(trace, policy))
        run = load_run(simulate(setup, out=tmp_path).path)
        tpot = setup.profiles.solo_tpot()
        summary, steps, trajectories = all_of(run.columns(), tpot)
        notes = run.summary.keys() - summary.keys()
        assert notes == {*setup.workload.notes, "gpu_hours", "dollars"}
        assert {name: run.summary[name] for name in summary} == summary
        assert plain(run.steps).equals(steps)
        assert plain(run.trajectories).equals(trajectories)
        assert summary["engine_failures"] == 2
        # Cut by trajectory, as large runs are.
        with monkeypatch.context() as changed:
            changed.setattr(metrics, "BLOCK_DISPATCHES", 50)
            assert all_of(run.columns(), tpot) == (summary, steps, trajectories)
            assert all_of(read(list(run.entries()), chunk=97), tpot)[0] == summary
        seen |= {name for name, value in summary.items() if value}
    assert seen >= {"preemptions_policy", "migrations_ok", "predictions", "dispatches_lost"}


def test_a_step_of_the_smallest_block_may_be_larger_than_the_block(
    monkeypatch: pytest.MonkeyPatch,
):
    whole = all_of(read(story()))
    for dispatches in (1, 2, 3):
        monkeypatch.setattr(metrics, "BLOCK_DISPATCHES", dispatches)
        assert all_of(read(story())) == whole


def test_saved_tokens_of_a_failure_are_found_in_every_block(monkeypatch: pytest.MonkeyPatch):
    names = [f"t{i}" for i in range(6)]
    saved = tuple((TrajectoryId(name), i + 1) for i, name in enumerate(names))
    entries = [
        *(entry(ready(f"e{i}")) for i in range(2)),
        *(entry(arrived(name), dispatch(name, 0, "e0")) for name in names),
        entry(
            EngineFailed(time_s=4.0, engine=EngineId("e0"), reason="fault", salvaged=saved),
            *(dispatch(name, 0, "e1") for name in names),
        ),
        *(entry(done(name, 0, "e1", at=6.0, tokens=9)) for name in names),
        *(entry(finished(name, 6.0)) for name in names),
    ]
    monkeypatch.setattr(metrics, "BLOCK_DISPATCHES", 3)
    summary, steps, _ = all_of(read(entries))
    assert summary["dispatches_lost"] == 6
    assert steps.column("output_tokens").to_pylist() == [10, 11, 12, 13, 14, 15]


def test_a_journal_that_does_not_add_up_is_refused():
    for entries in (story()[:-1], [*story(), entry(finished("b", 12.0))]):
        with pytest.raises(MetricsError, match="does not add up"):
            measure(read(entries))


def test_a_column_that_was_not_read_is_no_zeros():
    rows = read(story()).of("Dispatch")
    with pytest.raises(AssertionError, match="priority of Dispatch was not read"):
        rows.floats("priority")
    assert rows.codes("tool").tolist() == [-1] * len(rows)


def test_a_column_grows_to_the_type_that_holds_its_values():
    column, parts = Column(), [[1, 2], [], [-300], [70_000], [2**40, -(2**62)], [5] * 10_000]
    for part in parts:
        column.add(np.array(part, np.int64))
    assert column.array().dtype == np.int64
    assert column.array().tolist() == [value for part in parts for value in part]
    small = Column()
    for _ in range(1000):
        small.add(np.array([127, -128]))
    assert small.array().dtype == np.int8
    assert small.array().tolist() == [127, -128] * 1000


def test_a_run_that_is_killed_in_its_middle_is_readable_up_to_its_last_chunk(
    trace: Path, tmp_path: Path
):
    whole = list(load_run(simulate(config(trace, "verl"), out=tmp_path / "whole").path).entries())
    assert len(whole) > 500
    (tmp_path / "stops.py").write_text(
        "import time\n"
        "from heddle.runs import directory as runs\n"
        "from tests.app.test_journal_read import config, simulate, Path\n"
        "runs.CHUNK_ENTRIES = 100\n"
        "flush, done = runs.RunDirectory.flush, []\n"
        "def stop_at_the_fourth(run):\n"
        "    flush(run)\n"
        "    done.append(run)\n"
        "    if len(done) == 4:\n"
        "        Path('stopped').touch()\n"
        f"        time.sleep({2 * PATIENCE_S})\n"
        "runs.RunDirectory.flush = stop_at_the_fourth\n"
        f"simulate(config(Path({str(trace)!r}), 'verl'), out=Path('killed'))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "stops.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    since = time.monotonic()
    while not (tmp_path / "stopped").exists():
        assert process.poll() is None
        assert time.monotonic() - since < PATIENCE_S
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (path,) = (tmp_path / "killed").iterdir()
    assert json.loads((path / "manifest.json").read_text())["status"] == "running"
    assert not (path / "summary.json").exists()
    found = list(load_run(path, unfinished=True).entries())
    assert 0 < len(found) < len(whole)
    assert len(found) % 100 == 0
    assert found == whole[: len(found)]


def test_arrivals_decide_the_order_of_trajectories():
    names = ["b", "a", "c"]
    entries = [entry(arrived(name, at=float(i))) for i, name in enumerate(names)]
    assert all(isinstance(each.event, TrajectoryArrived) for each in entries)
    assert read(entries).trajectories == names
    assert of_table(table(entries)).trajectories == names
