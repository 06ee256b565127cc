import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.parts.placement.load_and_pin import (
    HybridRatio,
    LeastLoaded,
    Sticky,
    StickyGroup,
    StickyLeastSessions,
)
from tests.core.policy_fakes import trajectory, view_of

LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@given(loads=LOADS)
def test_least_loaded_takes_the_first_of_the_fewest_in_flight(loads):
    chosen = LeastLoaded().place(trajectory("a", home="e0"), view_of(*loads))
    assert chosen == f"e{loads.index(min(loads))}"


@pytest.mark.parametrize(
    "placement", [LeastLoaded(), Sticky(), StickyGroup(), StickyLeastSessions()]
)
def test_an_engine_that_takes_no_work_gets_none(placement):
    view = view_of(0, 5, 7)
    view.known[0].accepting = False
    assert placement.place(trajectory("a", home="e0"), view) == "e1"


@given(loads=LOADS, data=st.data(), capacity=st.sampled_from([None, 1, 10_000]))
def test_sticky_never_moves_while_its_engine_accepts(loads, data, capacity):
    view, sticky = view_of(*loads), Sticky(capacity=capacity)
    t = trajectory("a")
    t.home = first = sticky.place(t, view)
    for _ in range(3):
        for engine in view.known:
            engine.in_flight = data.draw(st.integers(0, 40))
        assert sticky.place(t, view) == first


def test_a_new_trajectory_goes_to_the_fewest_in_flight_first_of_equals():
    assert Sticky().place(trajectory("a"), view_of(3, 1, 1)) == "e1"


def test_with_a_seed_any_of_the_fewest_takes_a_new_trajectory():
    view = view_of(3, 1, 1, 1)
    sticky, again = (Sticky(seed=7) for _ in range(2))
    chosen = [sticky.place(trajectory(f"t{k}"), view) for k in range(30)]
    assert set(chosen) == {"e1", "e2", "e3"}
    assert chosen == [again.place(trajectory(f"t{k}"), view) for k in range(30)]


@pytest.mark.parametrize(("in_flight", "engine"), [(2, "e1"), (3, "e0")])
def test_a_pin_breaks_at_the_margin_above_the_fewest(in_flight, engine):
    view = view_of(0, in_flight)
    assert Sticky(margin=2).place(trajectory("a", home="e1"), view) == engine
    assert Sticky().place(trajectory("a", home="e1"), view) == "e1"


def test_a_margin_below_0_is_refused():
    with pytest.raises(ValueError, match="margin is -1; give 0 or more"):
        Sticky(margin=-1)


def test_a_full_pin_table_drops_the_least_recently_placed_trajectory():
    view, sticky = view_of(0, 9), Sticky(capacity=2)
    a, b, c = (trajectory(name) for name in "abc")
    for t in (a, b):
        t.home = sticky.place(t, view)
    assert sticky.place(a, view) == "e0"  # refreshes a: b is now the oldest
    c.home = sticky.place(c, view)  # and pushed out
    view.known[0].in_flight = 99
    assert sticky.place(a, view) == "e0"
    assert sticky.place(b, view) == "e1"


def test_the_pin_follows_a_migration():
    view, sticky = view_of(0, 9), Sticky(capacity=10)
    t = trajectory("a")
    t.home = sticky.place(t, view)
    t.home = "e1"
    assert sticky.place(t, view) == "e1"


def test_a_finished_trajectory_frees_its_entry_of_the_pin_table():
    view, sticky = view_of(0, 9), Sticky(capacity=2)
    a, b, c = (trajectory(name) for name in "abc")
    for t in (a, b):
        t.home = sticky.place(t, view)
    sticky.finished(b)
    c.home = sticky.place(c, view)
    view.known[0].in_flight = 99
    assert sticky.place(a, view) == "e0"


def test_sessions_count_those_in_a_tool():
    view = view_of(0, 5, 5, sessions=[9, 4, 4])
    assert StickyLeastSessions().place(trajectory("a"), view) == "e1"
    assert StickyLeastSessions().place(trajectory("a", home="e0"), view) == "e0"


@given(loads=LOADS, ratio=st.floats(1, 40))
def test_hybrid_ratio_leaves_home_exactly_when_the_loads_are_skewed(loads, ratio):
    home = len(loads) - 1
    chosen = HybridRatio(ratio).place(trajectory("a", home=f"e{home}"), view_of(*loads))
    skewed = max(loads) > ratio * max(min(loads), 1)
    assert chosen == (f"e{loads.index(min(loads))}" if skewed else f"e{home}")


def test_hybrid_ratio_counts_an_idle_engine_as_one_step():
    t = trajectory("a", home="e1")
    assert HybridRatio(32).place(t, view_of(0, 32)) == "e1"
    assert HybridRatio(32).place(t, view_of(0, 33)) == "e0"


def test_hybrid_ratio_gives_a_new_trajectory_to_the_least_loaded():
    assert HybridRatio().place(trajectory("a"), view_of(3, 2, 2)) == "e1"


def test_assign_decides_one_by_one():
    ts = [trajectory("a", home="e1"), trajectory("b")]
    view = view_of(0, 3)
    assert Sticky().assign(ts, [0.0, 0.0], view) == ["e1", "e0"]
    assert not Sticky().needs_all


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Sticky(capacity=0), "pin table is 0"),
        (lambda: HybridRatio(ratio=0.5), "is 0.5"),
        (lambda: HybridRatio(ratio=float("nan")), "is nan"),
    ],
)
def test_a_senseless_parameter_is_refused(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_a_placement_without_memory_has_nothing_to_forget():
    placement, view = LeastLoaded(), view_of(1, 0)
    t = trajectory("a")
    before = placement.place(t, view)
    placement.finished(t)
    assert placement.place(t, view) == before
    assert not getattr(placement, "__dict__", {})


def test_samples_of_a_prompt_share_an_engine_and_prompts_are_dealt_by_load():
    view, placement = view_of(2, 1), StickyGroup()
    first = trajectory("p/0", group="p")
    first.home = placement.place(first, view)
    assert first.home == "e1"
    view.known[1].in_flight = 9
    assert placement.place(trajectory("p/1", group="p"), view) == "e1"
    assert placement.place(trajectory("q/0", group="q"), view) == "e0"
    assert placement.place(first, view) == "e1"


def test_a_prompt_is_forgotten_with_its_last_sample_or_its_engine():
    view, placement = view_of(0, 5), StickyGroup()
    samples = [trajectory(f"p/{i}", group="p") for i in range(2)]
    assert [placement.place(t, view) for t in samples] == ["e0", "e0"]
    view.known[0].in_flight = 9
    placement.finished(samples[0])
    placement.finished(trajectory("q/0", group="q"))  # never placed here
    assert placement.place(trajectory("p/2", group="p"), view) == "e0"
    placement.finished(samples[1])
    placement.finished(trajectory("p/2", group="p"))
    assert placement.place(trajectory("p/3", group="p"), view) == "e1"
    view.known[1].accepting = False
    assert placement.place(trajectory("p/4", group="p"), view) == "e0"


def test_a_migrated_sample_keeps_its_new_home():
    view, placement = view_of(0, 5), StickyGroup()
    t = trajectory("p/0", group="p")
    placement.place(t, view)
    t.home = "e1"
    assert placement.place(t, view) == "e1"
