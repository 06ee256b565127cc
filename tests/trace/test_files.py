import gc
import gzip
import hashlib
import io
import json
import math
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given

from heddle_trace import (
    StepRecord,
    TraceError,
    TrajectoryRecord,
    problems,
    read_trace,
    write_trace,
)
from heddle_trace import limits as limit
from heddle_trace.writing import packed
from tests.trace.builders import call, record, step

tokens = st.none() | st.integers(0, limit.MAX_STEP_TOKENS)
waits = st.none() | st.floats(0, limit.MAX_WAIT_S)
clocks = st.none() | st.floats(0, limit.MAX_CLOCK_S)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
flags = st.none() | st.booleans()
steps = st.builds(
    StepRecord,
    output_tokens=tokens,
    tool=st.none() | names,
    tool_s=waits,
    tool_tokens=tokens,
    tool_ok=flags,
    llm_s=waits,
    t_s=clocks,
    input_tokens=tokens,
    cached_tokens=tokens,
    n_tools=st.none() | st.integers(0, limit.MAX_PARALLEL_TOOLS),
)
records = st.builds(
    TrajectoryRecord,
    trajectory_id=names,
    group_id=names,
    workload=names,
    prompt_tokens=tokens,
    arrival_s=clocks,
    steps=st.lists(steps, min_size=1, max_size=4).map(tuple),
    source=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    outcome=flags,
    parent_id=st.none() | names,
    truncated=flags,
)
rollouts = st.lists(records, min_size=1, max_size=4, unique_by=lambda r: r.trajectory_id).map(tuple)

STEP = '{"output_tokens":5}'
LINE = '{"trajectory_id":"a","group_id":"g","workload":"w","prompt_tokens":3,"steps":[%s]}\n'


def written(tmp_path, text, name="t.jsonl"):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@given(rollout=rollouts)
def test_what_is_written_is_read_back(tmp_path_factory, suffix, rollout):
    path = tmp_path_factory.mktemp("round") / f"made{suffix}"
    made = write_trace(path, rollout)
    back = read_trace(path)
    assert back == made
    assert back.records == rollout
    assert back.name == "made"
    assert problems(path) == []


def test_the_hash_is_of_the_uncompressed_bytes_and_the_same_in_both_forms(tmp_path):
    plain = write_trace(tmp_path / "t.jsonl", [record(call(), step())])
    packed = write_trace(tmp_path / "u.jsonl.gz", [record(call(), step())])
    assert plain.sha256 == packed.sha256
    assert plain.sha256 == hashlib.sha256((tmp_path / "t.jsonl").read_bytes()).hexdigest()


def test_gzip_bytes_hold_neither_time_nor_name(tmp_path):
    write_trace(tmp_path / "a.jsonl.gz", [record()])
    write_trace(tmp_path / "b.jsonl.gz", [record()])
    content = (tmp_path / "a.jsonl.gz").read_bytes()
    assert content == (tmp_path / "b.jsonl.gz").read_bytes()
    assert content[3:8] == bytes(5)  # no flags, so no name; no time


def test_unknown_keys_and_blank_lines_are_passed_over(tmp_path):
    text = LINE.replace('"group_id"', '"shoe_size":{"x":[1]},"group_id"') % (
        '{"output_tokens":5,"mood":"fair"}'
    )
    read = read_trace(written(tmp_path, text + "\n \n"))
    assert read.records == (
        record(step(5), trajectory_id="a", group_id="g", workload="w", prompt_tokens=3),
    )


def test_null_and_left_out_mean_the_same_and_stay_none(tmp_path):
    text = LINE % '{"output_tokens":null,"tool":"x","tool_s":null},{"output_tokens":1}'
    first, last = read_trace(written(tmp_path, text)).records[0].steps
    assert (first.output_tokens, first.tool_s, first.tool_tokens) == (None, None, None)
    assert last.tool is None


