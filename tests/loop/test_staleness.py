"""Staleness in closed form: the source's own figures, and beside simulated loops."""

from pathlib import Path

import pytest

from heddle.loops.comparison import compare_regimes
from heddle.loops.setup import prepare_loop
from heddle.loops.staleness import MARGIN, Ages, StalenessFigures, closed_form, reasons
from heddle.setup import Workspace
from heddle_core.loop.regime import Batching, Regime, Staleness, Update
from tests.loop.test_simulation import config
from tests.loop.test_simulation import trace as trace

AGES = Ages(generating=0.0, queued=0.0)


def figures(**changes: float | Ages) -> StalenessFigures:
    usual = {"in_flight": 120.0, "held": 0.5, "waits": 0.5, "made": 1.0, "tail": 1.42}
    return StalenessFigures(**{"simulated": AGES, "phase": 0.5, "tail_s": 1.42} | usual | changes)


@pytest.mark.parametrize(
    ("concurrency", "batch", "queue", "rho", "tail", "published"),
    [
        (120, 240, 2, 0.63, 1.42, 1.34),
        (240, 120, 2, 0.92, 1.43, 3.86),
        (128, 128, 2, 1.07, 1.44, 3.29),
        (128, 128, 1, 1.14, 1.45, 2.24),
    ],
)
def test_it_is_the_closed_form_of_its_source(
    concurrency: int, batch: int, queue: int, rho: float, tail: float, published: float
):
    groups = batch // 8
    regime = Regime(
        groups,
        8,
        staleness=Staleness(counted_by="nothing", late="train", max_concurrent=concurrency),
        batching=Batching(most_complete=queue * groups),
        update=Update(mode="in_flight"),
    )
    run = figures(
        in_flight=concurrency,
        held=min(1.0, rho),
        waits=max(0.0, 1.0 - rho),
        made=max(1.0, rho),
        tail=tail,
    )
    # Its utilisation and tail are rounded.
    assert closed_form(regime, run).mean == pytest.approx(published, abs=0.09)


@pytest.mark.parametrize(
    ("name", "most"), [("sync", 0.0), ("one-step-off", 0.0), ("areal", 0.6), ("heddle-loop", 0.9)]
)
def test_it_is_near_a_simulated_loop_up_to_starts_that_come_with_updates(
    trace: str, name: str, most: float
):
    (row,) = compare_regimes([config(trace, name, batches=20, repeat=True)]).regimes
    (run,) = row.runs
    regime, own = row.setup.regime, run.ages.simulated
    measured = run.batches[run.first_measured :]
    trained = sum(batch.trajectories for batch in measured)
    mean = sum(batch.mean_staleness * batch.trajectories for batch in measured) / trained
    assert own.mean == pytest.approx(mean)
    assert row.mean_staleness == pytest.approx(mean)
    assert min(own.generating, own.queued) >= 0.0
    closed = closed_form(regime, run.ages).mean
    assert abs(closed - own.mean) <= most
    assert bool(row.staleness_reasons) == (abs(closed - own.mean) > MARGIN)


@pytest.mark.parametrize(("name", "slower"), [("sync", False), ("one-step-off", True)])
def test_training_beside_generation_is_slower_by_a_factor(trace: str, name: str, slower: bool):
    plain, overlapped = (
        prepare_loop(config(trace, name, train_overlap=factor), name, workspace=Workspace())
        for factor in (1.0, 2.0)
    )
    seconds = [setup.world.train_s([4_000] * 16, False) for setup in (plain, overlapped)]
    # Of forward passes and collectives too, as the source has them in its time.
    assert seconds[1] == pytest.approx((2.0 if slower else 1.0) * seconds[0])


def test_a_difference_has_its_reasons():
    drops = Staleness(bound=4.0, late="drop")
    regime = Regime(10, 10, staleness=drops, update=Update(mode="interrupt"))
    far = figures(in_flight=200.0, made=1.3, phase=0.0, tail_s=2.0)
    assert [text.split()[0] for text in reasons(regime, far, batches=4)] == [
        "1.30",
        "4",
        "groups",
        "a",
        "complete",
        "-3.50",
    ]
    near = figures(in_flight=200.0, simulated=closed_form(regime, far))
    assert reasons(regime, near, batches=100) == []


def test_the_page_states_the_margin():
    page = Path(__file__).parents[2] / "docs" / "loop.md"
    assert f"over {MARGIN:g} versions" in page.read_text()
