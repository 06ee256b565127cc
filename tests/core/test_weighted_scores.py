"""llm-d's endpoint picker, rule by rule: llm-d-router 2342697, weights of its defaults.go."""

import pytest

from heddle_core.parts.placement.weighted_scores import WeightedScores
from tests.core.policy_fakes import FakeView, trajectory, view_of


def waiting(view: FakeView, *steps: int) -> FakeView:
    for engine, n in zip(view.known, steps, strict=True):
        engine.in_flight, engine.running_steps = 5 + n, 5
    return view


def test_a_new_prompt_goes_where_the_fewest_steps_wait():
    assert WeightedScores().place(trajectory("a"), waiting(view_of(0, 0, 0), 4, 1, 9)) == "e1"


def test_running_steps_do_not_count_as_waiting():
    view = view_of(0, 0)
    view.known[0].in_flight = view.known[0].running_steps = 90
    placement = WeightedScores()
    assert [placement.place(trajectory(n, group=n), view) for n in "abcd"] == ["e0", "e1"] * 2


def test_free_kv_decides_between_equal_queues():
    view = view_of(0, 0)
    view.known[0].reported_kv_used_tokens = 1_000
    assert WeightedScores().place(trajectory("a"), view) == "e1"


@pytest.mark.parametrize(
    ("kv_used", "expected"),
    [(0.0, "e0"), (0.49, "e0"), (0.51, "e1")],  # 3 + 0 + 2 x free, against 0 + 2 + 2
)
def test_a_whole_prefix_beats_the_longest_queue_until_half_of_the_kv_is_used(kv_used, expected):
    placement, view = WeightedScores(), view_of(0, 0)
    t = trajectory("a", context_tokens=1_600)
    assert placement.place(t, view) == "e0"
    waiting(view, 9, 0)
    view.known[0].reported_kv_used_tokens = int(kv_used * view.known[0].kv_capacity_tokens)
    assert placement.place(t, view) == expected


@pytest.mark.parametrize(("context", "expected"), [(2_300, "e0"), (2_500, "e1")])
def test_two_thirds_of_a_prefix_weigh_as_much_as_the_queue(context, expected):
    placement, view = WeightedScores(), view_of(0, 0)
    t = trajectory("a", context_tokens=1_600)
    placement.place(t, view)
    t.context_tokens = context
    assert placement.place(t, waiting(view, 9, 0)) == expected


def test_only_whole_blocks_match():
    placement, view = WeightedScores(), view_of(0, 0)
    t = trajectory("a", prompt_tokens=15, context_tokens=15)
    assert placement.place(t, view) == "e0"
    assert placement.place(t, view) == "e1"  # a tie: no block of 16 tokens


def test_samples_of_a_prompt_follow_the_first():
    placement, view = WeightedScores(), view_of(0, 0, 0)
    assert [placement.place(trajectory(n, group="g"), view) for n in "abc"] == ["e0"] * 3
    assert placement.place(trajectory("d", group="other"), view) == "e1"


def test_an_engine_that_stopped_is_no_candidate_and_finished_ones_are_forgotten():
    placement, view = WeightedScores(), view_of(0, 0)
    t = trajectory("a")
    placement.place(t, view)
    view.known[0].accepting = False
    assert placement.place(t, view) == "e1"
    placement.finished(t)
    assert not len(placement._sent)


def test_weights_below_zero_are_refused():
    with pytest.raises(ValueError, match="weights"):
        WeightedScores(queue=-1.0)
