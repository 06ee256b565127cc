"""Run directories: whole or recognisably not, and never changed afterwards."""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from heddle.config import RunConfig
from heddle.reports.sample import choose
from heddle.runs import (
    Run,
    RunDirectory,
    RunError,
    RunFacts,
    directory,
    journal_buffer,
    load_run,
    open_run,
)
from heddle.runs import directory as runs
from heddle.runs import files as run_files
from heddle.runs.journal_buffer import JournalBuffer
from heddle.runs.journal_file import MAGIC
from heddle.runs.journal_schema import schema
from heddle_core.commands import Command
from heddle_core.events import TrajectoryArrived
from heddle_core.journal import Entry
from tests.app.journals import (
    arrived,
    dispatch,
    done,
    entry,
    numbered,
    of_table,
    ready,
    table,
    unlisted,
)
from tests.app.test_metrics import finished, story

FACTS = RunFacts(
    driver="test", trace_name="small", trace_sha256="0" * 64, command_line=("x", "y z")
)


def opened(out: Path) -> RunDirectory:
    return open_run(out, RunConfig(trace="small.jsonl", seed=4), FACTS, config_text="seed = 4\n")


def filled(out: Path, entries: list[Entry]) -> RunDirectory:
    run = opened(out)
    for each in entries:
        run.record(each.event, each.commands)
    return run


