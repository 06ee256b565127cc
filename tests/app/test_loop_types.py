"""Loops whose engines and trainer have GPUs of several types."""

import json
from pathlib import Path

import pytest

from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.journals import Heddle

MIXED = """
[cluster]
model = "qwen3-8b"
max_running = 16
[[cluster.engines]]
gpu = "h800"
count = 2
tp = 2
[[cluster.engines]]
gpu = "h20"
gpus = 4
[prices]
h800 = 2.85
h20 = 1.0
l40s = 0.5
[loop]
train_gpu = "h800"
train_gpus = 8
groups = 3
samples = 4
batches = 4
"""


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "search.jsonl.gz"
    write_trace(path, synth("search", trajectories=48, samples_per_group=4, seed=1))
    return str(path)


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    path = tmp_path / "mixed.toml"
    path.write_text(MIXED)
    return str(path)


def test_several_types_generate_and_another_trains(heddle: Heddle, prompts: str, mixed: str):
    said = heddle(
        "loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync,rollart,libra", "--json"
    )
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["cluster"]["gpus"] == 16
    assert found["prices"] == {"h800": 2.85, "h20": 1.0}
    assert "have other types here" in found["left_out"]["libra"]
    sync, _ = found["regimes"]
    assert (sync["train_gpus"], sync["train_gpu"], sync["rollout_gpus"]) == (8, "h800", 8)
    assert [pool["gpus"] for pool in sync["pools"]] == [4, 4]
    hours, dollars = sync["gpu_hours_per_1k_samples"], sync["dollars_per_1k_samples"]
    assert dollars == pytest.approx(hours * (12 * 2.85 + 4 * 1.0) / 16)


def test_training_takes_the_time_of_its_own_type(heddle: Heddle, prompts: str, mixed: str):
    def split(*more: str) -> dict[str, float]:
        said = heddle(
            "loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync", "--json", *more
        )
        assert said.exit_code == 0, said.output
        found: dict[str, float] = json.loads(said.stdout)["regimes"][0]["split_s"]
        return found

    fast, slow = split(), split("--set", "loop.train_gpu=h20")
    # 989 over 148 TFLOP/s, of which H20 reaches 1.6 times as large a share; host time is the same.
    assert 3.0 < slow["training"] / fast["training"] < 989 / 148 / 1.6
    assert slow["rollout"] == pytest.approx(fast["rollout"])


def test_rewards_have_a_type(heddle: Heddle, prompts: str, mixed: str):
    options = ("--set", "loop.reward_gpus=4", "--set", "loop.reward_gpu=l40s")
    said = heddle("loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync", *options)
    assert said.exit_code == 0, said.output
    assert "4 x h800 (derived) + 4 x h20 (derived), h800 beside them to train" in said.stdout
    assert "4 l40s for rewards" in said.stdout
    assert "l40s at $0.50" in said.stdout


def test_splits_and_degrees_are_swept(heddle: Heddle, prompts: str, mixed: str):
    swept = ("--sweep", "loop.train_gpus=8,16", "--tp", "best")
    said = heddle(
        "loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync", *swept, "--json"
    )
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert {row["train_gpus"] for row in found["tried"]} == {8, 16}
    assert len(found["tried"]) == 2 * 9


def test_roles_and_a_trainer_of_another_type(heddle: Heddle, prompts: str, tmp_path: Path):
    path = tmp_path / "roles.toml"
    path.write_text(
        MIXED.replace("count = 2\ntp = 2", 'gpus = 4\nrole = "prefill"').replace(
            'gpu = "h20"\ngpus = 4', 'gpu = "h800"\ngpus = 4\nrole = "decode"'
        )
    )
    said = heddle("loop", prompts, "--seeds", "1", "-c", str(path), "--regimes", "sync", "--json")
    assert said.exit_code == 0, said.output
    (row,) = json.loads(said.stdout)["regimes"]
    assert (row["rollout_gpus"], row["train_gpus"]) == (8, 8)


def test_a_loop_of_several_types_is_replayed(heddle: Heddle, prompts: str, mixed: str):
    done = heddle(
        "loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync", "--out", "runs"
    )
    assert done.exit_code == 0, done.output
    (run,) = Path("runs").iterdir()
    assert ": the same" in heddle("replay", str(run)).output


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ('loop.train_gpu="h900"', "no such GPU type; known: a100"),
        ("loop.colocated=true", "leave one of the two out"),
        ('loop.reward_gpu="l40s"', "give loop.reward_gpus and loop.train_gpu, or leave it out"),
    ],
)
def test_types_that_cannot_be_are_refused(
    heddle: Heddle, prompts: str, mixed: str, option: str, said: str
):
    shown = heddle(
        "loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync", "--set", option
    )
    assert shown.exit_code == 2, shown.output
    assert said in " ".join(shown.output.split())


def test_several_types_need_that_of_the_trainer(heddle: Heddle, prompts: str, mixed: str):
    Path(mixed).write_text(MIXED.replace('train_gpu = "h800"\n', ""))
    shown = heddle("loop", prompts, "--seeds", "1", "-c", mixed, "--regimes", "sync")
    assert shown.exit_code == 2
    assert "give loop.train_gpu" in shown.output
