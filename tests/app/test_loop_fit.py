"""What `heddle loop` chooses where `[loop]` leaves it open, and which regimes it leaves out."""

import json
import re
import shlex
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
        (
            "loop.batches=7",
            "libra:pool_gpus=8,sync",
            "libra:pool_gpus=8",
            "pool of 8 of the 4 GPUs",
        ),
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
    assert "this runs: heddle loop" in few.output


LACKING = ("--regimes", "sync", "--seeds", "1", "--set", "loop.batches=3")


def taken_as_it_stands(heddle: Heddle, *words: str, ways: int = 1) -> str:
    """The message of a command that fails, whose own commands run."""
    failed = heddle(*words)
    assert failed.exit_code == 2, failed.output
    commands = re.findall(r"this runs[^:;]*: (heddle .*?)(?=; this runs|\n|$)", failed.output)
    assert len(commands) == ways, failed.output
    for command in commands:
        done = heddle(*shlex.split(command)[1:])
        assert done.exit_code == 0, (command, done.output)
    return failed.output


@pytest.mark.parametrize(
    ("given", "wrong", "keys"),
    [
        (("--gpus", "4"), ["needs"], ["--gpus 8"]),
        (("--gpus", "8", "--set", "loop.train_gpus=2"), ["needs"], ["loop.train_gpus=4"]),
        (("--gpus", "8", "--set", "cluster.tp=8"), ["are left for engines of TP 8"], ["--tp 4"]),
        (
            ("--model", "llama-3.1-70b", "--gpus", "8"),
            ["at TP 1", "are left"],
            ["--tp 4", "--gpus"],
        ),
        (("--gpus", "8", "--sweep", "loop.train_gpus=2"), ["needs"], ["--gpus"]),
        (
            ("--set", "loop.train_tp=3", "--set", "loop.train_gpus=4"),
            ["no trainer of TP 3"],
            ["loop.train_gpus=6"],
        ),
    ],
)
def test_one_message_has_all_that_is_wrong_and_a_command_that_runs(
    heddle: Heddle, prompts: str, given: tuple[str, ...], wrong: list[str], keys: list[str]
):
    said = taken_as_it_stands(heddle, "loop", prompts, "--model", "qwen3-14b", *LACKING, *given)
    command = said[said.index("this runs") :]
    assert [text for text in wrong if text not in said] == [], said
    assert [text for text in keys if text not in command] == [], said


@pytest.mark.parametrize(("gpus", "pool"), [("8", 0), ("16", 4)])
def test_a_pool_that_no_trainer_divides_gets_another_size(
    heddle: Heddle, prompts: str, gpus: str, pool: int
):
    keys = ("--set", "loop.train_gpus=4", "--set", "loop.train_tp=4")
    words = ("--seeds", "1", "--model", "qwen3-14b", "--gpus", gpus, *keys)
    said = taken_as_it_stands(heddle, "loop", prompts, "--regimes", "libra:pool_gpus=2", *words)
    assert "pool_gpus must be a multiple of 4, not 2" in said
    assert f"--regimes libra:pool_gpus={pool}" in said
    assert "--gpus 32" not in said


def test_gaps_contexts_and_trainer_are_said_at_once(heddle: Heddle, tmp_path: Path):
    path = tmp_path / "long.jsonl.gz"
    whole = synth("search", trajectories=12, samples_per_group=1, seed=1)
    first, *others = whole
    steps = (
        msgspec.structs.replace(step, tool="web_search", tool_s=None, tool_tokens=150_000)
        for step in first.steps[:2]
    )
    write_trace(path, [msgspec.structs.replace(first, steps=(*steps, first.steps[-1])), *others])
    cluster = ("--model", "qwen3-14b", "--gpus", "8")
    said = taken_as_it_stands(heddle, "loop", str(path), *LACKING, *cluster, ways=2)
    assert "the trace lacks tool_s in 2 places" in said
    assert "1 of 12 trajectories do not fit into the KV cache" in said
    assert "this runs and leaves out 1 of 12 trajectories" in said
    assert re.search(r"then, with --tp \d, .*(needs|are left)", said)


def test_what_only_the_trainer_does_not_hold_is_dropped_where_that_is_asked(
    heddle: Heddle, tmp_path: Path
):
    path = str(tmp_path / "long.jsonl.gz")
    first, *others = synth("search", trajectories=48, samples_per_group=4, seed=1)
    grown = msgspec.structs.replace(first.steps[0], tool_s=1.0, tool_tokens=150_000)
    write_trace(path, [msgspec.structs.replace(first, steps=(grown, first.steps[-1])), *others])
    words = ("loop", path, *LACKING, "--model", "qwen3-14b", "--gpus", "8", "--json")
    trainer, drop = ("--set", "loop.train_gpus=4"), ("--set", "cluster.over_capacity=drop")
    refused = heddle(*words, *trainer)
    assert refused.exit_code == 2
    assert "training qwen3-14b on 4 h100 GPUs needs" in refused.output
    kept = heddle(*words, *trainer, *drop)
    assert kept.exit_code == 0, kept.output
    found = json.loads(kept.stdout)
    assert "1 of 48 trajectories left out, longer than engine or trainer holds" in found["notes"]
    assert found["trace"]["trajectories"] == 47
    # A trainer of six GPUs has TP 2, and holds less; all splits have the same data.
    ways = (("--set", "loop.train_gpus=6"), ("--sweep", "loop.train_gpus=4,6"))
    shown = [heddle(*words, *way, *drop).stdout for way in ways]
    assert [json.loads(each)["trace"]["trajectories"] for each in shown] == [46, 46]


def test_a_sample_that_no_gpus_can_train_is_said(heddle: Heddle, tmp_path: Path):
    path = tmp_path / "long.jsonl.gz"
    (first, *_) = synth("search", trajectories=4, samples_per_group=1, seed=1)
    grown = msgspec.structs.replace(first.steps[0], tool_s=1.0, tool_tokens=900_000)
    write_trace(path, [msgspec.structs.replace(first, steps=(grown, first.steps[-1]))])
    found = heddle("loop", str(path), *LACKING, "--model", "llama-3.1-70b")
    assert found.exit_code == 2
    assert "needs more memory in training than any number of h100 GPUs has" in found.output
    assert "take shorter samples, or a smaller model" in found.output
    assert "this runs" not in found.output


def test_one_sample_of_a_prompt_cannot_be_fewer(heddle: Heddle, tmp_path: Path):
    path = str(tmp_path / "single.jsonl.gz")
    write_trace(path, synth("search", trajectories=48, samples_per_group=1, seed=1))
    options = ("--seeds", "1", *CLUSTER, "--regimes", "rollpacker")
    failed = heddle("loop", path, *options)
    assert failed.exit_code == 2
    assert "loop.samples" not in failed.output
    made = re.search(r"`heddle (trace resample) TRACE (\d+) (\d+) -o OUT`", failed.output)
    assert made is not None, failed.output
    more = str(tmp_path / "more.jsonl.gz")
    drawn = heddle(*made[1].split(), path, made[2], made[3], "-o", more)
    assert drawn.exit_code == 0, drawn.output
    done = heddle("loop", more, *options)
    assert done.exit_code == 0, done.output
