"""Dynamo's KV router, rule by rule; blocks of 16 tokens, a prefill of 0.1 ms a token."""

import pytest

from heddle_core.events import StepFinished
from heddle_core.parts.placement.prefill_and_held import PrefillAndHeld
from tests.core.policy_fakes import FakeTrajectory, FakeView, policy_context, trajectory, view_of


def blocks(n: int, name: str = "t", group: str | None = None) -> FakeTrajectory:
    """A trajectory with a context of `n` blocks, no prompt shared unless it has a group."""
    prompt = 16 * n if group else 0
    return trajectory(name, group=group or name, prompt_tokens=prompt, context_tokens=16 * n)


def part() -> PrefillAndHeld:
    return PrefillAndHeld(policy_context())


def put(placement: PrefillAndHeld, view: FakeView, t: FakeTrajectory, engine: int) -> None:
    """Place `t` at this engine, whatever the costs."""
    for i, e in enumerate(view.known):
        e.accepting = i == engine
    view.trajectories = {**view.trajectories, t.id: t}
    t.home, t.phase = placement.place(t, view), "queued"
    for e in view.known:
        e.accepting = True


def run(view: FakeView, *ts: FakeTrajectory) -> None:
    """They are dispatched, and all prefills end."""
    for t in ts:
        t.phase, t.dispatched_s = "running", view.now_s
    view.now_s += 1_000.0


def end(placement: PrefillAndHeld, t: FakeTrajectory) -> None:
    t.phase = "tool"
    placement.observe_step(
        t,
        StepFinished(
            time_s=0.0,
            trajectory=t.id,
            step=t.step,
            engine=t.home,
            output_tokens=0,
            reason="tool_call",
        ),
    )
    t.step += 1


def test_the_example_of_dynamos_documentation():
    """Of 10 blocks 2, 5 and 8 cached, 10, 5 and 9 held: costs 18, 10, 11 (router-concepts.md)."""
    placement, view = part(), view_of(0, 0, 0)
    t = blocks(0, "t")
    for engine, (cached, held) in enumerate([(2, 10), (5, 5), (8, 9)]):
        t.context_tokens = 16 * cached
        put(placement, view, t, engine)
        run(view, t)
        end(placement, t)
        other = blocks(held, f"other{engine}")
        put(placement, view, other, engine)
        run(view, other)
    t.context_tokens = 160
    assert placement.place(t, view) == "e1"


def test_prefill_of_others_counts_until_it_is_over():
    placement, view = part(), view_of(0, 0)
    put(placement, view, blocks(20, "a"), 0)
    held = blocks(30, "b")
    put(placement, view, held, 1)
    run(view, held)
    assert placement.place(blocks(5), view) == "e1"  # 20 + 20 against 30 held
    run(view, view.trajectories["a"])
    assert placement.place(blocks(5), view) == "e0"  # 20 held against 35 and more


def test_prefills_of_an_engine_end_one_after_another():
    placement, view = part(), view_of(0)
    a, b = blocks(1_000, "a"), blocks(1_000, "b")  # 1.6 s each
    for t in (a, b):
        put(placement, view, t, 0)
        t.phase, t.dispatched_s = "running", 0.0
    for now_s, left in [(1.5, 32_000), (1.7, 16_000), (3.1, 16_000), (3.3, 0)]:
        view.now_s = now_s
        assert placement._load(view.known[0], view).prefill_tokens == left


def test_a_prompt_is_held_once_by_all_samples_in_flight():
    placement, view = part(), view_of(0)
    a, b = blocks(10, "a", group="g"), blocks(10, "b", group="g")
    for t in (a, b):
        put(placement, view, t, 0)
    load = placement._loads["e0"]
    assert load.blocks == 10
    end(placement, a)
    assert load.blocks == 10
    end(placement, b)
    assert (load.blocks, load.prefill_tokens, load.prompts) == (0, 0, {})


def test_samples_that_arrive_at_once_are_spread():
    placement, view = part(), view_of(0, 0, 0, 0)
    homes = []
    for name in "abcd":
        t = blocks(10, name, group="g")
        view.trajectories = {**view.trajectories, t.id: t}
        homes.append(placement.place(t, view))
    assert sorted(homes) == ["e0", "e1", "e2", "e3"]


@pytest.mark.parametrize(("held", "expected"), [(49, "e0"), (51, "e1")])
def test_a_trajectory_leaves_its_engine_where_more_is_held_than_it_has_to_prefill(held, expected):
    placement, view = part(), view_of(0, 0)
    t, other = blocks(50), blocks(held, "other")
    put(placement, view, t, 0)
    run(view, t)
    end(placement, t)
    put(placement, view, other, 0)
    run(view, other)
    assert placement.place(t, view) == expected


def test_equals_are_chosen_by_the_seed():
    def homes() -> list[str]:
        placement, view, found = part(), view_of(0, 0, 0), []
        for i in range(40):
            t = blocks(3, str(i))
            found.append(placement.place(t, view))
            placement.finished(t)
        return found

    assert homes() == homes()
    assert set(homes()) == {"e0", "e1", "e2"}


def test_a_step_that_is_placed_again_counts_once():
    placement, view = part(), view_of(0, 0)
    t = blocks(10)
    put(placement, view, t, 0)
    put(placement, view, t, 1)
    assert placement._loads["e0"].blocks == 0
    assert placement._loads["e1"].blocks == 10
    placement.finished(t)
    assert placement._loads["e1"].prefill_tokens == 0
    assert not len(placement._cached)


@pytest.mark.parametrize("at_home", [True, False])
def test_output_is_cached_where_it_was_made(at_home: bool):
    placement, view = part(), view_of(0, 0)
    t = blocks(10)
    put(placement, view, t, 0)
    run(view, t)
    t.context_tokens = 16 * 30
    end(placement, t)
    held = blocks(29 if at_home else 31, "held")
    put(placement, view, held, 0)
    run(view, held)
    assert placement.place(t, view) == ("e0" if at_home else "e1")
