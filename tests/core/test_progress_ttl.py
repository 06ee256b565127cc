"""Progress-TTL beyond program scheduling: KV of 10,000 tokens, a prefill of 10 ms a token."""

from dataclasses import replace

import pytest

from heddle_core.estimate.cost import StepCost
from heddle_core.events import StepFinished
from heddle_core.ids import EngineId
from heddle_core.ledger import Ledger
from heddle_core.parts.placement.growth_reserve import GrowthReserve, speedup
from heddle_core.parts.placement.program_scheduling import ENOUGH
from heddle_core.parts.placement.progress_ttl import ProgressTtl
from heddle_core.trajectory import Trajectory
from tests.core.test_program_scheduling import arrive, back, call, cluster, context, review

E0 = EngineId("e0")


def ended(
    part: ProgressTtl, t: Trajectory, prompt: int, *, cached: int = 10**6, decode_s: float = 1.0
) -> None:
    """A step of `t` with this prompt ended on its engine."""
    t.context_tokens = prompt
    part.observe_step(
        t,
        StepFinished(
            time_s=0.0,
            trajectory=t.id,
            step=t.step,
            engine=E0,
            output_tokens=0,
            reason="tool_call",
            cached_tokens=cached,
            decode_s=decode_s,
        ),
    )


def practised(
    ledger: Ledger, *, growth: int, rounds: int = 1, decode_s: float = 0.0
) -> ProgressTtl:
    """A part whose last steps grew so much, so many rounds after a time-to-live."""
    part = ProgressTtl(context())
    reserve = part._reserves[E0] = GrowthReserve()
    reserve.steps.extend([(growth, rounds, decode_s)] * ENOUGH)
    return part


def test_nothing_is_reserved_before_enough_steps_and_then_twice_the_mean_rounds():
    """The router's own test: 3 rounds since a time-to-live, growth of 1,000: 6 rounds, 6,000."""
    reserve = GrowthReserve()
    reserve.steps.extend([(1_000, 3, 1.0)] * (ENOUGH - 1))
    reserve.review(14)
    assert (reserve.growth, reserve.rounds) == (0.0, 0.0)
    reserve.steps.append((0, 3, 1.0))  # growth unknown
    reserve.review(14)
    assert (reserve.growth, reserve.rounds) == (1_000.0, 6.0)
    reserve.steps.extend([(1_000, 30, 1.0)] * ENOUGH)
    reserve.review(14)
    assert reserve.rounds == 14.0


def test_what_fits_waits_where_the_reserve_does_not():
    ledger = cluster(1, kv=10_000)
    part = practised(ledger, growth=1_000)  # 2 rounds, 2,000 tokens for each
    a = arrive(part, ledger, "a", 3_000)
    assert a.home == "e0"
    b = arrive(part, ledger, "b", 3_000)  # 3,100 + 3,100 and 4,000 for growth
    assert b.home is None
    ended(part, a, 3_000)
    assert review(part, ledger, b) == [("b", "e0")]  # a has one round left


def test_an_engine_without_active_ones_admits_whatever_the_reserve():
    ledger = cluster(1, kv=10_000)
    part = practised(ledger, growth=9_000)
    assert arrive(part, ledger, "a", 9_000).home == "e0"


@pytest.mark.parametrize(("decode_s", "home"), [(5.0, None), (1_000.0, "e0")])
def test_a_larger_batch_that_pays_for_the_prefills_may_take_from_the_reserve(decode_s, home):
    ledger = cluster(1, kv=10_000)
    part = practised(ledger, growth=1_000, decode_s=decode_s)
    a = arrive(part, ledger, "a", 1_000)
    a.phase = "held"
    ledger.enqueue(a, ledger.engine(E0), 0.0)
    ledger.start(a, ledger.engine(E0))
    assert arrive(part, ledger, "b", 5_500).home == home


def test_a_batch_decodes_faster_by_its_cost():
    cost = replace(
        StepCost(t0_s=0.01, t1_s=0.0, t2_s=0.0, prefill_s=0.0, kv_capacity_tokens=1), t1_s=0.001
    )
    assert speedup(cost, 4, 0, 0) == pytest.approx(5 / 0.015 / (4 / 0.014) - 1.0)
    assert speedup(replace(cost, t2_s=1.0), 4, 0, 100) == 0.0
    assert speedup(cost, 0, 0, 0) == 0.0


@pytest.mark.parametrize(
    ("free", "free_with", "share"),
    [(8_000, 4_000, 1.0), (20_000, 9_000, 0.0), (4_000, 0, float("inf")), (0, -1, 0.0)],
)
def test_active_ones_pause_more_often_by_the_rounds_that_they_lose(free, free_with, share):
    assert GrowthReserve(growth=1_000.0, left=8.0).prefills_more(free, free_with) == share


def test_growth_counts_where_a_prompt_grew_by_less_than_itself():
    ledger = cluster(1, kv=10_000)
    part = ProgressTtl(context())
    t = arrive(part, ledger, "a", 1_000)
    for prompt in (1_000, 1_400, 1_300, 3_000):
        ended(part, t, prompt)
    assert [grown for grown, _, _ in part._reserves[E0].steps] == [0, 400, 0, 0]


def test_a_step_that_finds_little_of_its_prompt_is_no_round():
    ledger = cluster(1, kv=10_000)
    part = ProgressTtl(context())
    t = arrive(part, ledger, "a", 1_000)
    for cached in (0, 900, 899):
        ended(part, t, 1_000, cached=cached)
    assert part._progress[t.id].rounds == 2


def test_after_14_rounds_one_yields_to_a_step_that_waits_and_then_goes_last():
    ledger = cluster(1, kv=10_000)
    part = ProgressTtl(context())
    old, blocker = arrive(part, ledger, "old", 4_000), arrive(part, ledger, "blocker", 5_000)
    for _ in range(14):
        ended(part, old, 4_000)
    assert part._members[old.id].active  # none waits
    waiting = arrive(part, ledger, "waiting", 4_000)
    assert waiting.home is None
    ended(part, old, 4_000)
    assert not part._members[old.id].active
    call(old, ledger)
    assert back(part, ledger, old) is None
    part.finished(blocker)
    del ledger.trajectories[blocker.id]
    # Both fit now; the one that yielded would have been first, as the latest that ran.
    assert review(part, ledger, old, waiting) == [("waiting", "e0"), ("old", "e0")]
    assert part._progress[old.id].rounds == 0


def test_a_call_beyond_its_time_begins_the_rounds_anew():
    ledger = cluster(1, kv=10_000)
    part = ProgressTtl(context())
    t = arrive(part, ledger, "a", 1_000)
    ended(part, t, 1_000)
    call(t, ledger)
    ledger.now_s += 0.5
    assert back(part, ledger, t) == "e0"
    assert part._progress[t.id].rounds_since_ttl == 0  # 0 s before enough calls are known
    part.finished(t)
    assert not part._progress