@pytest.mark.parametrize("kept", [0, 7])
def test_columns_of_a_large_journal_are_read_back(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with filled(tmp_path / "small", story()) as small:
        small.finish()
    monkeypatch.setattr(directory, "MOST_ROWS_KEPT", kept)
    with filled(tmp_path / "large", story()[:4]) as large:
        assert len(large.columns().of("TrajectoryArrived")) == 2
        for each in story()[4:]:
            large.record(each.event, each.commands)
        large.finish()
    one, two = load_run(small.path), load_run(large.path)
    assert one.summary == two.summary
    assert one.steps.equals(two.steps)
    assert one.trajectories.equals(two.trajectories)
    assert list(two.entries()) == story()


def test_a_finished_run_gives_back_what_went_in(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish(notes={"filled_tool_s": 3})
    assert run.path.name.endswith("-small-verl-s4")
    loaded = load_run(run.path)
    assert list(loaded.entries()) == story()
    assert loaded.config == RunConfig(trace="small.jsonl", seed=4)
    assert loaded.summary["makespan_s"] == 10.0
    assert loaded.summary["filled_tool_s"] == 3
    assert loaded.steps.num_rows == 3
    assert loaded.trajectories.num_rows == 2
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["schema"] == "heddle.run/2"
    assert manifest["status"] == "finished"
    assert manifest["command_line"] == "x 'y z'"
    assert manifest["trace"]["sha256"] == "0" * 64
    assert manifest["oracle"] is False
    assert {"heddle", "python", "numpy", "simpy"} <= manifest["versions"].keys()
    names = {p.name for p in run.path.iterdir()}
    assert names == {
        "manifest.json",
        "config.toml",
        "config.resolved.json",
        "events.arrow",
        "steps.parquet",
        "trajectories.parquet",
        "summary.json",
    }
    assert (run.path / "config.toml").read_text() == "seed = 4\n"


def test_a_finished_run_is_read_only_and_closed(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        logs = run.path / "engines"
        logs.mkdir()
        (logs / "e0.log").write_text("what an engine printed")
        run.finish()
    inside = [p for p in run.path.rglob("*") if p != logs]
    assert all(not p.stat().st_mode & 0o222 for p in inside)
    assert logs.stat().st_mode & 0o111, "what is in it can be read by others than root"
    with pytest.raises(AssertionError, match="never changes"):
        run.finish()


def test_names_that_are_taken_get_a_suffix(tmp_path: Path):
    paths = []
    for _ in range(3):
        with filled(tmp_path / "runs", story()) as run:
            run.finish()
        paths.append(run.path)
    assert len(set(paths)) == 3
    assert all(load_run(path).status == "finished" for path in paths)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), "interrupted", "was interrupted"),
        (ZeroDivisionError("division by zero"), "failed", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_off_run_keeps_its_journal_and_is_no_result(
    tmp_path: Path, error: BaseException, status: str, said: str
):
    run = filled(tmp_path / "runs", story()[:4])
    with pytest.raises(type(error)) as caught, run:
        raise error
    assert str(run.path) in caught.value.__notes__[0]
    with pytest.raises(RunError, match=said):
        load_run(run.path)
    loaded = load_run(run.path, unfinished=True)
    assert loaded.status == status
    assert list(loaded.entries()) == story()[:4]
    with pytest.raises(RunError, match="no such file"):
        _ = loaded.summary


@pytest.mark.parametrize("made", [True, False])
def test_an_interrupt_while_the_directory_is_made_leaves_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
):
    monkeypatch.setattr(directory, "_name", lambda *_: "name")
    out = tmp_path / "runs"
    with filled(out, story()) as first:
        first.finish()
    make = Path.mkdir

    def interrupted(path: Path, *args: Any, **options: Any) -> None:
        if made or path.parent != out:
            make(path, *args, **options)
        if path.parent == out:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(out)
    assert [path.name for path in out.iterdir()] == ["name"]
    load_run(first.path).verify()


def test_a_run_that_is_left_without_finish_has_failed(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        pass
    with pytest.raises(RunError, match="closed before its end"):
        load_run(run.path)


def test_a_journal_that_does_not_add_up_is_no_result(tmp_path: Path):
    with (
        pytest.raises(ValueError, match="does not add up"),
        filled(tmp_path / "runs", story()[:-1]) as run,
    ):
        run.finish()
    assert load_run(run.path, unfinished=True).status == "failed"
    assert not (run.path / "summary.json").exists()


def test_a_killed_process_leaves_the_journal_up_to_its_last_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "CHUNK_ENTRIES", 3)
    run = filled(tmp_path / "runs", story()[:8])
    loaded = load_run(run.path, unfinished=True)
    assert loaded.status == "running"
    assert list(loaded.entries()) == story()[:6]
    # Cut off in the middle of the second chunk: the first one is still whole.
    journal = run.path / "events.arrow"
    size = journal.stat().st_size
    with journal.open("r+b") as file:
        file.truncate(size - 100)
    assert list(loaded.entries()) == story()[:3]
    run._file._file.close()


def test_a_journal_cut_off_anywhere_gives_its_whole_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "CHUNK_ENTRIES", 5)
    run = opened(tmp_path / "runs")
    journal, ends = run.path / "events.arrow", []
    for number, each in enumerate(story(), 1):
        run.record(each.event, each.commands)
        if number % 5 == 0:
            ends.append((journal.stat().st_size, number))
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    text = journal.read_bytes()
    ends.append((len(text), len(story())))
    loaded = load_run(run.path, unfinished=True)
    assert list(loaded.entries()) == story()
    # Every place near the end of a chunk, and some of all others: any place takes 2 ms.
    near = {size + by for size, _ in [(0, 0), *ends] for by in range(-20, 21)}
    sizes = sorted(near.union(range(0, len(text), 41)) & set(range(len(text))))
    rows = {}
    for size in reversed(sizes):
        os.truncate(journal, size)
        rows[size] = sum(batch.num_rows for batch in loaded.batches())
    chunks = sorted(set(rows.values()))
    assert [rows[size] for size in sizes] == sorted(rows.values())
    assert len(chunks) == 4
    for (end, entries), count in zip(ends[:-1], chunks[1:-1], strict=True):
        assert min(size for size in sizes if rows[size] == count) == end
        journal.write_bytes(text[:end])
        assert list(loaded.entries()) == story()[:entries]
    # The last chunk is whole before the footer is.
    assert ends[-2][0] < min(size for size in sizes if rows[size] == chunks[-1]) < len(text)


