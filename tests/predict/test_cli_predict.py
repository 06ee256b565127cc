"""`heddle predict`: fit, evaluate, describe, and one message for each mistake."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from heddle.cli import main
from heddle_trace.files import write_trace
from heddle_trace.synth import synth


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "seen.jsonl", synth("coding", 80, seed=1, samples_per_group=4))
    write_trace(tmp_path / "new.jsonl.gz", synth("coding", 80, seed=2, samples_per_group=4))
    return tmp_path


def heddle(*args: object):
    return CliRunner().invoke(main, [str(a) for a in args])


def refused(*args: object) -> str:
    done = heddle(*args)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return done.output


def test_fit_evaluate_and_describe(here: Path):
    done = heddle("predict", "fit", "seen.jsonl", "-o", "m.heddle", "--seed", 3)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("m.heddle: trees, ")
    told = heddle("predict", "evaluate", "m.heddle").stdout
    assert "heddle predict fit seen.jsonl -o m.heddle --seed 3" in told
    assert "seen: 80 trajectories, 20 groups" in told
    plain = json.loads(heddle("predict", "evaluate", "m.heddle", "--json").stdout)
    assert plain["schema"] == "heddle.model/1"
    assert plain["trained_on"][0]["trajectories"] == 80
    judged = heddle("predict", "evaluate", "m.heddle", "new.jsonl.gz", "--json")
    assert judged.stderr == ""
    found = json.loads(judged.stdout)
    assert found["sha256"] == plain["sha256"]
    by_step = found["traces"][0]["predictors"]["trees"]
    assert list(by_step) == ["0", "1", "2", "4", "8"]
    assert by_step["1"]["trajectories"] == 80
    assert 0.0 <= by_step["1"]["recall"] <= 1.0
    assert len(by_step["1"]["coverage"]) == len(plain["levels"])
    assert by_step["2"]["median_error_tokens"] > 0
    assert set(found["traces"][0]["predictors"]) == {"trees", "group", "progressive"}
    shown = heddle("predict", "evaluate", "m.heddle", "new.jsonl.gz").stdout
    assert "Spearman" in shown
    assert "at or below quantile" in shown


def test_the_same_fit_is_the_same_file(here: Path):
    for name in ("a", "b"):
        Path(name).mkdir()
        assert heddle("predict", "fit", "seen.jsonl", "-o", f"{name}/m.heddle").exit_code == 0
    assert Path("a/m.heddle").read_bytes() == Path("b/m.heddle").read_bytes()


def test_judging_on_what_was_learned_is_said(here: Path):
    assert heddle("predict", "fit", "seen.jsonl", "-o", "m.heddle").exit_code == 0
    judged = heddle("predict", "evaluate", "m.heddle", "seen.jsonl")
    assert judged.exit_code == 0
    assert "seen: the model was trained on this trace" in judged.stderr


def test_evaluation_on_an_unknown_task_prints_a_note(here: Path):
    write_trace(here / "other.jsonl", synth("math", 80, seed=1, samples_per_group=4))
    assert heddle("predict", "fit", "seen.jsonl", "-o", "m.heddle").exit_code == 0
    judged = heddle("predict", "evaluate", "m.heddle", "other.jsonl", "--json")
    assert judged.exit_code == 0
    assert "other: the model has not met 'math', for which runs use progressive" in judged.stderr


def test_too_few_groups_cannot_be_split(here: Path):
    write_trace(here / "few.jsonl", synth("coding", 20, seed=1, samples_per_group=4))
    said = refused("predict", "fit", "few.jsonl", "-o", "m.heddle")
    assert "few: too few groups to split (5)" in said
    assert not Path("m.heddle").exists()


def test_an_empty_trace_and_none_at_all(here: Path):
    Path("empty.jsonl").write_text("")
    assert "empty.jsonl: holds no trajectories" in refused(
        "predict", "fit", "empty.jsonl", "-o", "m.heddle"
    )
    assert "gone.jsonl" in refused("predict", "fit", "gone.jsonl", "-o", "m.heddle")
    assert "Missing argument" in refused("predict", "fit", "-o", "m.heddle")


def lengthless(records, keep: int):
    """All but the first `keep` records without the sizes of their steps."""
    lines = []
    for number, record in enumerate(records):
        steps = [{"output_tokens": s.output_tokens, "tool": s.tool} for s in record.steps]
        if number >= keep:
            steps = [step | {"output_tokens": None} for step in steps]
        lines.append(
            {
                "trajectory_id": record.trajectory_id,
                "group_id": record.group_id,
                "workload": record.workload,
                "prompt_tokens": None,
                "steps": steps,
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_trace_without_sizes_of_steps_teaches_nothing(here: Path):
    records = synth("coding", 48, seed=4, samples_per_group=2)
    Path("none.jsonl").write_text(lengthless(records, 0))
    said = refused("predict", "fit", "none.jsonl", "-o", "m.heddle")
    assert "none.jsonl: no trajectory has the output_tokens of all its steps" in said
    Path("some.jsonl").write_text(lengthless(records, 40))
    done = heddle("predict", "fit", "some.jsonl", "-o", "m.heddle")
    assert done.exit_code == 0, done.output
    assert "some: left out 8 of unknown length" in done.stderr
    plain = json.loads(heddle("predict", "evaluate", "m.heddle", "--json").stdout)
    assert plain["trained_on"][0]["dropped"] == 8


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-o", "m.pkl"), "name a *.heddle file in a folder that exists"),
        (("-o", "no/m.heddle"), "name a *.heddle file in a folder that exists"),
        (("-o", "m.heddle", "--seed", "-1"), "-1 is not in the range"),
    ],
)
def test_wrong_usage_prints_the_right_one(here: Path, args, said):
    assert said in refused("predict", "fit", "seen.jsonl", *args)
    assert sorted(p.name for p in here.iterdir()) == ["new.jsonl.gz", "seen.jsonl"]


def test_files_that_are_no_models(here: Path):
    for verb in (("evaluate", "seen.jsonl"), ("evaluate", "seen.jsonl", "new.jsonl.gz")):
        assert "seen.jsonl: not a model of Heddle" in refused("predict", *verb)
    assert "gone.heddle" in refused("predict", "evaluate", "gone.heddle")
