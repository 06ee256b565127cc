"""Program scheduling of vllm-router, rule by rule; KV of 1,000 tokens an engine, buffers of 100."""

from dataclasses import replace

import pytest

from heddle_core.engine_state import Engine
from heddle_core.events import ToolReturned
from heddle_core.ids import EngineId, EngineShape
from heddle_core.ledger import Ledger
from heddle_core.parts.placement.consistent_hash import ConsistentHash
from heddle_core.parts.placement.program_scheduling import ENOUGH, ProgramScheduling
from heddle_core.policy import PolicyContext
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory, policy_context

E0, E1 = EngineId("e0"), EngineId("e1")


def context() -> PolicyContext:
    """A prefill takes 10 ms a token."""
    made = policy_context()
    slow = {s: replace(c, prefill_s=0.01) for s, c in made.cost.by_shape.items()}
    return replace(made, cost=replace(made.cost, by_shape=slow))


def cluster(engines: int = 1, kv: int = 1_000) -> Ledger:
    ledger = Ledger()
    for i in range(engines):
        ledger.add_engine(
            Engine(
                id=EngineId(f"e{i}"),
                shape=EngineShape("h100", 1),
                max_running=99,
                kv_capacity_tokens=kv,
            )
        )
    return ledger


def arrive(part: ProgramScheduling, ledger: Ledger, name: str, tokens: int) -> Trajectory:
    """A new trajectory: at its engine if the part admits it, else waiting in the backlog."""
    t = add_trajectory(ledger, name, None, context_tokens=tokens)
    settle(part, ledger, t)
    return t


def settle(part: ProgramScheduling, ledger: Ledger, t: Trajectory) -> EngineId | None:
    engine = part.place(t, ledger)
    ledger.set_home(t, engine)
    if engine is not None:
        ledger.held.pop(t.id, None)
        t.phase = "running"
    return engine


def call(t: Trajectory, ledger: Ledger) -> None:
    t.phase, t.tool_started_s = "tool", ledger.now_s


def back(part: ProgramScheduling, ledger: Ledger, t: Trajectory) -> EngineId | None:
    t.step += 1
    part.observe_tool(
        t,
        ToolReturned(
            time_s=ledger.now_s,
            trajectory=t.id,
            step=t.step - 1,
            tool="sh",
            ok=True,
            observation_tokens=0,
            context_tokens=t.context_tokens,
        ),
    )
    return settle(part, ledger, t)


def review(part: ProgramScheduling, ledger: Ledger, *backlog: Trajectory) -> list[tuple[str, str]]:
    ledger.now_s += 1.0
    released = part.release({t.id: t for t in backlog}, ledger)
    for name, engine in released:
        t = ledger.trajectories[name]
        ledger.set_home(t, engine)
        t.phase = "running"
    return list(released)


def practised(ledger: Ledger, seconds: float) -> ProgramScheduling:
    """A part that has seen so many calls of this duration that it keeps KV in tools."""
    part = ProgramScheduling(context())
    for i in range(ENOUGH):
        t = arrive(part, ledger, f"earlier{i}", 1)
        call(t, ledger)
        ledger.now_s += seconds
        back(part, ledger, t)
        del ledger.trajectories[t.id]
        part.finished(t)
    return part


def test_a_new_trajectory_is_bound_by_its_hash_and_admitted_while_its_kv_fits():
    ledger = cluster(4)
    part, ring = ProgramScheduling(context()), ConsistentHash(160)
    ts = [arrive(part, ledger, f"t{i}", 10) for i in range(20)]
    assert [t.home for t in ts] == [ring.place(t, ledger) for t in ts]
    ledger, part = cluster(1), ProgramScheduling(context())
    # 500, 1,000 with their buffers; the third does not fit.
    assert [arrive(part, ledger, f"t{i}", 400).home for i in range(3)] == ["e0", "e0", None]


def test_at_most_64_are_active_on_an_engine():
    ledger, part = cluster(1, kv=99_999), ProgramScheduling(context())
    homes = [arrive(part, ledger, f"t{i}", 10).home for i in range(65)]
    assert homes == ["e0"] * 64 + [None]


def test_none_is_admitted_where_a_step_waits_in_the_engines_queue():
    ledger, part = cluster(1), ProgramScheduling(context())
    waiting = add_trajectory(ledger, "other", "e0")
    waiting.phase = "held"
    ledger.enqueue(waiting, ledger.engine(E0), 0.0)
    assert arrive(part, ledger, "a", 10).home is None


def test_none_overtakes_a_step_that_waits_for_the_same_engine():
    ledger, part = cluster(1), ProgramScheduling(context())
    arrive(part, ledger, "a", 800)
    large, small = arrive(part, ledger, "large", 500), arrive(part, ledger, "small", 0)
    assert (large.home, small.home) == (None, None)


def test_a_tool_call_pauses_until_enough_calls_are_known():
    ledger, part = cluster(1), ProgramScheduling(context())
    t = arrive(part, ledger, "a", 600)
    call(t, ledger)
    other = arrive(part, ledger, "b", 600)
    assert other.home is None
    # The call counts until the next review.
    assert review(part, ledger, other) == [("b", "e0")]
    assert back(part, ledger, t) is None


def test_a_short_call_keeps_its_place_for_the_time_that_pays():
    ledger = cluster(1)
    part = practised(ledger, 3.0)
    t = arrive(part, ledger, "a", 600)
    call(t, ledger)
    # 600 tokens * 10 ms * 1.85 = 11.1 s are worth a wait of 3 s.
    other = arrive(part, ledger, "b", 600)
    assert review(part, ledger, other) == []
    assert review(part, ledger, other) == []
    ledger.now_s += 0.5
    assert back(part, ledger, t) == "e0"


