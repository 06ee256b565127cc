"""Options of 0.1 fail with what took their place; keys that cannot be are one message."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.cli.old_forms import KEYS
from heddle.config import RunConfig
from heddle.config_files import ConfigSource, resolve
from tests.app.journals import Heddle


@pytest.mark.parametrize(("flag", "line"), KEYS.items(), ids=KEYS)
def test_the_key_that_a_message_shows_can_be_set_so(flag: str, line: str):
    values = {"trace": "t", **tomllib.loads(line)}
    beside = {
        "env_timeout_s": {"env_failure_rate": 0.1},
        "env_retries": {"env_failure_rate": 0.1},
        "reward_timeout_s": {"reward_failure_rate": 0.1},
        "reward_retries": {"reward_failure_rate": 0.1},
        "reward_keep_alive_s": {"reward_cold_start_s": 1.0},
        "reward_per_gpu": {"reward_gpus": 1},
        "switch_timeout_s": {"switch_failure_rate": 0.1},
    }
    for key, more in beside.items():
        if key in values.get("loop", {}):
            values["loop"] |= more
    assert isinstance(resolve([ConfigSource(flag, values)]), RunConfig)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("compare", "--pool", "h100:4"),
            "now: write cluster.engines = ",
        ),
        (("loop", "--regimes", "sync", "--train-gpus", "4"), "write loop.train_gpus = VALUE into"),
        (("plan", "--gpus", "2,4"), "to try several, give --sweep cluster.gpus=2,4"),
        (("compare", "--max-running", "best"), "give --sweep cluster.max_running=best"),
        (("run", "--live"), "--live went: agents of others"),
        (
            ("compare", "--waterfall", "f.svg"),
            "--waterfall went: give --sweep policy.parts",
        ),
        (("compare", "--policy", "verl"), "--policy went: give --policies"),
        (("compare", "--objective", "cost"), "write plan.objective = "),
        (
            ("compare", "--tool-capacity", "4"),
            "--set 'cluster.tool_capacity=VALUE'. `heddle config",
        ),
        (("run", "--missing-tool-s", "2"), "write missing.tool_s = VALUE into"),
        (
            ("compare", "--budget-s", "2"),
            "write plan.budget_s = VALUE or diagnose.budget_s = VALUE",
        ),
        (("trace synth", "--reward-s", "2"), "write synth.reward_s = 3"),
        (("plan", "--loop"), "--loop went: give --regimes best"),
        (("serve", "--admin-key", "k"), "--admin-key went: set HEDDLE_ADMIN_KEY"),
        (("serve", "--name", "k"), "write serve.names = "),
        (("profile check", "--profile", "p.json"), "--profile went: it is --model"),
        (("profile measure", "--sweep", "quick"), "write profile.sweep = "),
        (("trace resample", "--groups", "2"), "--groups went: give the numbers after TRACE"),
        (("trace synth", "--steps", "2"), "write synth.batches = 4"),
        (("report", "--perfetto"), "--perfetto went: the name of the file says it"),
        (("simulate",), "`heddle simulate` is no command any more: heddle compare TRACE"),
        (("try",), "`heddle try` is no command any more: heddle compare LOGS"),
        (("calibrate fit",), "`heddle calibrate` is no command any more: heddle profile"),
        (("trace validate",), "`heddle trace validate` is no command any more: heddle trace check"),
        (("predict describe",), "`heddle predict describe` is no command any more"),
        (("compare", "--tp", "1,2"), "to try each, give --sweep cluster.tp=1,2"),
        (("compare", "--set", "cluster.pool=5"), "cluster.pool=5"),
        (("compare", "--set", "cluster.pool=[5]"), "cluster.pool"),
        (("compare", "--sweep", "cluster.tp"), "write KEY=A,B or KEY=best"),
        (("compare", "--sweep", "cluster.gpus=1"), "one of the keys cluster.tp"),
        (("compare", "--sweep", "cluster.tp=1", "--tp", "best"), "cluster.tp is swept twice"),
        (("compare", "--sweep", "cluster.roles=2"), "only best can be tried"),
        (("plan", "--sweep", "cluster.tp=1"), "--sweep cluster.tp has no effect here"),
        (("compare", "-c", "no.toml"), "no.toml: no such file"),
    ],
)
def test_what_cannot_be_is_one_message(
    heddle: Heddle, trace: Path, args: tuple[str, ...], said: str
):
    done = heddle(*args[0].split(), trace, *args[1:])
    assert done.exit_code == 2
    words = " ".join(done.output.replace("\u2502", " ").split())
    assert said in words
    assert "Traceback" not in done.output


def test_a_file_of_the_folder_is_read_unless_another_is_named(
    heddle: Heddle, refused: Callable[..., str], trace: Path
):
    Path("heddle.toml").write_text("[cluster]\ngpus = 1\nmax_running = 7\n")
    Path("other.toml").write_text("[cluster]\ngpus = 2\n")
    command = ("compare", trace, "--policies", "verl", "--json")
    assert '"gpus": 1' in heddle(*command).stdout
    assert '"gpus": 2' in heddle(*command, "-c", "other.toml").stdout
    assert '"gpus": 3' in heddle(*command, "--gpus", 3).stdout
    Path("heddle.toml").write_text("gpus = 1\n")
    assert "heddle.toml: gpus is not a key" in refused(*command)
