"""Continuum's parts: how long KV stays in a tool, and the order by trajectory."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle_core.estimate.tool_times import RECENT, RecentDurations
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId
from heddle_core.parts.admission import ENOUGH, TimeToLive
from heddle_core.parts.scheduler import ProgramFcfs
from heddle_core.trajectory import Trajectory
from tests.core.ledgers import add_trajectory, ledger_of, policy_context

E0 = EngineId("e0")


def waited(t: Trajectory, seconds: float, *, step: int = 1, kept: bool = False) -> StepFinished:
    t.runnable_s, t.dispatched_s, t.kv_kept, t.step = 10.0, 10.0 + seconds - 0.25, kept, step
    return StepFinished(
        time_s=99.0,
        trajectory=t.id,
        step=step,
        engine=E0,
        output_tokens=5,
        reason="tool_call",
        queued_s=0.25,
    )


def took(t: Trajectory, tool: str, seconds: float) -> ToolReturned:
    t.tool_started_s = 5.0
    return ToolReturned(
        time_s=5.0 + seconds,
        trajectory=t.id,
        step=0,
        tool=tool,
        ok=True,
        observation_tokens=0,
        context_tokens=10,
    )


@pytest.fixture
def t() -> Trajectory:
    return add_trajectory(ledger_of(1), "a", "e0")


@pytest.fixture
def part() -> TimeToLive:
    return TimeToLive(policy_context())


def after_calls(part: TimeToLive, t: Trajectory, tool: str, *seconds: float) -> None:
    for each in seconds:
        part.observe_tool(t, took(t, tool, each))


def test_it_admits_what_fits_and_keeps_kv(part, t):
    assert part.keeps_kv
    assert part.reserve_tokens(t, 1e4) == 0


@pytest.mark.parametrize(("benefit_s", "limit_s"), [(0.5, 0.0), (1.0, 0.0), (math.e**2, 2.0)])
def test_before_there_are_durations_they_are_taken_for_exponential_of_mean_1_s(
    part, benefit_s, limit_s
):
    assert part.limit_s("sh", benefit_s) == pytest.approx(limit_s)


def test_enough_calls_of_the_tool_count_alone_else_those_of_all_tools(part, t):
    after_calls(part, t, "web", *[8.0] * ENOUGH)
    assert part.limit_s("sh", 10.0) == 8.0
    after_calls(part, t, "sh", *[1.0] * (ENOUGH - 1))
    # Of all 199 calls half take 1 s: 0.497 * 10 - 1 beats 10 - 8.
    assert part.limit_s("sh", 10.0) == 1.0
    assert part.limit_s("sh", 20.0) == 8.0
    after_calls(part, t, "sh", 1.0)
    assert part.limit_s("sh", 20.0) == 1.0
    assert part.limit_s("web", 20.0) == 8.0


def test_the_benefit_is_the_prefill_and_the_wait_of_steps_whose_kv_was_not_kept(part, t):
    after_calls(part, t, "sh", *[3.0] * ENOUGH)
    assert part.limit_s("sh", 2.9) == 0.0
    assert part.limit_s("sh", 3.1) == 3.0
    part.observe_step(t, waited(t, 1.0))
    part.observe_step(t, waited(t, 3.0))
    assert part.limit_s("sh", 0.9) == 0.0
    assert part.limit_s("sh", 1.1) == 3.0  # and 2 s of waiting
    part.observe_step(t, waited(t, 99.0, kept=True))
    part.observe_step(t, waited(t, 99.0, step=0))
    assert part.limit_s("sh", 0.9) == 0.0


def test_the_wait_counts_as_far_as_progress_tells_what_is_left(part, t):
    after_calls(part, t, "sh", *[3.0] * ENOUGH)
    part.observe_step(t, waited(t, 4.0))
    assert part.order() == 1.0
    for _ in range(2):
        t.step = 5
        part.observe_finish(t)
    assert part.order() == pytest.approx(1.0), "equally many steps: progress tells all"
    assert part.limit_s("sh", 0.0) == 3.0
    t.step = 40
    part.observe_finish(t)
    # By hand: done 1..5 with 5..1 left twice, and 1..40 with 40..1 left.
    done = [*range(1, 6)] * 2 + [*range(1, 41)]
    left = [*range(5, 0, -1)] * 2 + [*range(40, 0, -1)]
    mean_done, mean_left = sum(done) / len(done), sum(left) / len(left)
    both = sum((x - mean_done) * (y - mean_left) for x, y in zip(done, left, strict=True))
    spread = math.sqrt(
        sum((x - mean_done) ** 2 for x in done) * sum((y - mean_left) ** 2 for y in left)
    )
    assert part.order() == pytest.approx(-both / spread)
    assert part.order() < 0.7
    assert part.limit_s("sh", 0.0) == 0.0


def test_the_limit_of_a_call_is_of_the_context_on_its_engine(part):
    ledger = ledger_of(1)
    t = add_trajectory(ledger, "a", "e0", context_tokens=100_000)
    after_calls(part, t, "sh", *[3.0] * ENOUGH)
    # 5e-5 s a token to prefill at TP 1: 5 s.
    assert part.keep_kv_s(t, "sh", ledger) == 3.0
    t.context_tokens = 50_000
    assert part.keep_kv_s(t, "sh", ledger) == 0.0


def test_a_load_from_a_store_costs_less_than_a_prefill():
    context = policy_context()
    loads = {s: replace(c, load_s=1e-6) for s, c in context.cost.by_shape.items()}
    part = TimeToLive(replace(context, cost=replace(context.cost, by_shape=loads)))
    ledger = ledger_of(1)
    t = add_trajectory(ledger, "a", "e0", context_tokens=100_000)
    after_calls(part, t, "sh", *[3.0] * ENOUGH)
    assert part.keep_kv_s(t, "sh", ledger) == 0.0


# -- durations -----------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=400),
    st.floats(0.0, 100.0),
)
def test_the_best_limit_beats_every_other_over_the_last_durations(seconds, benefit_s):
    durations = RecentDurations()
    for each in seconds:
        durations.add(each)
    last = seconds[-RECENT:]
    assert durations.ordered == sorted(last)
    assert len(durations) == len(last)

    def worth(limit_s: float) -> float:
        return sum(s <= limit_s for s in last) / len(last) * benefit_s - limit_s

    best_s = durations.best_limit_s(benefit_s)
    assert best_s == 0.0 or best_s in last
    assert all(
        worth(best_s) >= worth(s) - 1e-9 or (best_s == 0.0 and worth(s) <= 1e-9) for s in last
    )


def test_only_the_last_durations_count():
    durations = RecentDurations()
    for i in range(RECENT + 44):
        durations.add(float(i % 150))
    assert durations.ordered == sorted(float(i % 150) for i in range(44, RECENT + 44))


# -- the order -----------------------------------------------------------------------------------


def test_kept_kv_goes_first_then_the_earlier_trajectory():
    ledger = ledger_of(1)
    ts = [add_trajectory(ledger, name) for name in "abc"]
    ts[1].kv_kept = ts[2].kv_kept = True
    order = sorted(ts, key=lambda t: -ProgramFcfs().priority(t, 0.0))
    assert [t.id for t in order] == ["b", "c", "a"]
    assert [t.arrival for t in ts] == [0, 1, 2]
    assert not ProgramFcfs().preemptive
