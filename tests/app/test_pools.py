"""Pools of tools and injected latency as a user gives them: options, TOML, every verb."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.runs import load_run
from tests.app.journals import ONE_RUN, Heddle, last_run

SIMULATED = ("--gpus", "2", "--set", "missing.tool_tokens=zero", "--json")


def tool_s(run: Path) -> list[float]:
    """Seconds from each call to its result, in order of trajectory and step."""
    steps = load_run(run).steps.to_pandas().sort_values(["trajectory", "step"])
    return [float(s) for s in steps[steps["tool"].notna()]["tool_s"]]


def simulated(heddle: Heddle, trace: object, *options: str) -> Path:
    shown = heddle(*ONE_RUN, trace, *SIMULATED, *options)
    assert shown.exit_code == 0, shown.output
    return last_run()


def test_latency_is_added_to_every_call(heddle: Heddle, trace: Path):
    plain = tool_s(simulated(heddle, trace))
    later = tool_s(simulated(heddle, trace, "--set", "cluster.env_latency=3"))
    assert later == pytest.approx([s + 3.0 for s in plain])
    spread = tool_s(simulated(heddle, trace, "--set", "cluster.env_latency=3,1"))
    added = [b - a for a, b in zip(plain, spread, strict=True)]
    assert len({round(s, 6) for s in added}) == len(added)


def test_a_pool_makes_calls_wait(heddle: Heddle, trace: Path):
    plain = tool_s(simulated(heddle, trace))
    queued = tool_s(simulated(heddle, trace, "--set", 'cluster.tool_pools=["bash=1"]'))
    assert sum(queued) > sum(plain)
    assert min(b - a for a, b in zip(plain, queued, strict=True)) > -1e-9
    wide = tool_s(simulated(heddle, trace, "--set", 'cluster.tool_pools=["bash=100"]'))
    assert wide == pytest.approx(plain)


def test_toml_and_options_give_the_same_run(heddle: Heddle, trace: Path, tmp_path: Path):
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'trace = "{trace}"\n[cluster]\ngpus = 2\nenv_latency = "1,0.5"\n'
        'tool_pools = ["bash=elastic:cold=2:keep=1"]\n[missing]\ntool_tokens = "zero"\n'
    )
    pool = ("--set", 'cluster.tool_pools=["bash=elastic:cold=2:keep=1"]')
    given = simulated(heddle, trace, "--set", "cluster.env_latency=1,0.5", *pool)
    shown = heddle(*ONE_RUN, "-c", toml, "--json", "--out", "other")
    assert shown.exit_code == 0, shown.output
    other = last_run("other")
    assert tool_s(other) == tool_s(given)
    assert load_run(other).config.cluster.tool_pools == ("bash=elastic:cold=2:keep=1",)


def test_real_clocks_have_the_same_pools(heddle: Heddle, trace: Path):
    here = simulated(
        heddle, trace, "--set", "cluster.env_latency=0.2,0.1", "--set", "missing.cap_tool_s=0.01"
    )
    shown = heddle(
        "run",
        trace,
        *(
            "--engines",
            "2",
            "--set",
            "missing.tool_tokens=zero",
            "--set",
            "cluster.env_latency=0.2,0.1",
        ),
        *("--set", "missing.cap_tool_s=0.01", "--out", "real"),
    )
    assert shown.exit_code == 0, shown.output
    (there,) = Path("real").iterdir()
    assert tool_s(there) == pytest.approx(tool_s(here), abs=0.5)
    assert min(tool_s(there)) >= min(tool_s(here)) - 1e-3


def test_a_comparison_shares_draws_and_its_bound_holds(heddle: Heddle, trace: Path):
    options = ("--gpus", "2", "--set", "missing.tool_tokens=zero", "--json")
    shown = heddle(
        *("compare", trace, "--policies", "verl,heddle", *options),
        *(
            "--set",
            'cluster.tool_pools=["bash=2"]',
            "--set",
            "cluster.tool_capacity=1",
            "--set",
            "cluster.env_latency=2,1",
        ),
    )
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert all(0.0 < p["bound_fraction"] <= 1.0 for p in found["policies"])
    assert found["bound"].get("tools_s", 0.0) == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--set", 'cluster.tool_pools=["bsh=2"]'),
            "no such tool; did you mean 'bash'? It has 'bash'",
        ),
        (("--set", 'cluster.tool_pools=["bash=0"]'), "capacity must be 1 or more"),
        (("--set", 'cluster.tool_pools=["bash=-3"]'), "capacity must be 1 or more"),
        (("--set", 'cluster.tool_pools=["bash=elastic:cold=-1"]'), "from 0 to below 1e9"),
        (("--set", 'cluster.tool_pools=["bash=2:keep=3"]'), "write elastic, or leave them out"),
        (("--set", "cluster.env_latency=-1"), "from 0 to below 1e9"),
        (("--set", "cluster.env_latency=fast"), "write seconds, as 2; MEAN,SIGMA"),
        (("--set", "cluster.tool_pools=['bash']"), "TOOL=CAPACITY"),
    ],
)
def test_bad_pools_are_one_message(
    refused: Callable[..., str], trace: Path, options: tuple[str, str], said: str
):
    assert said in refused(*ONE_RUN, trace, *SIMULATED, *options)
