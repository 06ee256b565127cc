"""Run directories that version 0.1.0 wrote are read, measured and replayed by this version."""

from pathlib import Path

import pytest

from heddle import load_run
from heddle.runs.replay import replay_run

RUNS = Path(__file__).resolve().parents[1] / "fixtures" / "runs-0.1"
NAMES = sorted(path.name for path in RUNS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_replays_the_same(name: str) -> None:
    replay = replay_run(load_run(RUNS / name))
    assert replay.divergence is None
    assert replay.entries > 100


@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_has_its_figures_and_context(name: str) -> None:
    run = load_run(RUNS / name)
    assert run.summary["makespan_s"] > 0
    assert run.steps.num_rows > 0
    assert run.setting is not None


def test_there_are_old_runs() -> None:
    assert NAMES == ["heddle", "heddle-paper", "verl"]