def test_a_finished_run_with_a_journal_that_was_cut_off_is_damaged(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    journal = unlisted(run.path) / "events.arrow"
    journal.chmod(0o644)
    text = journal.read_bytes()
    for size in (0, 7, 8, len(text) // 2, len(text) - 1):
        journal.write_bytes(text[:size])
        with pytest.raises(RunError, match=r"events\.arrow: damaged"):
            list(load_run(run.path).batches())
    journal.unlink()
    with pytest.raises(RunError, match=r"events\.arrow: no such file"):
        list(load_run(run.path).batches())


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("seq", 7, "its column 'seq' does not count from 0 on"),
        ("step", 2**40, "its column 'step' has numbers that no step can have"),
        ("step", "x", "its column 'step' is not of type int64"),
        ("time_s", math.nan, "its column 'time_s' has values that are no seconds"),
        ("trajectory", None, "its column 'trajectory' has [0-9]+ values and not [0-9]+"),
        ("payload", "[", "the payload of row [0-9]+ cannot be read: JSONDecodeError"),
        pytest.param("payload", "[" * 100_000, "the payload of row [0-9]+ .* Recursion", id="deep"),
    ],
)
def test_a_journal_with_a_value_that_no_run_writes_is_damaged(
    tmp_path: Path, column: str, value: object, said: str
):
    """As a bit that flips on a disk leaves it: Arrow files have no checksums."""
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    rows = pa.Table.from_batches(load_run(run.path).batches()).to_pylist()
    for row in rows:
        row[column] = value if row["step"] is not None or column == "payload" else row[column]
    at = schema().get_field_index(column)
    types = schema().set(at, pa.field(column, pa.string())) if value == "x" else schema()
    _rewritten(unlisted(run.path), pa.Table.from_pylist(rows, types))
    with pytest.raises(RunError, match=f"events.arrow: damaged: {said}"):
        list(load_run(run.path).batches())


def test_codes_of_a_journal_that_stand_for_no_word_are_damaged(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    table = pa.Table.from_batches(load_run(run.path).batches()).combine_chunks()
    names: Any = table.column("name").chunk(0)
    codes = pa.array([len(names.dictionary)] * len(table), pa.int32())
    wrong = pa.DictionaryArray.from_arrays(codes, names.dictionary, safe=False)
    _rewritten(
        unlisted(run.path), table.set_column(table.schema.get_field_index("name"), "name", wrong)
    )
    with pytest.raises(RunError, match=r"events\.arrow: damaged: .* out of bounds"):
        list(load_run(run.path).batches())


def test_words_of_a_stream_that_lie_outside_of_it_are_damaged(tmp_path: Path):
    """To unify the words of batches, Arrow reads them unchecked: the process ended."""
    run = filled(tmp_path / "runs", story())
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    (batch,) = load_run(run.path, unfinished=True).batches()
    at = batch.schema.get_field_index("name")
    names: Any = batch.column("name")
    count = len(names.dictionary)
    places = pa.array([*range(count - 1), 10**9, count], pa.int32()).buffers()[1]
    words = pa.StringArray.from_buffers(count, places, pa.py_buffer(bytes(count)))
    others = pa.array(["Dispatch"] * len(batch)).dictionary_encode()
    with (run.path / "events.arrow").open("wb") as file:
        file.write(MAGIC)
        with pa.ipc.new_stream(file, batch.schema) as stream:
            for each in (pa.DictionaryArray.from_arrays(names.indices, words, safe=False), others):
                stream.write_batch(batch.set_column(at, "name", each))
    with pytest.raises(RunError, match=r"events\.arrow: damaged: .* out of bounds"):
        list(load_run(run.path, unfinished=True).batches())


def test_another_file_in_the_place_of_an_unfinished_journal_is_damaged(tmp_path: Path):
    run = filled(tmp_path / "runs", story())
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    _rewritten(run.path, pa.table({"a": [1, 2]}))
    whole = (run.path / "events.arrow").read_bytes()
    for content in (whole, whole[:-20], b"no journal" * 9):
        (run.path / "events.arrow").write_bytes(content)
        with pytest.raises(RunError, match=r"events\.arrow: damaged: (it has no|Not an Arrow)"):
            list(load_run(run.path, unfinished=True).batches())


def test_a_row_of_a_trajectory_that_never_arrived_is_damage():
    never = [each for each in story() if not isinstance(each.event, TrajectoryArrived)]
    with pytest.raises(RunError, match=r"row [0-9]+: its trajectory never arrived"):
        of_table(table(never))


def _rewritten(run: Path, table: pa.Table) -> None:
    (run / "events.arrow").chmod(0o644)
    with pa.ipc.new_file(run / "events.arrow", table.schema) as file:
        file.write_table(table)


class Interrupted(tuple[Command, ...]):
    """Commands at which an interrupt arrives."""

    def __iter__(self) -> Iterator[Command]:
        raise KeyboardInterrupt


def test_an_interrupt_inside_an_entry_leaves_it_out(tmp_path: Path):
    run = filled(tmp_path / "runs", story()[:2])
    torn = story()[2]
    with pytest.raises(KeyboardInterrupt), run:
        run.record(torn.event, Interrupted(torn.commands))
    loaded = load_run(run.path, unfinished=True)
    assert list(loaded.entries()) == story()[:2]


@pytest.mark.parametrize("row", range(3))
def test_an_interrupt_while_rows_are_packed_leaves_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
):
    monkeypatch.setattr(journal_buffer, "PACKED_ROWS", 3)
    # Packed together are the rows of entries 0 to 2, of 3 and 4, and of 5 and 6.
    run, entries = filled(tmp_path / "runs", story()[:5]), story()[5:7]
    left = iter(range(row))

    def interrupted(put: Callable[[Any], object]) -> Callable[[Any], object]:
        def put_or_raise(row: Any) -> object:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return put(row)

        return put_or_raise

    def record() -> None:
        for each in entries:
            run.record(each.event, each.commands)

    for kind, put in run._rows._put.items():
        run._rows._put[kind] = interrupted(put)
    with pytest.raises(KeyboardInterrupt), run:
        record()
    assert list(load_run(run.path, unfinished=True).entries()) == story()[:5]


