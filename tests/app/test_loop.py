"""`heddle loop` and `heddle regimes` as a user runs them."""

import json
import re
from pathlib import Path

import pytest

from heddle_core.loop.presets import REGIMES
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.journals import Heddle

LOOP_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "loop.md").read_text()

SMALL = (
    *("--model", "qwen3-8b", "--gpus", "8", "--set", "loop.train_gpus=4", "--tp", "2"),
    *(
        "--set",
        "loop.groups=3",
        "--set",
        "loop.samples=4",
        "--set",
        "loop.batches=4",
        "--seeds",
        "1",
    ),
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve prompts with four samples each, short enough for a trainer of four GPUs."""
    path = tmp_path_factory.mktemp("loop") / "search.jsonl.gz"
    write_trace(path, synth("search", trajectories=48, samples_per_group=4, seed=1))
    return str(path)


def test_a_row_for_each_regime(heddle: Heddle, prompts: str):
    shown = heddle("loop", prompts, "--regimes", "sync,areal:max_head_offpolicyness=1", *SMALL)
    assert shown.exit_code == 0, shown.output
    assert "8 x h100, qwen3-8b; policy verl, 100 running" in shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    names = ("sync", "areal:max_head_offpolicyness=1")
    mine = [row for row in rows if row and row[0] in names]
    assert [row[:3] for row in mine[:2]] == [[name, "4", "2"] for name in names]
    table, busy, trained, splits, bars = (mine[at : at + 2] for at in range(0, 10, 2))
    assert [len(row) for row in (*busy, *trained)] == [6] * 4
    for row, split, bar in zip(table, splits, bars, strict=True):
        step_s = float(row[3])
        assert sum(map(float, split[1:])) == pytest.approx(step_s, abs=0.25)
        assert float(bar[2]) == step_s
        assert set(bar[1]) <= set("#-")
        of_bound = bar[1].count("#") / len(bar[1])
        assert of_bound == pytest.approx(float(row[-1]), abs=0.05)
    longest = max(bars, key=lambda bar: float(bar[2]))
    assert len(longest[1]) == 60
    tables = [line for line in shown.output.splitlines() if line.startswith((*names, "regime "))]
    widest = max(len(line) for line in tables if not re.search(r": staleness|#", line))
    assert widest - max(map(len, names)) <= 80


def test_the_two_best_settings_run_under_three_seeds(heddle: Heddle, prompts: str):
    small = [word for word in SMALL if word not in ("--seeds", "1")]
    swept = ("--sweep", "loop.train_gpus=2,4,6", "--regimes", "sync", *small)
    shown = heddle("loop", prompts, *swept, "--json")
    found = json.loads(shown.stdout)
    tried = {row["train_gpus"]: row["step_s"] for row in found["tried"]}
    worst, *two = sorted(tried, key=lambda gpus: -tried[gpus]["mean"])
    assert tried[worst]["ci95"] is None
    assert all(tried[gpus]["ci95"] > 0.0 for gpus in two)
    assert found["regimes"][0]["train_gpus"] == two[-1]
    (three,) = json.loads(
        heddle(
            "loop", prompts, *swept, "--set", f"loop.train_gpus={two[-1]}", "--seeds", "3", "--json"
        ).stdout
    )["regimes"]
    assert three["step_s"] == tried[two[-1]]
    text = heddle("loop", prompts, *swept).output
    assert text.startswith(
        f"Train with sync, {8 - two[-1]} GPUs of rollout at TP 2 and {two[-1]} of"
    )


def test_the_json_contract(heddle: Heddle, prompts: str):
    shown = heddle("loop", prompts, "--regimes", "sync,rollart", "--json", *SMALL)
    found = json.loads(shown.stdout)
    assert found["schema"] == "heddle.loop/1"
    assert found["cluster"]["gpus"] == 8
    sync, rollart = found["regimes"]
    assert (sync["train_gpus"], sync["rollout_gpus"]) == (4, 4)
    still = {"mean": 0.0, "max": 0, "closed_form": 0.0, "reasons": [], "histogram": {"0": 36}}
    assert sync["staleness"] == still
    assert set(rollart) >= {
        "regime",
        "max_running",
        "step_s",
        "samples_per_s",
        "tokens_per_s",
        "gpu_hours_per_1k_samples",
        "dollars_per_1k_samples",
        "busy",
        "staleness",
        "wasted_tokens",
        "length_bias",
        "length_distance",
        "bound_fraction",
    }
    for row in (sync, rollart):
        assert set(row["step_s"]) == {"mean", "ci95"}
        assert set(row["busy"]) == {"rollout", "train", "reward", "environment"}
        assert set(row["staleness"]) == set(still)
        assert set(row["split_s"]) == {"rollout", "reward", "training", "update"}
        assert sum(row["split_s"].values()) == pytest.approx(row["step_s"]["mean"])
        for key in row:
            assert f"`{key}`" in LOOP_PAGE, f"{key} is not in docs/loop.md"
    assert sync["length_distance"] == 0.0
    assert sync["busy"]["reward"] is None
    assert sync["step_s"]["ci95"] is None
    price = sync["dollars_per_1k_samples"] * sync["samples_per_s"] * 3600 / 1000 / 8
    assert price == pytest.approx(2.7)


def test_several_splits_and_seeds(heddle: Heddle, prompts: str):
    options = (*SMALL, "--sweep", "loop.train_gpus=4,6", "--seeds", "2", "--json")
    shown = heddle("loop", prompts, "--regimes", "sync", *options)
    found = json.loads(shown.stdout)
    assert [row["train_gpus"] for row in found["tried"]] == [4, 6]
    means = [row["step_s"]["mean"] for row in found["tried"]]
    assert found["regimes"][0]["step_s"]["mean"] == min(means)
    assert found["regimes"][0]["step_s"]["ci95"] >= 0.0
    best = heddle("loop", prompts, "--regimes", "sync", *SMALL, "--sweep", "loop.train_gpus=best")
    assert best.exit_code == 0, best.output
    assert "* the best" in best.output


def test_failed_starts_are_counted(heddle: Heddle, prompts: str):
    options = (
        "--regimes",
        "sync",
        *SMALL,
        "--set",
        "loop.env_failure_rate=0.3",
        "--set",
        "loop.repeat=true",
        "--json",
    )
    (row,) = json.loads(heddle("loop", prompts, *options).stdout)["regimes"]
    assert row["failed_starts"] > 5


def test_several_degrees_of_engines(heddle: Heddle, prompts: str):
    options = ("--sweep", "loop.train_gpus=4,6", "--json")
    small = [word for word in SMALL if word not in ("--tp", "2")]
    shown = heddle(
        "loop", prompts, "--regimes", "sync", *small, "--sweep", "cluster.tp=1,2", *options
    )
    tried = [(row["train_gpus"], row["tp"]) for row in json.loads(shown.stdout)["tried"]]
    assert tried == [(4, 1), (6, 1), (4, 2), (6, 2)]
    best = heddle(
        "loop",
        prompts,
        "--regimes",
        "sync,areal",
        *small,
        "--set",
        "loop.batches=8",
        "--set",
        "loop.repeat=true",
        "--tp",
        "best",
    )
    assert best.exit_code == 0, best.output
    planned = heddle(
        "loop", prompts, "--regimes", "sync", *small, "--tp", "best", "--policy", "heddle", "--json"
    )
    assert len(json.loads(planned.stdout)["tried"]) == 1


def test_several_numbers_of_running_steps(heddle: Heddle, prompts: str):
    options = (
        "--regimes",
        "sync",
        *SMALL,
        "--sweep",
        "loop.train_gpus=4,6",
        "--sweep",
        "cluster.max_running=4,64",
    )
    shown = heddle("loop", prompts, *options, "--json")
    found = json.loads(shown.stdout)
    tried = {(row["train_gpus"], row["max_running"]): row["step_s"] for row in found["tried"]}
    assert list(tried) == [(4, 4), (4, 64), (6, 4), (6, 64)]
    (best,) = found["regimes"]
    assert best["step_s"] == min(tried.values(), key=lambda step: step["mean"])
    assert best["step_s"] == tried[best["train_gpus"], best["max_running"]]
    # Few places make trajectories wait.
    assert tried[4, 4]["mean"] > tried[4, 64]["mean"]
    table = heddle("loop", prompts, *options).output
    assert "4, 64 running per engine" in table
    assert re.search(r"regime +TP +running +4 train +6 train", table)


def test_a_figure(heddle: Heddle, prompts: str, tmp_path: Path):
    path = tmp_path / "regimes.png"
    shown = heddle(
        "loop", prompts, "--regimes", "sync,april", *SMALL, "--set", f"report.figure={path}"
    )
    assert shown.exit_code == 0, shown.output
    assert path.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.png"
    heddle("loop", prompts, "--regimes", "sync,april", *SMALL, "--set", f"report.figure={again}")
    assert again.read_bytes() == path.read_bytes()
    for name, why in (("regimes.txt", "must be named"), ("missing/x.png", "no such folder")):
        wrong = heddle(
            "loop", prompts, "--regimes", "sync", *SMALL, "--set", f"report.figure={name}"
        )
        assert wrong.exit_code == 2
        assert why in wrong.output


def test_gpus_in_turn(heddle: Heddle, prompts: str):
    shown = heddle(
        "loop", prompts, "--regimes", "sync,april", "--set", "loop.colocated=true", *SMALL
    )
    assert shown.exit_code == 0, shown.output
    assert "rollout and training in turn" in shown.output
    assert "train GPUs" not in shown.output


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--set", "loop.train_gpus=0"), "loop.train_gpus must be 1 or more"),
        (("--sweep", "loop.train_gpus=some"), "as 1,2,4, or best"),
        (("--tp", "some"), "--tp some: write a TP degree"),
        (("--max-running", "0"), "--max-running 0: max_running must be from 1"),
        (("--sweep", "cluster.tp=2,3"), "left for engines of TP 3"),
        (("--set", "loop.train_gpus=8"), "so 0 are left for engines of TP 2"),
        (("--set", "loop.train_gpus=7"), "so 1 are left for engines of TP 2"),
        (
            ("--model", "qwen3-14b", "--set", "loop.train_gpus=2"),
            r"needs .* GiB.* this runs: heddle loop .* loop.train_gpus=\d+",
        ),
        (("--set", "loop.batches=1"), "loop.batches must be from 2"),
        (
            ("--set", "loop.batches=5", "--set", "loop.repeat=false"),
            "5 batches of 3 prompts need 15 prompts .* loop.repeat",
        ),
        (("--set", "loop.groups=0"), "loop.groups must be 1 or more"),
        (("--set", "loop.samples=5"), "starts 5 samples of each prompt, but 12 of 12 prompts"),
        (("--regimes", "rollpacker"), "4 samples of each prompt and 1 beside them"),
        (("--regimes", "tomorrow"), "no regime is named 'tomorrow'; there are sync"),
        (("--regimes", ","), "names no regime"),
        (("--set", "loop.reward_failure_rate=.2", "--set", "loop.batches=1"), "from 2"),
        (("--regimes", "areal", "--set", "loop.colocated=true"), "leave out loop.colocated"),
        (("--set", "loop.env_failure_rate=1"), "below 1"),
        (("--set", "loop.env_capacity=0"), "loop.env_capacity must be 1 or more"),
        (("--set", "loop.reward_capacity=0"), "loop.reward_capacity must be 1 or more"),
        (("--set", "loop.environments=0"), "loop.environments must be 1 or more"),
        (("--set", "loop.reward_s=inf"), "below 1e9"),
        (("--set", "loop.reward_s=-3"), "loop.reward_s: '-3(.0)?': seconds must be from 0"),
        (("--set", "loop.env_start_s=pigeon"), "write seconds, as 2; MEAN,SIGMA"),
        (("--set", "loop.env_timeout_s=3"), "give loop.env_failure_rate, or leave them out"),
        (
            ("--set", "loop.env_retries=-1", "--set", "loop.env_failure_rate=0.1"),
            "loop.env_retries must be from 0 to 1,000",
        ),
        (
            ("--set", "loop.reward_failure_rate=1"),
            "loop.reward_failure_rate must be from 0 to below 1",
        ),
        (
            ("--set", "loop.reward_gpus=2", "--set", "loop.reward_capacity=3"),
            "leave one of the two out",
        ),
        (("--set", "loop.reward_gpus=-1"), "loop.reward_gpus must be 0 or more"),
        (("--set", "loop.reward_gpus=4"), "4 train, 4 compute rewards, so 0 are left"),
        (("--set", "loop.reward_per_gpu=0"), "loop.reward_per_gpu must be 1 or more"),
        (("--set", "loop.reward_per_gpu=3"), "give loop.reward_gpus, or leave it out"),
        (
            ("--set", "loop.reward_capacity=2", "--set", "loop.reward_cold_start_s=1"),
            "are of an elastic reward",
        ),
        (("--set", "loop.reward_keep_alive_s=9"), "give loop.reward_cold_start_s"),
        (
            ("--set", 'cluster.tool_pools=["web_serch=4"]'),
            "no such tool; did you mean 'web_search'",
        ),
        (
            ("--set", 'cluster.tool_pools=["web_search=0"]'),
            "web_search=0'?: capacity must be 1 or more",
        ),
        (("--set", 'cluster.tool_pools=["web_search"]'), "TOOL=CAPACITY"),
        (
            ("--set", 'cluster.tool_pools=["web_search=4:cold=1"]'),
            "write elastic, or leave them out",
        ),
        (("--set", 'cluster.tool_pools=["a=1","a=2"]'), "two pools of the tool 'a'"),
        (("--set", "cluster.tool_capacity=0"), "tool_capacity must be from 1 to"),
        (("--set", "cluster.env_latency=1,2,3"), "env_latency: '1,2,3' is no distribution"),
        (
            ("--set", "prices.h100=-1"),
            "--set prices.h100=-1: prices.h100 must be from 0 to below 100,000",
        ),
        (("--set", "prices.2.1"), "write it as section.key=value"),
        (("--set", "cluster.mix=[4,2,2]"), "engines of one TP degree"),
        (("--policy", "heddle+oracle"), "without an oracle"),
        (("--set", "loop.update_method=colocated"), "what loop.colocated does"),
        (("--regimes", "areal"), "take loop.batches = 7 or more"),
        (("--set", "loop.train_tp=3"), "no trainer of TP 3"),
        (("--set", "loop.train_tp=0"), "loop.train_tp must be 1 or more, not 0"),
        (("--set", "loop.train_pp=-4"), "loop.train_pp must be 1 or more, not -4"),
        (
            ("--set", "loop.train_precision=nvfp4"),
            "in bf16, fp8; this runs: heddle loop .* --gpu b200",
        ),
        (("--set", "loop.colocated_speed=1e-9"), "colocated_speed must be from 0.01 to 1"),
        (
            ("--set", "loop.switch_failure_rate=1"),
            "loop.switch_failure_rate must be from 0 to below 1",
        ),
        (
            ("--set", "loop.switch_failure_rate=0.1"),
            "by turns, which sync has none of: leave it out",
        ),
        (("--set", "loop.switch_timeout_s=9"), "give loop.switch_failure_rate, or leave it out"),
        (("--regimes", "libra:min_gain=1"), "min_gain must be from 0 to below 1, not 1"),
        (("--set", "loop.update_method=pigeon"), "unknown weight update method 'pigeon'"),
        (("--policy", "pigeon"), "no policy is called 'pigeon'"),
    ],
)
def test_bad_input_is_one_message(
    heddle: Heddle, prompts: str, tmp_path: Path, wrong: tuple[str, ...], said: str
):
    options = () if "--regimes" in wrong else ("--regimes", "sync")
    shown = heddle("loop", prompts, *options, *SMALL, *wrong)
    assert shown.exit_code == 2, shown.output
    text = " ".join(shown.output.replace("│", " ").split())
    assert re.search(said, text), text
    assert "Traceback" not in shown.output
    assert not list((tmp_path / "here").iterdir())


def test_regimes_are_listed_with_their_parameters(heddle: Heddle):
    shown = heddle("regimes", "list")
    for name in REGIMES:
        assert f"\n{name} " in f"\n{shown.output}"
    assert ":max_head_offpolicyness=4" in shown.output
    told = json.loads(heddle("regimes", "list", "--json").stdout)
    assert told["areal"]["parameters"]["enforce"] is False
    assert told["sync"]["colocated"] is True


def test_a_short_trace_begins_again_and_it_is_said(heddle: Heddle, prompts: str):
    shown = heddle("loop", prompts, "--regimes", "sync", *SMALL, "--set", "loop.batches=5")
    assert shown.exit_code == 0, shown.output
    assert "5 steps" in shown.output
    assert "the trace begins again after its last prompt" in " ".join(shown.output.split())


def test_failures_after_the_end_are_said(heddle: Heddle, prompts: str):
    late = 'cluster.failures="e0@1,e1@90000"'
    said = r"1 of 1 runs end before e1@90000, the last of them at [\d,]+ s"
    for command in (("loop", "--regimes", "sync", *SMALL), ("compare", "--policies", "verl")):
        name, *options = command
        gpus = () if name == "loop" else ("--model", "qwen3-8b", "--gpus", "2")
        shown = heddle(name, prompts, *options, *gpus, "--set", late, "--json")
        assert shown.exit_code == 0, shown.output
        (warning,) = json.loads(shown.stdout)["warnings"]
        assert re.search(said, warning), warning
        assert f"Warning: {warning}" in " ".join(shown.stderr.split())
        early = heddle(name, prompts, *options, *gpus, "--set", "cluster.failures=e0@1", "--json")
        assert "warnings" not in json.loads(early.stdout)