@pytest.mark.parametrize("piece", [1, 7, 100])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_lines_are_put_together_from_pieces_of_any_size(tmp_path, monkeypatch, suffix, piece):
    made = write_trace(
        tmp_path / f"t{suffix}",
        [record(call(), step(tool="Größe ✓"), trajectory_id=f"{n}") for n in range(5)],
    )
    monkeypatch.setattr("heddle_trace.files._PIECE", piece)
    assert read_trace(tmp_path / f"t{suffix}") == made
    write_trace(tmp_path / f"u{suffix}", made.records)
    assert (tmp_path / f"u{suffix}").read_bytes() == (tmp_path / f"t{suffix}").read_bytes()
    bad = written(tmp_path, LINE % STEP + "\n" + LINE % '{"output_tokens":-1}', "bad.jsonl")
    assert [(p.line, p.field) for p in problems(bad)] == [
        (3, "steps[0].output_tokens"),
        (3, "trajectory_id"),
    ]
    cut = written(tmp_path, (LINE % STEP).encode() + "é".encode()[:1], "cut.jsonl")
    with pytest.raises(TraceError, match=f"line 2: not UTF-8 at byte {len(LINE % STEP)}"):
        read_trace(cut)


BAD_LINES = {
    "negative tokens": (LINE % '{"output_tokens":-1}', "steps[0].output_tokens", "found -1"),
    "fraction of a token": (LINE % '{"output_tokens":1.5}', "steps[0].output_tokens", "whole"),
    "tokens as text": (LINE % '{"output_tokens":"5"}', "steps[0].output_tokens", 'found "5"'),
    "tokens as flag": (LINE % '{"output_tokens":true}', "steps[0].output_tokens", "found true"),
    "absurd tokens": (LINE % '{"output_tokens":10000001}', "steps[0].output_tokens", "10,000,000"),
    "huge integer": (LINE % '{"output_tokens":%s}' % ("9" * 60), "steps[0].output_tokens", "whole"),
    "output missing": (LINE % '{"tool":null}', "steps[0].output_tokens", "is missing"),
    "negative wait": (LINE % '{"output_tokens":1,"tool_s":-0.1}', "steps[0].tool_s", "found -0.1"),
    "wait in ms": (LINE % '{"output_tokens":1,"tool_s":2592001}', "steps[0].tool_s", "30 days"),
    "NaN": (LINE % '{"output_tokens":1,"tool_s":NaN}', "steps[0].tool_s", "found nan"),
    "Infinity": (LINE % '{"output_tokens":1,"tool_s":Infinity}', "steps[0].tool_s", "found inf"),
    "overflow": (LINE % '{"output_tokens":1,"tool_s":1e999}', "steps[0].tool_s", "found inf"),
    "nameless tool": (LINE % '{"output_tokens":1,"tool":""}', "steps[0].tool", "null when nothing"),
    "ok as number": (LINE % '{"output_tokens":1,"tool_ok":1}', "steps[0].tool_ok", "true, false"),
    "second step": (LINE % (STEP + ',{"output_tokens":-1}'), "steps[1].output_tokens", "found -1"),
    "step not object": (LINE % "7", "steps[0]", "found 7; give an object"),
    "no steps": (LINE % "", "steps", "leave out a trajectory"),
    "steps not a list": (LINE.replace("[%s]", "null"), "steps", "found null"),
    "id missing": (LINE.replace('"trajectory_id":"a",', "") % STEP, "trajectory_id", "is missing"),
    "id empty": (LINE.replace('"a"', '""') % STEP, "trajectory_id", "1 to 1,000 characters"),
    "id a number": (LINE.replace('"a"', "17") % STEP, "trajectory_id", "found 17"),
    "group missing": (LINE.replace('"group_id":"g",', "") % STEP, "group_id", "is missing"),
    "workload missing": (LINE.replace('"workload":"w",', "") % STEP, "workload", "is missing"),
    "prompt missing": (LINE.replace('"prompt_tokens":3,', "") % STEP, "prompt_tokens", "or null"),
    "unix arrival": (
        LINE.replace('"group_id"', '"arrival_s":1.7e9,"group_id"') % STEP,
        "arrival_s",
        "since the start of the trace",
    ),
    "malformed": (LINE[:-3] % STEP + "\n", "", "malformed JSON at column 98"),
    "not an object": ("[1, 2]\n", "", "found [1, 2]; a line must hold one JSON object"),
    "two objects a line": ((LINE % STEP).strip() * 2 + "\n", "", "one whole JSON object"),
    "very deep": ('{"x":' + "[" * 100_000 + "\n", "", "JSON"),
    "byte-order mark": ("\ufeff" + LINE % STEP, "", "byte-order mark"),
}