def test_a_call_beyond_its_time_pauses_it():
    ledger = cluster(1)
    part = practised(ledger, 3.0)
    t = arrive(part, ledger, "a", 600)
    call(t, ledger)
    other = arrive(part, ledger, "b", 600)
    ledger.now_s += 3.0
    assert review(part, ledger, other) == [("b", "e0")]
    assert back(part, ledger, t) is None
    # Without a review between them the return itself finds out.
    late = arrive(part, ledger, "c", 10)
    assert late.home is None


def test_the_time_is_10_s_at_most_and_nothing_where_a_prefill_costs_less():
    for seconds, tokens, stays in ((20.0, 9_000, False), (3.0, 160, False), (3.0, 170, True)):
        ledger = cluster(1, kv=10_000)
        part = practised(ledger, seconds)
        t = arrive(part, ledger, "a", tokens)
        call(t, ledger)
        ledger.now_s += 1.9 if seconds < 10 else 9.5
        blocker = arrive(part, ledger, "b", 10_000 - 200 - tokens)
        review(part, ledger)
        assert blocker.home == "e0"
        assert part._members[t.id].active is stays, (seconds, tokens)


def test_where_active_ones_outgrow_the_kv_the_least_pauses_after_its_step():
    ledger, part = cluster(1), ProgramScheduling(context())
    small, large = arrive(part, ledger, "small", 300), arrive(part, ledger, "large", 400)
    small.context_tokens, large.context_tokens = 450, 500
    review(part, ledger)
    assert [part._members[t.id].active for t in (small, large)] == [False, True]
    call(small, ledger)
    assert back(part, ledger, small) is None
    large.context_tokens = 2_000
    review(part, ledger)
    part.finished(large)
    assert part._spaces[E0].tokens == 1_000.0


def test_the_latest_to_run_on_an_engine_leaves_the_pool_first():
    ledger, part = cluster(1), ProgramScheduling(context())
    blocker = arrive(part, ledger, "blocker", 899)
    backlog = [arrive(part, ledger, name, 700) for name in ("new", "early", "late")]
    for t, began_s in zip(backlog[1:], (-9.0, -2.0), strict=True):
        t.step, t.tool_started_s = 4, began_s
    del ledger.trajectories[blocker.id]
    part.finished(blocker)
    assert review(part, ledger, *backlog) == [("late", "e0")]


def test_another_engine_takes_the_first_that_came_if_it_has_much_more_left():
    ledger, part = cluster(2), ProgramScheduling(context())
    names = [f"t{i}" for i in range(40)]
    ring = ConsistentHash(160)
    here = [n for n in names if ring.place(add_trajectory(cluster(2), n), ledger) == "e0"]
    arrive(part, ledger, here[0], 800)
    first, second = (arrive(part, ledger, name, 300) for name in here[1:3])
    assert (first.home, second.home) == (None, None)
    # e0 has 100 left, e1 1,000: 100 + 1.2 * 300 are needed there, and 600 remain after it.
    assert review(part, ledger, first, second) == [(first.id, "e1"), (second.id, "e1")]
    third = arrive(part, ledger, here[3], 300)
    # 200 are left there, 460 would have to be.
    assert review(part, ledger, third) == []


def test_after_five_minutes_it_goes_on_whatever_fits():
    ledger, part = cluster(1), ProgramScheduling(context())
    arrive(part, ledger, "a", 800)
    t = arrive(part, ledger, "b", 700)
    assert review(part, ledger, t) == []
    ledger.now_s += 297.0
    assert review(part, ledger, t) == []
    assert review(part, ledger, t) == [("b", "e0")]


def test_a_lost_engine_gives_its_trajectories_to_others():
    ledger, part = cluster(2, kv=1_100), ProgramScheduling(context())
    ts = [arrive(part, ledger, f"t{i}", 300) for i in range(8)]
    waiting = [t for t in ts if t.home is None]
    assert waiting
    gone = ledger.engine(E0)
    ledger.close_engine(gone)
    review(part, ledger, *waiting)
    for t in ts:
        if t.home == "e0":
            ledger.set_home(t, None)
            assert part.place(t, ledger) in (None, "e1")
    part.finished(ts[0])
    part.finished(add_trajectory(ledger, "never placed"))


def test_one_that_waits_is_counted_once_and_no_more_when_it_ends():
    ledger, part = cluster(1), ProgramScheduling(context())
    arrive(part, ledger, "a", 800)
    waiting = arrive(part, ledger, "b", 300)
    assert part.place(waiting, ledger) is None
    assert part._spaces[E0].waiting == 1
    assert part.release({waiting.id: waiting}, ledger) == []
    part.finished(waiting)
    del ledger.trajectories[waiting.id]
    assert part._spaces[E0].waiting == 0
    assert arrive(part, ledger, "c", 0).home == "e0"


def test_an_engine_without_active_trajectories_takes_any():
    ledger, part = cluster(1), ProgramScheduling(context())
    assert arrive(part, ledger, "a", 990).home == "e0"


@pytest.mark.parametrize("wrong", [{"review_s": 0.0}, {"max_active": 0}, {"force_s": -1.0}])
def test_settings_without_intervals_and_limits_are_refused(wrong):
    with pytest.raises(ValueError, match="above 0"):
        ProgramScheduling(context(), **wrong)
