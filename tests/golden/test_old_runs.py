"""Run directories that version 0.1.0 wrote are read, measured and replayed by this version."""

from pathlib import Path

import msgspec
import pytest

from heddle import load_run
from heddle.runs.compatibility import PRESETS_VERSION, upgraded_policy, upgraded_problem
from heddle.runs.replay import replay
from heddle.runs.shape_keys import from_plain, to_plain
from heddle_core.ids import EngineShape
from heddle_core.solve.tail import TailProblem

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "runs-0.1"
NAMES = sorted(path.name for path in RUNS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_replays_the_same(name: str) -> None:
    result = replay(load_run(RUNS / name))
    assert result.divergence is None
    assert result.entries > 100


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_has_its_figures_and_context(name: str) -> None:
    run = load_run(RUNS / name)
    assert run.summary["makespan_s"] > 0
    assert run.steps.num_rows > 0
    assert run.context is not None


def test_a_preset_of_an_old_run_is_replayed_with_the_parts_that_it_had() -> None:
    old = "heddle-paper+served+presorted_by_size+follow_rank+anneal_by_size"
    assert upgraded_policy("heddle-paper", 1) == old
    assert upgraded_policy("heddle-paper+oracle", 1) == f"{old}+oracle"
    without_migration = "heddle-paper+served+presorted_by_size+anneal_by_size+never"
    assert upgraded_policy("heddle-paper+never", 1) == without_migration
    assert upgraded_policy("heddle-paper", 2) == old
    assert upgraded_policy("heddle-paper+never", 3) == "heddle-paper+never"
    assert upgraded_policy("heddle", 1) == "heddle+headroom+portfolio+keep_engines"
    assert upgraded_policy("heddle+never", 2) == "heddle+fitting+never"
    assert upgraded_policy("heddle+headroom", 2) == "heddle+headroom"
    assert upgraded_policy("verl+lpt", 1) == "verl+lpt"


def test_an_old_problem_of_the_tail_is_read() -> None:
    cost = {"t0_s": 1.0, "t1_s": 0.1, "t2_s": 0.0, "prefill_s": 0.0, "kv_capacity_tokens": 9}
    path, value = upgraded_problem(
        "heddle_core.consolidate.tail_problem:TailProblem",
        {
            "engines": [{"engine": "e0", "tp": 2, "gpu": "h100", "max_running": 4}],
            "trajectories": ["a"],
            "homes": [0],
            "output_tokens": [5.0],
            "context_tokens": [7.0],
            "appended_per_output": [0.0],
            "tool_s_per_output": [0.0],
            "by_tp": {"2": cost},
            "start_s": 1.0,
            "min_gain_s": 1.0,
            "margin": 0.1,
            "charged_s": 0.2,
        },
    )
    assert path == f"{TailProblem.__module__}:{TailProblem.__qualname__}"
    shape = EngineShape("h100", 2)
    problem = msgspec.convert(from_plain(value), TailProblem, dec_hook=lambda cls, text: cls(text))
    assert problem.engines[0].shape == shape
    assert problem.by_shape[shape].kv_capacity_tokens == 9
    assert problem.solve().engines == problem.engines
    again = msgspec.convert(
        from_plain(to_plain(problem)), TailProblem, dec_hook=lambda cls, text: cls(text)
    )
    assert again == problem


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("heddle", "heddle+headroom+portfolio+keep_engines"),
        ("heddle+consolidate+never", "heddle+headroom+portfolio+consolidate+never"),
        ("heddle-no-plan", "heddle-no-plan+headroom"),
        ("heddle-no-priority", "heddle-no-priority+fitting+portfolio+keep_engines"),
        ("verl+lpt", "verl+lpt"),
    ],
)
def test_a_policy_of_an_old_run_has_the_parts_of_then(name: str, before: str) -> None:
    assert upgraded_policy(name, 1) == before
    assert upgraded_policy(name, PRESETS_VERSION) == name


def test_there_are_old_runs() -> None:
    assert NAMES == ["heddle", "heddle-paper", "verl"]
