"""Logs that no framework means to write: each is one message, and nothing is lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle_trace.observed.schema import (
    SCHEMA,
    ObservedEngine,
    ObservedHeader,
    ObservedRequest,
    Phase,
)
from tests.app.journals import Heddle
from tests.app.test_diagnose import FIXTURES, QUICK, answered

HEADER = ObservedHeader(schema=SCHEMA, source="x", clock="shared")
OTHER = ObservedHeader(schema=SCHEMA, source="x", clock="trajectory")


def request(**more: Any) -> ObservedRequest:
    known = {"trajectory_id": "a", "step": 0, "start_s": 5.0, "decode_s": 2.0, "output_tokens": 9}
    return ObservedRequest(**{**known, **more})


def log(*seen: Any) -> str:
    return "".join(msgspec.json.encode(each).decode() + "\n" for each in (HEADER, *seen))


BAD = {
    "equal times": (log(request(decode_s=0.0), request(trajectory_id="b", decode_s=0.0)), "one ti"),
    "an empty step": (log(Phase(phase="step", start_s=5, end_s=5, rl_step=1)), "at one time"),
    "one sample": (log(ObservedEngine(engine="e", time_s=1, running=3, waiting=0)), "at one time"),
    "two runs": (log(request(), OTHER, request(trajectory_id="b")), "line 3: is the header of a"),
    "another time": (
        log(request(), ObservedEngine(engine="e", time_s=9e6, running=3, waiting=0)),
        "metrics and requests are 8,999,993 s apart: two runs are in these logs",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_logs_that_cannot_be_of_one_step_are_one_message(refused: Callable[..., str], fault: str):
    text, said = BAD[fault]
    Path("a.jsonl").write_text(text)
    assert said in refused("diagnose", "a.jsonl", *QUICK)


def test_requests_years_apart_are_refused_before_they_are_simulated(refused: Callable[..., str]):
    Path("a.jsonl").write_text(log(request(), request(trajectory_id="b", start_s=1e10)))
    said = refused("verify", "a.jsonl", "--set", "cluster.gpus=1")
    assert "the logs span 9,999,999,997 s: verify the files of one run" in said


def test_names_are_shown_as_they_are_and_move_no_cursor(heddle: Heddle):
    names = {"trajectory_id": "a[/b][red]\x1b[2J", "engine": "e\n\u202e"}
    Path("a.jsonl").write_text(log(request(**names)))
    done = heddle("diagnose", "a.jsonl", *QUICK)
    assert done.exit_code == 0, done.output
    assert "a[/b][red]?[2J" in done.stdout
    assert "e??" in done.stdout


def test_measured_steps_are_not_written_over_the_logs(refused: Callable[..., str], tmp_path: Path):
    path = tmp_path / "logs" / "spans.jsonl"
    path.parent.mkdir()
    text = (FIXTURES / "vllm_spans.jsonl").read_text()
    path.write_text(text)
    for source, file in ((path, path), (path.parent, path.parent / "new.jsonl")):
        said = refused("diagnose", source, *QUICK, "--set", f"diagnose.observed={file}")
        assert "is of the logs; name a file elsewhere" in said
    assert path.read_text() == text
    assert [each.name for each in path.parent.iterdir()] == ["spans.jsonl"]


def test_batches_alone_are_generation_and_said_to_be_recorded(heddle: Heddle, tmp_path: Path):
    path = tmp_path / "m.prom"
    sample = 'vllm:num_requests_running{{engine="0"}} {} {}\n'
    values = ("1", "NaN", "+Inf", "0")
    path.write_text("".join(sample.format(v, 1767225600 + at) for at, v in enumerate(values)))
    found = answered(heddle, path, *QUICK)
    assert {each["part"]: each["seconds"] for each in found["parts"]}["llm"] == 3.0
    assert "No time" not in found["verdict"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