@pytest.mark.parametrize("place", ["_batch", "_arrow"])
def test_an_interrupt_inside_a_flush_leaves_whole_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    run = filled(tmp_path / "runs", story()[:4])
    run.flush()
    for each in story()[4:6]:
        run.record(each.event, each.commands)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(JournalBuffer, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.flush()
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), run:
        raise KeyboardInterrupt
    assert list(load_run(run.path, unfinished=True).entries()) == story()[:4]


def test_words_of_a_journal_grow_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "CHUNK_ENTRIES", 7)
    names = [f"{'long ' * (i % 5)}trajectory {i} \u2192" for i in range(100)]
    entries = [
        entry(arrived(name, at=float(i), prompt=i), dispatch(name, 0, f"e{i // 9}"))
        for i, name in enumerate(names)
    ]
    run = filled(tmp_path / "runs", numbered(*entries))
    loaded = load_run(run.path, unfinished=True)
    assert list(loaded.entries()) == numbered(*entries)[:98]
    chunks: list[Any] = [batch.column("trajectory") for batch in loaded.batches()]
    words = [chunk.dictionary for chunk in chunks]
    assert all(each.equals(words[0]) for each in words)
    run._close_journal()
    assert list(loaded.entries()) == numbered(*entries)
    assert pd.read_feather(run.path / "events.arrow")["engine"].dropna().iloc[-1] == "e11"
    with pa.ipc.open_stream(pa.py_buffer((run.path / "events.arrow").read_bytes())[8:]) as stream:
        stream.read_all()
        assert stream.stats.num_replaced_dictionaries == 0
        assert stream.stats.num_dictionary_deltas > 20


