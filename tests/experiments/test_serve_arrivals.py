"""The experiment of `serve.arrivals`: its smallest cells, and its table."""

import json
import tomllib
from typing import Any

import pytest

from experiments.harness.experiment import EXPERIMENTS, MEASURED
from experiments.serve_arrivals.run import KINDS, SHOWN, preset_of, results, simulated

FOLDER = EXPERIMENTS / "serve_arrivals"
CONFIG = tomllib.loads((FOLDER / "config.toml").read_text(encoding="utf-8"))


def cell(kind: str, policy: str) -> Any:
    """One seed of the trace that is part of the source."""
    trace = next(each for each in CONFIG["traces"] if each["name"] == "coding-512")
    return simulated(
        {
            "trace": trace,
            "cluster": CONFIG["cluster"],
            "kind": kind,
            "burst_s": CONFIG["burst_s"],
            "policy": preset_of(policy),
            "seeds": 1,
        }
    )


def test_a_burst_under_auto_is_that_of_the_policy_for_rollouts():
    auto = cell("burst", "auto")
    assert auto == cell("burst", "batch")
    assert auto["makespan_s"][0] < cell("burst", "sticky_least_loaded")["makespan_s"][0]


def test_open_arrivals_take_less_time_under_auto_than_under_sticky_routing_or_rollouts_policy():
    mean_s = {policy: cell("heavy", policy)["mean_s"][0] for policy in ("auto", "verl", "batch")}
    assert mean_s["auto"] < min(mean_s["verl"], mean_s["batch"])
    assert cell("heavy", "auto")["mean_s"] == [mean_s["auto"]]


def test_the_table_has_what_was_measured_of_every_cell():
    kept = json.loads((FOLDER / MEASURED).read_text(encoding="utf-8"))
    text = results(kept["data"])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(CONFIG["traces"]) * len(KINDS) * len(SHOWN)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_is_nowhere_worse_than_sticky_routing_beyond_the_interval(kind: str):
    kept = json.loads((FOLDER / MEASURED).read_text(encoding="utf-8"))
    for trace, kinds in kept["data"]["cells"].items():
        for other, ratio in kinds[kind]["auto"]["over"].items():
            assert ratio["n"] == CONFIG["seeds"]
            assert ratio["low"] <= 1.0, f"{trace}, {kind}: slower than {other}"
