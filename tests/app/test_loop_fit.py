"""What `heddle loop` chooses where `[loop]` leaves it open, and which regimes it leaves out."""

import json
from pathlib import Path

import msgspec
import pytest

from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.journals import Heddle

CLUSTER = ("--model", "qwen3-8b", "--gpus", "8", "--tp", "2", "--set", "loop.train_gpus=4")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve prompts with four samples each."""
    path = tmp_path_factory.mktemp("fit") / "search.jsonl.gz"
    write_trace(path, synth("search", trajectories=48, samples_per_group=4, seed=1))
    return str(path)


def answered(heddle: Heddle, trace: str, *options: str) -> dict:
    shown = heddle("loop", trace, "--seeds", "1", *CLUSTER, *options, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


def test_a_trace_and_no_option_of_the_loop_are_enough(heddle: Heddle, prompts: str):
    found = answered(heddle, prompts)
    assert [row["regime"] for row in found["regimes"]] == ["sync", "one-step-off", "areal"]
    assert found["batch"] == {"groups": 12, "samples": 4}
    assert found["notes"] == [
        "loop.samples = 4, as prompts have 4",
        "loop.groups = 12, as there are 12 prompts",
    ]
    assert "left_out" not in found


def test_samples_leave_room_for_those_beside_them(heddle: Heddle, prompts: str):
    found = answered(heddle, prompts, "--regimes", "sync,rollpacker")
    assert found["batch"]["samples"] == 3
    assert {row["regime"] for row in found["regimes"]} == {"sync", "rollpacker"}


def uneven(path: Path, samples: list[int]) -> str:
    """Writes a trace of prompts with so many samples each; returns its path."""
    whole = synth("search", trajectories=4 * len(samples), samples_per_group=4, seed=1)
    write_trace(path, [each for at, each in enumerate(whole) if at % 4 < samples[at // 4]])
    return str(path)


def test_prompts_of_which_the_trace_lacks_samples_are_left_out(heddle: Heddle, tmp_path: Path):
    path = uneven(tmp_path / "uneven.jsonl.gz", [4] * 10 + [3, 1])
    names = ("--regimes", "sync,rollpacker")
    found = answered(heddle, path, "--regimes", "sync")
    assert found["batch"] == {"groups": 10, "samples": 4}
    assert "2 of 12 prompts left out, with fewer than 4 samples" in found["notes"]
    found = answered(heddle, path, *names)
    assert found["batch"] == {"groups": 10, "samples": 3}
    assert "loop.samples = 3, as prompts have 4 and regimes start 4" in found["notes"]
    found = answered(heddle, path, *names, "--set", "loop.samples=3")
    assert found["batch"] == {"groups": 11, "samples": 3}
    assert "1 of 12 prompts left out, with fewer than 3 samples" in found["notes"]
    assert list(found["left_out"]) == ["rollpacker"]


def test_a_regime_that_needs_several_samples_has_them(heddle: Heddle, tmp_path: Path):
    whole = synth("search", trajectories=48, samples_per_group=4, seed=1)
    path = str(tmp_path / "rewarded.jsonl.gz")
    write_trace(
        path, [msgspec.structs.replace(s, reward=float(at % 3)) for at, s in enumerate(whole)]
    )
    found = answered(heddle, path, "--regimes", "sync:batching.equal_rewards=drop")
    assert found["batch"]["samples"] == 4


def test_half_of_the_prompts_have_the_samples_that_are_given(heddle: Heddle, tmp_path: Path):
    path = uneven(tmp_path / "few.jsonl.gz", [4] * 5 + [3] * 7)
    four = ("--regimes", "sync", "--set", "loop.samples=4")
    shown = heddle("loop", path, "--seeds", "1", *CLUSTER, *four)
    assert shown.exit_code == 2
    assert "7 of 12 prompts" in shown.output


def test_steps_are_those_that_the_longest_warm_up_needs(heddle: Heddle, prompts: str):
    names = "sync,verl-separate-async"
    assert answered(heddle, prompts, "--regimes", names)["steps"] == 16
    assert answered(heddle, prompts, "--regimes", "sync")["steps"] == 10


def test_every_regime_that_cannot_take_part_says_why(heddle: Heddle, prompts: str):
    names = ("--regimes", "areal,libra:pool_gpus=8", "--set", "loop.batches=3")
    shown = heddle("loop", prompts, "--seeds", "1", *CLUSTER, *names)
    assert shown.exit_code == 2
    said = " ".join(shown.output.replace("│", " ").split())
    assert "regime areal has all of its trajectories under way after step 5" in said
    assert "; regime libra:pool_gpus=8 has a pool of 8 of the" in said


def test_groups_are_those_that_every_prompt_once_allows(heddle: Heddle, prompts: str):
    found = answered(heddle, prompts, "--regimes", "sync", "--set", "loop.repeat=false")
    assert (found["steps"], found["batch"]["groups"]) == (10, 1)
    packed = answered(heddle, prompts, "--set", "loop.epoch_plan=random", "--regimes", "sync")
    assert packed["batch"]["groups"] == 12


@pytest.mark.parametrize(
    ("setting", "names", "left", "why"),
    [
        ("loop.colocated=true", "sync,areal", "areal", "leave out loop.colocated"),
        ("loop.batches=3", "sync,areal", "areal", "take loop.batches = 7 or more"),
        ("loop.samples=4", "sync,rollpacker", "rollpacker", "4 samples of each prompt and 1"),
        ("loop.optimizer_steps=2", "sync,heddle-loop", "heddle-loop", "accumulate_from=0"),
        ("loop.batches=7", "libra,sync", "libra", "pool of 8 of the 4 GPUs"),
    ],
)
def test_a_regime_that_cannot_take_part_is_left_out_where_others_can(
    heddle: Heddle, prompts: str, setting: str, names: str, left: str, why: str
):
    found = answered(heddle, prompts, "--regimes", names, "--set", setting)
    assert [row["regime"] for row in found["regimes"]] == ["sync"]
    assert list(found["left_out"]) == [left]
    assert why in found["left_out"][left]
    alone = heddle("loop", prompts, "--seeds", "1", *CLUSTER, "--regimes", left, "--set", setting)
    assert alone.exit_code == 2, alone.output


def test_a_pattern_stands_for_regimes(heddle: Heddle, prompts: str):
    found = answered(heddle, prompts, "--regimes", "april,verl-colocate*,s?nc")
    assert [row["regime"] for row in found["regimes"]] == ["april", "verl-colocate-async", "sync"]
    wrong = heddle("loop", prompts, "--seeds", "1", *CLUSTER, "--regimes", "area*l*x")
    assert wrong.exit_code == 2
    assert "did you mean 'areal'" in " ".join(wrong.output.replace("│", " ").split())


def test_a_trainer_has_the_fewest_gpus_that_hold_a_step(heddle: Heddle, prompts: str):
    options = ("--model", "qwen3-14b", "--gpus", "8", "--regimes", "sync", "--json")
    shown = heddle("loop", prompts, "--seeds", "1", *options)
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["regimes"][0]["train_gpus"] == 4
    assert "loop.train_gpus = 4, to hold a step" in found["notes"]
    few = heddle(
        "loop", prompts, "--seeds", "1", "--model", "qwen3-14b", "--gpus", "4", "--regimes", "sync"
    )
    assert few.exit_code == 2
    assert "--gpus = 8, or loop.colocated = true, would do" in " ".join(
        few.output.replace("│", " ").split()
    )