def test_a_run_without_end_forgets_words_and_reads_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "CHUNK_ENTRIES", 7)
    monkeypatch.setattr(journal_buffer, "MOST_WORDS", 10)
    # The first ends last: its name comes again after it was forgotten.
    names = [f"session {i}" for i in range(60)]
    ends = [*names[1:], names[0]]
    entries = [entry(ready("e0"))]
    entries += [entry(arrived(n, at=1.0), dispatch(n, 0, "e0")) for n in names]
    entries += [
        each
        for at, n in enumerate(ends, 2)
        for each in (
            entry(done(n, 0, "e0", at=at, tokens=at, reason="answer")),
            entry(finished(n, at)),
        )
    ]
    usual = filled(tmp_path / "usual", numbered(*entries))
    monkeypatch.setattr(runs, "_ENDLESS", ("test",))
    run = filled(tmp_path / "endless", numbered(*entries))
    assert len(run._rows._words["trajectory"]) < 20
    assert list(load_run(run.path, unfinished=True).entries()) == numbered(*entries)[:175]
    for each in (usual, run):
        with each:
            each.finish()
    found, expected = load_run(run.path), load_run(usual.path)
    assert list(found.entries()) == numbered(*entries)
    assert found.summary == expected.summary
    assert found.steps == expected.steps
    assert found.trajectories == expected.trajectories
    journal = run.path / "events.arrow"
    with pa.ipc.open_stream(pa.py_buffer(journal.read_bytes())[8:]) as stream:
        stream.read_all()
        assert stream.stats.num_replaced_dictionaries > 5
    journal.chmod(0o644)
    whole = journal.read_bytes()
    for damaged in (whole[:-8] + bytes(8), whole[:2000] + bytes(500) + whole[2500:]):
        journal.write_bytes(damaged)
        with pytest.raises(RunError, match="damaged"):
            list(load_run(run.path).batches())


def test_a_dead_process_is_distinguished_from_a_running_one(tmp_path: Path):
    run = filled(tmp_path / "runs", story())
    with pytest.raises(RunError, match="is still running"):
        load_run(run.path)
    path = run.path / "manifest.json"
    manifest = json.loads(path.read_text())
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    path.write_text(json.dumps({**manifest, "pid": child}))
    with pytest.raises(RunError, match="its process died"):
        load_run(run.path)
    with run:
        run.finish()


def test_a_full_disk_leaves_no_half_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = filled(tmp_path / "runs", story())

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
    with pytest.raises(OSError, match="No space left"), run:
        run.finish()
    assert not list(run.path.glob(".*.tmp"))
    assert not list(run.path.glob(".*"))
    assert not (run.path / "steps.parquet").exists()
    assert load_run(run.path, unfinished=True).status == "failed"
    assert list(load_run(run.path, unfinished=True).entries()) == story()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("chunks", [0, 2])
def test_a_disk_without_space_for_the_journal_keeps_its_whole_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunks: int
):
    monkeypatch.setattr(runs, "CHUNK_ENTRIES", 3)
    run = filled(tmp_path / "runs", story()[: 3 * chunks])
    journal = run._file._file.raw.fileno()
    disk = os.dup(journal)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), journal)

    def record_all() -> None:
        for each in story()[3 * chunks :]:
            run.record(each.event, each.commands)

    with pytest.raises(OSError, match="No space left"), run:
        record_all()
    os.write(disk, (b"" if chunks else b"ARROW1\0\0") + b"a part of a chunk")
    os.close(disk)
    loaded = load_run(run.path, unfinished=True)
    assert loaded.status == "failed"
    assert list(loaded.entries()) == story()[: 3 * chunks]


@pytest.mark.parametrize("driver", [(), ("test",)])
def test_a_run_with_a_batch_that_could_not_be_written_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: tuple[str, ...]
):
    """A timer's flush may be the last of a run; its error waits for the next entry."""
    monkeypatch.setattr(runs, "_ENDLESS", driver)
    run = filled(tmp_path / "runs", story())
    run.flush()
    run.record(ready("late", at=11.0), ())
    with monkeypatch.context() as once:
        once.setattr(run._file, "_writer", SimpleNamespace(write_batch=full_disk))
        with pytest.raises(OSError, match="No space left"):
            run.flush()
    with pytest.raises(OSError, match="No space left"), run:
        run.finish()
    loaded = load_run(run.path, unfinished=True)
    assert loaded.status == "failed"
    assert list(loaded.entries()) == story()


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_space_for_the_status_leaves_it_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = filled(tmp_path / "runs", story())
    monkeypatch.setattr(run_files, "write_whole", full_disk)
    with pytest.raises(OSError, match="No space left"), run:
        run.finish()
    with pytest.raises(RunError, match="is still running, or its process died"):
        load_run(run.path)


