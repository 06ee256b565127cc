"""`serve.arrivals`: the parts of a gateway's policy by how its trajectories arrive."""

import json
import signal
from pathlib import Path

import pytest

from heddle.config import PolicyConfig, RunConfig, ServeConfig
from heddle.config_files import ConfigError, resolve, setting
from heddle.gateway.arrivals import PARTS_BY_ARRIVALS, with_arrivals
from heddle.policies.plugins import load_policy
from heddle.runs import load_run
from tests.app.gateways import gateway
from tests.app.journals import Heddle
from tests.core.policy_fakes import policy_context


def config(arrivals: str, policy: str = "heddle") -> RunConfig:
    serve = ServeConfig(arrivals=arrivals)
    return RunConfig(trace="gateway", policy=PolicyConfig(preset=policy), serve=serve)


@pytest.mark.parametrize(
    ("arrivals", "scheduler", "migration"),
    [
        ("auto", "ByArrivals", "BalanceBatches"),
        ("batch", "LongestTotal", "Balance"),
        ("open", "ShortestAged", "Never"),
    ],
)
def test_each_kind_of_arrivals_has_its_order_and_its_migration(
    arrivals: str, scheduler: str, migration: str
):
    preset = with_arrivals(config(arrivals)).policy.preset
    policy = load_policy(preset, policy_context())
    assert type(policy.scheduler).__name__ == scheduler
    assert type(policy.migration).__name__ == migration
    assert type(policy.placement).__name__ == "Presorted"


@pytest.mark.parametrize("policy", ["verl", "heddle+fixed+keep_engines", "heddle+fcfs"])
def test_another_policy_is_taken_as_it_is(policy: str):
    assert with_arrivals(config("auto", policy)).policy.preset == policy
    for arrivals in ("batch", "open"):
        with pytest.raises(ConfigError, match=rf"serve\.arrivals = {arrivals} .* {policy[:6]}"):
            with_arrivals(config(arrivals, policy))


def test_the_key_is_one_of_three_words_in_files_and_settings():
    base = setting("trace=gateway")
    assert resolve([base]).serve.arrivals == "auto"
    for arrivals in PARTS_BY_ARRIVALS:
        assert resolve([base, setting(f"serve.arrivals={arrivals}")]).serve.arrivals == arrivals
    with pytest.raises(ConfigError, match="take one of 'auto', 'batch', 'open'"):
        resolve([base, setting("serve.arrivals=steady")])


@pytest.mark.parametrize("arrivals", ["auto", "open"])
def test_a_gateway_runs_under_these_parts_and_its_run_replays(
    heddle: Heddle, tmp_path: Path, arrivals: str
):
    pytest.importorskip("aiohttp", reason="the gateway needs aiohttp")
    options = (
        "--engine",
        "fake",
        "--set",
        "runtime.time_scale=0.01",
        "--set",
        f"serve.arrivals={arrivals}",
    )
    with gateway(tmp_path, *options) as served:
        for n in range(3):
            body = {"messages": [{"role": "user", "content": f"task {n}"}], "max_tokens": 20}
            answer = served.post("/v1/chat/completions", body, **{"X-Session-ID": f"s{n}"})
            assert answer["usage"]["completion_tokens"] >= 1
            served.post(f"/finish_session?session_id=s{n}")
        summary = served.end(signal.SIGINT)
    run = load_run(tmp_path / summary["run"])
    assert run.config.policy.preset == f"heddle{PARTS_BY_ARRIVALS[arrivals]}"
    kept = json.loads((tmp_path / summary["run"] / "config.resolved.json").read_text())
    assert kept["serve"]["arrivals"] == arrivals
    assert summary["completed"] == 3
    assert "the same" in heddle("replay", tmp_path / summary["run"]).stdout


def test_arrivals_beside_another_policy_end_in_one_message(heddle: Heddle, tmp_path: Path):
    runs = tmp_path / "runs"
    done = heddle("serve", "--policy", "verl", "--set", "serve.arrivals=open", "--out", runs)
    assert done.exit_code != 0
    assert "leave one of them out" in done.output
    assert not runs.exists()
