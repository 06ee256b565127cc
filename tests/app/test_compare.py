"""Comparisons: the JSON object, its arithmetic, and that equal seeds give equal bytes."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import MissingConfig, RunConfig
from heddle.config_files import ConfigError
from heddle.runs import load_run
from heddle.setup import prepare
from heddle.simulation import simulate
from heddle.workload import CapacityError

COMMAND = (sys.executable, "-m", "heddle.cli", "compare", "--json", "--max-running", "2")
RUN = {
    "policy",
    "seed",
    "makespan_s",
    "throughput_tok_s",
    "queueing_p99_s",
    "tpot_mean_ms",
    "prefix_hit",
    "utilisation",
    "migrations",
    "preemptions",
    "gpu_hours",
    "dollars",
    "late_share",
    "wall_s",
    "run",
}


def without_wall(plain: dict[str, Any]) -> str:
    runs = [{k: v for k, v in r.items() if k not in ("wall_s", "run")} for r in plain["runs"]]
    return json.dumps({**plain, "runs": runs}, allow_nan=False)


def test_the_object_has_its_documented_fields(config: RunConfig, tmp_path: Path):
    plain = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "runs").plain()
    assert plain["schema"] == "heddle.compare/2"
    assert {"name", "trajectories", "output_tokens", "sha256"} <= plain["trace"].keys()
    assert {"gpus", "gpu", "model", "profile"} <= plain["cluster"].keys()
    assert plain["bound"].keys() == {"makespan_s", "solo_s", "capacity_s"}
    assert [(r["policy"], r["seed"]) for r in plain["runs"]] == [
        ("verl", 0),
        ("verl", 1),
        ("slime", 0),
        ("slime", 1),
    ]
    assert all(r.keys() == RUN for r in plain["runs"])
    assert [p["policy"] for p in plain["policies"]] == ["verl", "slime"]
    # 6 trajectories; group g has g + 2 steps of 40 + 17 g + 5 i + sample tokens.
    tokens = sum(40 + 17 * g + 5 * i + s for g in range(3) for s in range(2) for i in range(g + 2))
    assert (plain["trace"]["trajectories"], plain["trace"]["output_tokens"]) == (6, tokens)


def test_means_intervals_speedup_and_bound_fraction_follow_from_the_runs(
    config: RunConfig, tmp_path: Path
):
    plain = compare(config, ["verl", "slime"], seeds=3, out=tmp_path / "runs").plain()
    runs = [[r for r in plain["runs"] if r["policy"] == p] for p in ("verl", "slime")]
    first = None
    for mine, policy in zip(runs, plain["policies"], strict=True):
        for key in ("makespan_s", "throughput_tok_s"):
            values = [r[key] for r in mine]
            mean = sum(values) / 3
            spread = (sum((v - mean) ** 2 for v in values) / 2 / 3) ** 0.5
            assert policy[key]["mean"] == pytest.approx(mean)
            # Student's t for 2 degrees of freedom, 97.5 %.
            half = policy[key]["ci95"]
            assert half == pytest.approx(4.302652729749464 * spread, abs=1e-9)
            low, high = policy[key]["low"], policy[key]["high"]
            if key == "makespan_s":
                # Three groups tell of no tail: Student's t for one more value, of logarithms.
                logs = [math.log(v) for v in values]
                more = 4.302652729749464 * stdev(logs) * (1 + 1 / 3) ** 0.5
                assert low == pytest.approx(min(mean, math.exp(fmean(logs) - more)))
                assert high == pytest.approx(max(mean, math.exp(fmean(logs) + more)))
                continue
            # The interval of the logarithm, whose standard error is that of the mean over the mean.
            assert low == pytest.approx(mean * math.exp(-half / mean))
            assert high == pytest.approx(mean * math.exp(half / mean))
        first = policy["throughput_tok_s"]["mean"] if first is None else first
        assert policy["speedup"] == policy["throughput_tok_s"]["mean"] / first
        assert policy["bound_fraction"] == pytest.approx(
            plain["bound"]["makespan_s"] / policy["makespan_s"]["mean"]
        )
    assert all(r["makespan_s"] >= plain["bound"]["makespan_s"] for r in plain["runs"])


def test_one_seed_has_no_spread(config: RunConfig, tmp_path: Path):
    found = compare(config, ["verl"], out=tmp_path / "runs")
    (policy,) = found.plain()["policies"]
    only = policy["makespan_s"]
    assert only["ci95"] is only["low"] is only["high"] is None
    assert policy["throughput_tok_s"]["low"] is None
    assert "s (one run has no interval)" in found.verdict


def test_any_number_of_processes_gives_the_same(config: RunConfig, tmp_path: Path):
    one = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "runs", jobs=1)
    two = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "runs", jobs=2)
    assert without_wall(one.plain()) == without_wall(two.plain())
    paths = [run.path for run in (*one.runs, *two.runs)]
    assert len(set(paths)) == 8
    assert all(load_run(path).status == "finished" for path in paths)


def test_hash_seeds_change_nothing(trace: Path, tmp_path: Path):
    outs = []
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [*COMMAND, trace, "--policies", "verl,slime-2026,verl-star", "--gpus", "2"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr.startswith("Warning: 6 trajectories for 2 engines")
        assert len(done.stderr.splitlines()) == 1
        outs.append(without_wall(json.loads(done.stdout)))
    assert outs[0] == outs[1]


def test_a_seed_means_the_same_alone_and_in_a_comparison(config: RunConfig, tmp_path: Path):
    compared = compare(config, ["verl"], seeds=2, out=tmp_path / "runs").runs[1]
    alone = simulate(replace(config, seed=1), out=tmp_path / "runs")
    assert alone.summary == compared.summary


def test_filled_values_are_counted_and_bounded_over_all_seeds(trace: Path, tmp_path: Path):
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    for line in lines[::2]:
        line["steps"][0]["tool_s"] = None
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig(
        trace=str(trace), missing=MissingConfig(tool_s="sample"), cluster=ClusterConfig(gpus=1)
    )
    plain = compare(config, ["verl"], seeds=4, out=tmp_path / "runs").plain()
    assert plain["trace"]["filled_tool_s"] == 3
    summary = load_run(plain["runs"][0]["run"]).summary
    assert (summary["filled_tool_s"], summary["filled_tool_tokens"]) == (3, 0)
    lowest = min(prepare(replace(config, seed=s)).bound().makespan_s for s in range(4))
    assert plain["bound"]["makespan_s"] == lowest


@pytest.mark.parametrize(
    ("policies", "more", "said"),
    [
        ([], {}, "no policy is named"),
        (["verl", "verl"], {}, "named twice"),
        (["verl"], {"seeds": 0}, "seeds must be from 1"),
        (["verl"], {"jobs": 0}, "jobs must be 1 or more"),
    ],
)
def test_absurd_requests_are_refused(
    config: RunConfig, tmp_path: Path, policies: list[str], more: dict[str, int], said: str
):
    with pytest.raises(ConfigError, match=said):
        compare(config, policies, out=tmp_path / "runs", **more)
    assert not (tmp_path / "runs").exists()


def test_a_policy_that_auto_makes_another_one_is_named_twice(config: RunConfig):
    adaptive = replace(config, cluster=replace(config.cluster, adaptive=True))
    with pytest.raises(ConfigError, match=r"'verl\+adaptive' is named twice.*auto adds"):
        compare(adaptive, ["verl", "verl+adaptive"])


def test_a_context_over_capacity_is_refused_or_left_out(trace: Path, tmp_path: Path):
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    lines[2]["prompt_tokens"] = 900_000
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cluster = ClusterConfig(gpus=8)
    config = RunConfig(trace=str(trace), cluster=cluster)
    with pytest.raises(CapacityError) as error:
        simulate(config, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    said = str(error.value)
    for part in ("'g1/0'", "900,", "1 of 6", "TP 1 holds", "--tp", "cluster.over_capacity=drop"):
        assert part in said
    dropping = replace(config, cluster=replace(cluster, over_capacity="drop"))
    result = simulate(dropping, out=tmp_path / "runs")
    assert (result.summary["arrived"], result.summary["dropped_over_capacity"]) == (5, 1)


def test_dropping_everything_is_refused(trace: Path, tmp_path: Path):
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    trace.write_text("".join(json.dumps({**x, "prompt_tokens": 9_000_000}) + "\n" for x in lines))
    config = RunConfig(trace=str(trace), cluster=ClusterConfig(gpus=8, over_capacity="drop"))
    with pytest.raises(CapacityError, match="6 of 6"):
        simulate(config, out=tmp_path / "runs")