@pytest.mark.parametrize(("text", "field", "says"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_refused_by_file_line_and_field(tmp_path, text, field, says):
    good = LINE.replace('"a"', '"first"') % STEP
    path = written(tmp_path, text if text.startswith("\ufeff") else good + text)
    (problem,) = problems(path)
    assert problem.field == field
    assert problem.line == (1 if text.startswith("\ufeff") else 2)
    assert says in problem.message
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value) == f"{path}: {problem}"


def test_duplicate_ids_are_refused_with_both_lines(tmp_path):
    path = written(tmp_path, LINE % STEP + "\n" + LINE % STEP)
    (problem,) = problems(path)
    assert (problem.line, problem.field) == (3, "trajectory_id")
    assert "taken by line 1" in problem.message
    with pytest.raises(TraceError, match="line 3: trajectory_id: 'a' is taken by line 1"):
        read_trace(path)


def test_all_problems_of_a_file_are_reported_up_to_the_limit(tmp_path):
    bad_steps = '{"output_tokens":-1,"tool_s":"x"},{"tool_tokens":0.5}'
    text = LINE % bad_steps + "{\n" + LINE % STEP + LINE % STEP
    path = written(tmp_path, text)
    found = [(p.line, p.field) for p in problems(path)]
    assert found == [
        (1, "steps[0].output_tokens"),
        (1, "steps[0].tool_s"),
        (1, "steps[1].output_tokens"),
        (1, "steps[1].tool_tokens"),
        (2, ""),
        (3, "trajectory_id"),  # taken by the faulty line 1
        (4, "trajectory_id"),
    ]
    assert [(p.line, p.field) for p in problems(path, limit=2)] == found[:2]


PACKED = gzip.compress((LINE % STEP).encode() * 50, mtime=0)
BAD_FILES = {
    "empty": ("t.jsonl", b"", "holds no trajectories"),
    "blank": ("t.jsonl", b"\n  \n", "holds no trajectories"),
    "empty gzip": ("t.jsonl.gz", gzip.compress(b""), "holds no trajectories"),
    "cut gzip": ("t.jsonl.gz", PACKED[:-12], "cut off"),
    "damaged gzip": ("t.jsonl.gz", PACKED[:-8] + bytes(8), "damaged"),
    "not gzip": ("t.jsonl.gz", (LINE % STEP).encode(), "not gzip, unlike its name"),
    "gzip unnamed": ("t.jsonl", PACKED, "rename it to *.jsonl.gz"),
    "not UTF-8": ("t.jsonl", (LINE % STEP).encode() + b'{"x":"\xff"}', "line 2: not UTF-8"),
    "UTF-16": ("t.jsonl", (LINE % STEP).encode("utf-16"), "line 1: not UTF-8"),
}


@pytest.mark.parametrize(("name", "content", "says"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_refused_with_the_remedy(tmp_path, name, content, says):
    path = written(tmp_path, content, name)
    with pytest.raises(TraceError) as refused:
        read_trace(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert says in str(refused.value)
    (problem,) = problems(path)
    assert str(refused.value) == f"{path}: {problem}"


def test_a_folder_and_a_missing_file_are_reported(tmp_path):
    with pytest.raises(TraceError, match="is a folder; name the"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    assert problems(tmp_path / "none.jsonl")[0].message == "no such file; check the path"


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("heddle_trace.files.MAX_FILE_BYTES", 100)
    with pytest.raises(TraceError, match="unpacks to more than"):
        read_trace(written(tmp_path, PACKED, "t.jsonl.gz"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_writing_refuses_numbers_that_json_lacks(tmp_path, value):
    with pytest.raises(
        TraceError, match=r"line 1: it holds a number that JSON does not have, NaN or Infinity"
    ):
        write_trace(tmp_path / "t.jsonl", [record(call(tool_s=value))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([], "holds no trajectories"),
        ([record(), record()], r"line 2: trajectory_id .* is taken by an earlier record"),
        ([record(call(tool_s=-1.0))], "found -1.0"),
    ],
)
def test_writing_refuses_what_reading_would(tmp_path, bad, says):
    with pytest.raises(TraceError, match=says):
        write_trace(tmp_path / "t.jsonl", bad)
    assert list(tmp_path.iterdir()) == []


def test_writing_wants_a_telling_name(tmp_path):
    with pytest.raises(TraceError, match=r"\*\.jsonl or \*\.jsonl\.gz"):
        write_trace(tmp_path / "t.json", [record()])


INTERRUPTED_ON_THE_WAY_OUT = """
import atexit, contextlib, os, sys
from pathlib import Path
from heddle_trace.writing import whole

def interrupt(frame, event, argument):
    if frame.f_code is contextlib._GeneratorContextManager.__exit__.__code__:
        sys.settrace(None)
        raise KeyboardInterrupt

sys.settrace(interrupt)
kept = whole(Path(sys.argv[1]))
try:
    with kept as stream:
        stream.write(b"half")
except KeyboardInterrupt:
    atexit._run_exitfuncs()
    os._exit(130)  # collects no garbage, which could end the block after all
"""


def test_an_interrupt_on_the_way_out_leaves_no_temporary_file(tmp_path):
    """The block's end is then never run: the end of the process removes the file."""
    path = tmp_path / "trace.jsonl"
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_ON_THE_WAY_OUT, path])
    assert ended.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_refused_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "t.jsonl"
    write_trace(path, [record()])
    before = path.read_bytes()

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device") as refused:
        write_trace(path, [record(trajectory_id="other")])
    assert refused.value.filename == str(path)
    assert refused.value.__notes__ == ["t.jsonl was not written."]
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_writing_into_a_missing_folder_is_reported(tmp_path):
    path = tmp_path / "none" / "t.jsonl"
    with pytest.raises(FileNotFoundError) as refused:
        write_trace(path, [record()])
    assert refused.value.filename == str(path)


def test_lines_are_plain_json_without_gaps_spelt_out(tmp_path):
    write_trace(tmp_path / "t.jsonl", [record(step(3))])
    line = json.loads((tmp_path / "t.jsonl").read_text())
    assert line["steps"] == [{"output_tokens": 3}]


@pytest.mark.parametrize("field", ["truncated", "arrival_s", "prompt_tokens", "steps[0].tool_ok"])
def test_half_of_a_character_in_a_field_is_refused_by_its_name(tmp_path, field):
    steps = [{"output_tokens": 1, "tool": "x", "tool_s": 1.0, "tool_tokens": 1}]
    line = {"trajectory_id": "a", "group_id": "a", "workload": "x", "prompt_tokens": 1}
    line["steps"] = steps
    (steps[0] if "." in field else line)[field.rpartition(".")[2]] = "\ud800"
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f'{path}: line 1: {field}: found "\\ud800"; give ')


def test_an_archive_that_a_signal_leaves_open_is_dropped_in_silence(monkeypatch):
    said: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    stream = io.BytesIO()
    archive = packed(stream)
    archive.__enter__()
    stream.close()
    del archive
    gc.collect()
    assert said == []
