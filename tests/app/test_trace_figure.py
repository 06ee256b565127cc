"""The figure of `heddle trace describe`, and what drawing from a trace says."""

import json
from pathlib import Path

import pytest

from heddle_trace import read_trace, synth, write_trace
from tests.app.journals import Heddle
from tests.trace.builders import call, record, step

KINDS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "coding.jsonl.gz"
    write_trace(path, synth("coding", 48, 3, 8))
    return path


@pytest.mark.parametrize("suffix", KINDS)
def test_a_figure_has_the_format_of_its_name_and_is_the_same_each_time(
    heddle: Heddle, made: Path, suffix: str
):
    drawn = []
    for name in ("a", "b"):
        done = heddle("trace", "describe", made, "--figure", f"{name}.{suffix}")
        assert done.exit_code == 0, done.output
        assert f"{name}.{suffix}: drawn" in done.stderr
        assert "max / median" in done.stdout
        drawn.append(Path(f"{name}.{suffix}").read_bytes())
    assert drawn[0].startswith(KINDS[suffix])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "records",
    [
        [record(step(0), prompt_tokens=0)],
        [record(step(None), call(5, tool="x" * 900, tool_s=0.0), prompt_tokens=None)],
        [record(call(5, tool_s=None), step(1)), record(step(7), trajectory_id="b")],
        [record(*(call(1, tool=f"tool-{n}", tool_s=n / 7) for n in range(15)))],
        [record(call(1, tool="$\\bad{", tool_s=1.0), call(1, tool="工具\n\t", tool_s=1.0))],
    ],
    ids=["one token", "nothing known", "no times", "many tools", "odd names"],
)
def test_whatever_a_trace_lacks_it_can_be_drawn(heddle: Heddle, tmp_path: Path, records):
    path = tmp_path / "o$d$d^.jsonl"  # no formula
    write_trace(path, records)
    done = heddle("trace", "describe", path, "--figure", "odd.png", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["trajectories"] == len(records)
    assert done.stderr == "odd.png: drawn\n"
    assert Path("odd.png").stat().st_size > 5_000


def test_figures_that_are_impossible_are_reported(refused, made: Path):
    said = refused("trace", "describe", made, "--figure", "a.jpg")
    assert "a.jpg: a figure must be named *.png, *.svg, *.pdf" in said
    refused("trace", "describe", made, "--figure", "none/a.png")
    assert list(Path().iterdir()) == []


def test_step_tails_and_the_longest_wait_of_a_tool_are_shown(heddle: Heddle, tmp_path: Path):
    records = [
        record(*(call(10, tool_s=1.0 + i) for i in range(n)), trajectory_id=f"t{n}")
        for n in (1, 2, 9)
    ]
    write_trace(tmp_path / "t.jsonl", records)
    done = heddle("trace", "describe", tmp_path / "t.jsonl")
    assert "max / median: output tokens 4.5, steps 4.5" in done.stdout
    assert "max s" in done.stdout
    answer = json.loads(heddle("trace", "describe", tmp_path / "t.jsonl", "--json").stdout)
    assert answer["steps_max_over_median"] == 4.5
    assert answer["tools"][0]["tool_s"]["max"] == 9.0


def test_resampling_prints_its_draws_and_repeats(heddle: Heddle, made: Path):
    done = heddle("trace", "resample", made, 4, 4, "-o", "a.jsonl")
    assert done.exit_code == 0
    assert "16 trajectories in 4 groups of 4" in done.stdout
    assert "drawn     16 of 48 trajectories, from 4 of 6 groups" in done.stdout
    assert "repeated" not in done.stdout
    more = (9, 20, "--seed", 3, "-o", "b.jsonl")
    done = heddle("trace", "resample", made, *more)
    assert "repeated  3 groups stand for a task a second time" in done.stdout
    assert "repeated  132 trajectories are copies" in done.stdout
    assert "repeated  9 groups have fewer samples than requested" in done.stdout
    assert len(read_trace("b.jsonl").records) == 180
    answer = json.loads(heddle("trace", "resample", made, *more, "--force", "--json").stdout)
    assert answer["schema"] == "heddle.trace.resample/1"
    assert (answer["repeated_groups"], answer["seed"]) == (3, 3)
    assert heddle("trace", "check", "b.jsonl").exit_code == 0


def test_draws_that_are_impossible_are_reported(refused, made: Path):
    assert "no such file" in refused("trace", "resample", "none.jsonl", 1, 1, "-o", "a.jsonl")
    many = (100_000, 10_000, "-o", "a.jsonl")
    assert "1,000,000 at most" in refused("trace", "resample", made, *many)
    refused("trace", "resample", made, 0, 1, "-o", "a.jsonl")
    refused("trace", "resample", made, 1, 1, "-o", "a.json")
    before = made.read_bytes()
    itself = (1, 1, "-o", made, "--force")
    assert "is the trace to draw from" in refused("trace", "resample", made, *itself)
    assert made.read_bytes() == before
    assert list(Path().iterdir()) == []