def test_out_must_be_a_folder_in_a_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        opened(tmp_path / "file")
    with pytest.raises(RunError, match="no such directory"):
        opened(tmp_path / "no" / "runs")


def test_what_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match="not a run directory"):
        load_run(tmp_path)
    for damaged in ("{", "[" * 100_000, '{"seed": 1' + "0" * 5_000 + "}"):
        (tmp_path / "manifest.json").write_text(damaged)
        with pytest.raises(RunError, match=r"manifest\.json: damaged"):
            load_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema": "heddle.run/1"}')
    with pytest.raises(RunError, match=r"made by heddle 0\.1\.x; heddle 0\.1 reads it"):
        load_run(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema": "heddle.run/9"}')
    with pytest.raises(RunError, match=r"'heddle\.run/9'"):
        load_run(tmp_path)


@pytest.mark.parametrize("figures", [{}, {"dispatches": "3"}])
def test_a_summary_without_the_number_of_dispatches_is_damaged(tmp_path: Path, figures: object):
    """Pages choose by it what they show."""
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    (unlisted(run.path) / "summary.json").unlink()
    (run.path / "summary.json").write_text(json.dumps(figures))
    with pytest.raises(RunError, match=r"summary\.json: damaged: it has no number of dispatches"):
        choose([load_run(run.path)], 1)


def test_a_damaged_table_is_named(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    path = unlisted(run.path) / "steps.parquet"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunError, match=r"steps\.parquet: damaged"):
        _ = load_run(run.path).steps


def test_a_manifest_lists_files_that_the_run_wrote(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    listed = load_run(run.path).manifest["files"]
    there = {path.name for path in run.path.iterdir()} - {"manifest.json"}
    assert there == set(listed) >= {"events.arrow", "summary.json", "config.resolved.json"}
    for name, file in listed.items():
        data = (run.path / name).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(data), sha256(data).hexdigest())
    assert listed["steps.parquet"]["rows"] == load_run(run.path).steps.num_rows > 0
    load_run(run.path).verify()


def test_a_file_that_was_shortened_replaced_or_lost_is_named(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    for name in ("events.arrow", "trajectories.parquet", "summary.json", "config.resolved.json"):
        path = run.path / name
        path.chmod(0o644)
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(RunError, match=rf"{name}: damaged: it has [\d,]+ bytes, and manifest"):
            load_run(run.path)
        middle = len(data) // 3
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        with pytest.raises(RunError, match=rf"{name}: damaged: it has sha256 .* copy the run"):
            load_run(run.path).verify()
        path.unlink()
        with pytest.raises(RunError, match=f"{name}: is missing"):
            load_run(run.path)
        path.write_bytes(data)
    load_run(run.path).verify()


def test_a_table_with_other_rows_of_the_same_size_is_named_when_a_run_is_loaded(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    path = run.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["steps.parquet"]["rows"] += 1
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"steps.parquet: damaged: it has \d+ rows, and manifest"):
        load_run(run.path)


def test_a_manifest_that_lists_files_elsewhere_is_damaged(tmp_path: Path):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    path = run.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../x"] = manifest["files"]["summary.json"]
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"manifest.json: damaged: '../x' is no file of this folder"):
        load_run(run.path)


@pytest.mark.parametrize(
    ("file", "column", "read"),
    [
        ("steps.parquet", "queueing_s", lambda run: run.steps),
        ("trajectories.parquet", "finished_s", lambda run: run.trajectories),
    ],
)
def test_a_column_of_a_table_that_holds_no_numbers_is_damaged(
    tmp_path: Path, file: str, column: str, read: Callable[[Run], object]
):
    with filled(tmp_path / "runs", story()) as run:
        run.finish()
    path = unlisted(run.path) / file
    path.chmod(0o644)
    found = pq.read_table(path)
    words = pa.array(["x"] * found.num_rows)
    pq.write_table(found.set_column(found.column_names.index(column), column, words), path)
    with pytest.raises(RunError, match=f"{file}: damaged: its column '{column}' is of type string"):
        read(load_run(run.path))
