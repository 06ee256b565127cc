"""Running steps that KV decides: `+adaptive` and `--max-running auto`."""

import json
from pathlib import Path

import pytest

from heddle.config_files import ConfigError, ConfigSource, resolve
from heddle.policies.plugins import load_policy
from heddle_core.parts.admission import ReserveOutput
from heddle_core.parts.scheduler import LongestTotal, ProbesFirst, ProgramFcfs
from heddle_trace import synth, write_trace
from heddle_trace.table import Records
from tests.app.conftest import Heddle
from tests.core.ledgers import policy_context

CLUSTER = ("--model", "qwen3-14b", "--gpu", "h100", "--gpus", "1", "--over-capacity", "drop")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More contexts than the KV of one GPU holds."""
    path = tmp_path_factory.mktemp("adaptive") / "search.jsonl.gz"
    write_trace(path, Records.of(synth("search", 192, 3, 8)))
    return path


def makespans(heddle: Heddle, trace: Path, *words: str) -> dict[str, float]:
    done = heddle("compare", str(trace), *CLUSTER, "--seeds", "1", "--json", *words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["policies"]
    return {row["policy"]: row["makespan_s"]["mean"] for row in rows}


@pytest.mark.parametrize(
    ("name", "order"),
    [("verl", ProgramFcfs), ("seer", ProbesFirst), ("heddle", LongestTotal)],
)
def test_an_order_of_its_own_stays(name: str, order: type) -> None:
    policy = load_policy(f"{name}+adaptive", policy_context())
    assert isinstance(policy.scheduler, order)
    assert isinstance(policy.admission, ReserveOutput)


def test_auto_runs_every_policy_as_its_adaptive_form(heddle: Heddle, trace: Path) -> None:
    auto = makespans(heddle, trace, "--policies", "verl,seer", "--max-running", "auto")
    own = makespans(
        heddle, trace, "--policies", "verl+adaptive,seer+adaptive", "--max-running", "256"
    )
    assert auto == own


def test_where_kv_is_short_it_beats_any_number(heddle: Heddle, trace: Path) -> None:
    numbers = [
        makespans(heddle, trace, "--policies", "verl", "--max-running", str(n))["verl"]
        for n in (16, 64, 256)
    ]
    auto = makespans(heddle, trace, "--policies", "verl", "--max-running", "auto")
    assert auto["verl+adaptive"] < 0.98 * min(numbers)


def test_a_file_takes_it_too_and_no_other_word() -> None:
    values = {"trace": "t", "cluster": {"max_running": "auto"}}
    config = resolve([ConfigSource("heddle.toml", values)])
    assert (config.cluster.running, config.cluster.max_running) == ("auto", 256)
    with pytest.raises(ConfigError, match=r"heddle.toml.*cluster.max_running"):
        resolve([ConfigSource("heddle.toml", {"trace": "t", "cluster": {"max_running": "many"}})])


def test_a_recommendation_says_auto(heddle: Heddle, trace: Path) -> None:
    done = heddle(
        *("compare", str(trace), *CLUSTER, "--seeds", "1", "--json"),
        *("--policies", "verl,prime-rl", "--max-running", "auto"),
    )
    found = json.loads(done.stdout)
    command = found["recommended"]["command"]
    assert command[command.index("--max-running") + 1] == "auto"
    # The name is that of what is exported.
    name = found["recommended"]["policy"]
    assert name in ("verl+adaptive", "prime-rl+adaptive")
    assert name in [row["policy"] for row in found["policies"]]
    assert f"Run {name} with" in found["verdict"]
    assert f"policy {name}" in found["recommended"]["export"]["skyrl"]
