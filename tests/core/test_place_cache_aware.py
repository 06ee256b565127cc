import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.parts.placement.cache_aware import CacheAware
from tests.core.policy_fakes import trajectory, view_of


def run_step(placement, t, view, *, context_tokens):
    """Place the step after next with this context, as the controller would."""
    t.home = placement.place(t, view)
    t.step += 1
    t.context_tokens = context_tokens
    return t.home


def test_follows_its_own_prefix_while_the_engines_are_even():
    placement, view = CacheAware(), view_of(0, 5)
    t = trajectory("a", context_tokens=1000)
    run_step(placement, t, view, context_tokens=2000)
    view.known[0].in_flight = 40
    assert placement.place(t, view) == "e0"


@pytest.mark.parametrize(("sent", "expected"), [(301, "e0"), (300, "e1")])
def test_a_match_counts_only_above_the_cache_threshold(sent, expected):
    placement, view = CacheAware(cache_threshold=0.3), view_of(0, 5)
    t = trajectory("a", prompt_tokens=10, context_tokens=sent)
    run_step(placement, t, view, context_tokens=1000)
    view.known[0].in_flight = 10
    assert placement.place(t, view) == expected


@given(
    loads=st.lists(st.integers(0, 200), min_size=2, max_size=6),
    balance_abs=st.integers(0, 80),
    balance_rel=st.floats(1, 3),
)
def test_imbalance_needs_both_thresholds(loads, balance_abs, balance_rel):
    placement = CacheAware(balance_abs=balance_abs, balance_rel=balance_rel)
    view = view_of(*[1] * (len(loads) - 1), 0)
    t = trajectory("a")
    home = run_step(placement, t, view, context_tokens=110)
    for engine, load in zip(view.known, loads, strict=True):
        engine.in_flight = load
    most, fewest = max(loads), min(loads)
    uneven = most - fewest > balance_abs and most > balance_rel * fewest
    assert placement.place(t, view) == (f"e{loads.index(fewest)}" if uneven else home)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [((100, 36), "e0"), ((101, 36), "e1"), ((194, 130), "e0"), ((195, 130), "e0")],
)
def test_defaults_call_it_uneven_above_64_and_above_one_and_a_half(loads, expected):
    placement, view = CacheAware(), view_of(0, 5)
    t = trajectory("a")
    run_step(placement, t, view, context_tokens=110)
    view.known[0].in_flight, view.known[1].in_flight = loads
    assert placement.place(t, view) == expected


def test_a_prefix_sent_to_the_matched_engine_is_recorded_there():
    placement, view = CacheAware(), view_of(0, 5)
    t = trajectory("a", prompt_tokens=10, context_tokens=1000)
    run_step(placement, t, view, context_tokens=3000)
    view.known[0].in_flight = 10
    assert run_step(placement, t, view, context_tokens=9000) == "e0"  # 1,000 of 3,000 known
    assert placement.place(t, view) == "e0"  # 3,000 of 9,000: not if only the first were known


def test_a_prompt_sent_anywhere_draws_its_group_there():
    placement, view = CacheAware(), view_of(0, 5)
    placement.place(trajectory("a", group="g1"), view)
    view.known[0].in_flight = 20
    assert placement.place(trajectory("b", group="g1"), view) == "e0"
    assert placement.place(trajectory("c", group="g2"), view) == "e1"


def test_the_longest_prefix_wins_over_an_older_one():
    placement, view = CacheAware(balance_abs=4), view_of(0, 2)
    t = trajectory("a", context_tokens=1000)
    run_step(placement, t, view, context_tokens=2000)  # 1,000 tokens at e0
    view.known[0].in_flight = 50
    assert run_step(placement, t, view, context_tokens=2500) == "e1"  # uneven: 2,000 at e1
    view.known[0].in_flight = 0
    assert placement.place(t, view) == "e1"


def test_a_compacted_history_shares_only_its_prompt():
    placement, view = CacheAware(), view_of(0, 5)
    t = trajectory("a", prompt_tokens=100, context_tokens=5000)
    run_step(placement, t, view, context_tokens=1000)
    view.known[0].in_flight = 10
    assert placement.place(t, view) == "e1"


def test_a_prefix_on_an_engine_that_takes_no_work_is_no_match():
    placement, view = CacheAware(), view_of(0, 5, 3)
    t = trajectory("a")
    run_step(placement, t, view, context_tokens=150)
    view.known[0].accepting = False
    assert placement.place(t, view) == "e2"


@given(order=st.permutations(range(6)))
def test_nothing_is_kept_once_all_have_finished(order):
    placement, view = CacheAware(), view_of(0, 0)
    ts = [trajectory(str(i), group=f"g{i % 2}") for i in range(6)]
    for t in ts:
        placement.place(t, view)
    placement.finished(trajectory("never placed"))
    for i in order:
        placement.finished(ts[i])
    assert not len(placement._sent)


@pytest.mark.parametrize(
    "bad",
    [
        {"cache_threshold": 1.5},
        {"cache_threshold": float("nan")},
        {"balance_abs": -1},
        {"balance_rel": 0.9},
    ],
)
def test_senseless_thresholds_are_refused(bad):
    with pytest.raises(ValueError, match="give"):
        CacheAware(**bad)
