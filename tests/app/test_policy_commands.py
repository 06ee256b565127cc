"""A policy of one's own: a new file, its checks, and errors with the line that made them."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from docs import policy_attributes
from heddle.config import RunConfig
from heddle.policies.check import CallTime, check_policy
from heddle.policies.template import policy_source
from tests.app.journals import ONE_RUN, Heddle

CLUSTER = ("--gpus", "2", "--max-running", "2")
HEAD = """
import random, time
from dataclasses import replace
from heddle_core.bases import PlacementBase, SchedulerBase
from heddle_core.presets import verl
class Own(PlacementBase):
    def place(self, t, view):
        BODY
def policy(context):
    return replace(verl(context), placement=Own())
"""


@pytest.fixture(autouse=True)
def _path_and_modules_as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("own_"):
            del sys.modules[name]


def written(name: str, body: str) -> str:
    Path(f"{name}.py").write_text(HEAD.replace("BODY", body))
    return f"{name}:policy"


def test_a_new_policy_is_used_and_checked_as_it_is(heddle: Heddle, trace: Path):
    done = heddle("policies", "new", "own_new")
    assert done.exit_code == 0, done.output
    compared = heddle("compare", trace, "--policies", "verl,own_new:policy", *CLUSTER, "--json")
    assert compared.exit_code == 0, compared.output
    checked = heddle(
        "policies", "check", "own_new:policy", trace, "--set", "cluster.gpus=2", "--json"
    )
    found = json.loads(checked.stdout)
    assert checked.exit_code == 0, checked.output
    assert found["passed"]
    assert (found["trajectories"], found["impure"]) == (6, [])
    calls = {time["method"]: time["calls"] for time in found["times"]}
    # A placement and a priority for each of the 18 steps.
    assert calls["placement.place"] == calls["scheduler.priority"] == 18


def test_a_new_policy_replaces_nothing(heddle: Heddle, refused: Callable[..., str]):
    heddle("policies", "new", "own_new")
    assert "exists" in refused("policies", "new", "own_new")
    assert "is no name of a Python module" in refused("policies", "new", "own-new")
    assert "an installed module has this name" in refused("policies", "new", "json")
    assert not Path("json.py").exists()


def test_the_source_of_a_new_policy_has_its_name():
    source = policy_source("most_tokens")
    assert "class MostTokensPlacement(PlacementBase)" in source
    assert "most_tokens:policy" in source


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("own_clock", "time.time(); return view.engines[0].id", "in place: time.time"),
        ("own_file", "open(__file__).close(); return view.engines[0].id", "in place: open "),
        (
            "own_chance",
            "return random.choice([e.id for e in view.engines])",
            "in place: random.choice",
        ),
    ],
)
def test_a_check_finds_clocks_files_and_chance(
    heddle: Heddle, config: RunConfig, name: str, body: str, said: str
):
    found = check_policy(written(name, body), config)
    assert not found.passed
    assert len(found.impure) == 1
    assert found.impure[0].startswith(f"{name}.py:8: {said}")


def test_a_check_finds_state_that_outlives_a_run(heddle: Heddle, config: RunConfig):
    name = written("own_state", "SEEN.append(t); return view.engines[len(SEEN) % 7 % 2].id")
    Path("own_state.py").write_text(Path("own_state.py").read_text() + "SEEN = []\n")
    found = check_policy(name, config)
    assert found.impure == ()
    assert found.differs is not None
    assert "Dispatch" in found.differs


def test_a_check_finds_hashes_of_text(heddle: Heddle, trace: Path):
    body = "return view.engines[hash(f'{t.id} {t.step}') % len(view.engines)].id"
    done = heddle("policies", "check", written("own_hash", body), trace, "--set", "cluster.gpus=8")
    assert done.exit_code == 1
    assert "ok     two runs in one process" in done.stdout
    assert "FAILED replay in another process: entry " in done.stdout


def test_a_check_refuses_an_oracle(refused: Callable[..., str], trace: Path):
    assert "check it without an oracle" in refused("policies", "check", "verl+oracle", trace)


def test_a_method_is_slow_above_100_microseconds_unless_it_sees_a_whole_rollout():
    def slow(method: str, mean_us: float) -> bool:
        return CallTime(method=method, calls=1, mean_us=mean_us, worst_us=mean_us).slow

    assert slow("placement.place", 101.0)
    assert not slow("placement.place", 99.0)
    assert not slow("planner.plan", 1e6)


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        (
            "own_typo",
            "return view.engines[t.tokens % 2].id",
            "own_typo.py:8: in place: a trajectory has no 'tokens'. Did you mean",
        ),
        (
            "own_view",
            "return view.engine_list[0].id",
            "own_view.py:8: in place: the view has no 'engine_list'. Did you mean 'engines'?",
        ),
        (
            "own_load",
            "return view.engines[0].load",
            "own_load.py:8: in place: an engine has no 'load'.",
        ),
        ("own_zero", "return 1 // 0", "own_zero.py:8: in place: ZeroDivisionError: "),
    ],
)
def test_an_error_of_a_policy_is_one_message_with_its_line(
    refused: Callable[..., str], trace: Path, name: str, body: str, said: str
):
    message = refused(*ONE_RUN, trace, "--policies", written(name, body), *CLUSTER)
    assert message.startswith(f"Error: {said}")
    assert "prompt_tokens" in message or "trajectory" not in said


def test_the_page_of_attributes_is_that_of_the_code():
    """To mend it: `python docs/policy_attributes.py`."""
    assert policy_attributes.PAGE.read_text(encoding="utf-8") == policy_attributes.page()
