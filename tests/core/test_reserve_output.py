"""Reserve output: how much KV a step sets aside, and what that does to a queue."""

import pytest

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId
from heddle_core.parts.admission import (
    STEPS_AHEAD,
    UNKNOWN_STEP_TOKENS,
    UNKNOWN_STEPS,
    ReserveOutput,
)
from heddle_core.parts.table import next_round
from tests.core.ledgers import add_trajectory, history, ledger_of, policy_context


def reserve(remaining, *, output=0, step=0, past=None):
    t = add_trajectory(ledger_of(), "t", output_tokens=output, step=step)
    return ReserveOutput(policy_context(history=past)).reserve_tokens(t, remaining)


@pytest.mark.parametrize(
    ("remaining", "tokens"),
    [
        (0.0, 300),  # nothing left is an estimate: one mean step all the same
        (450.0, 450),
        (1e9, int(STEPS_AHEAD * 300)),  # never more than some mean steps
    ],
)
def test_it_reserves_what_is_left_within_one_and_some_mean_steps(remaining, tokens):
    assert reserve(remaining, past=history()) == tokens


def test_a_trajectory_with_longer_steps_reserves_for_its_own():
    assert reserve(1e9, output=4_000, step=4, past=history()) == int(STEPS_AHEAD * 1_000)
    assert reserve(1e9, output=40, step=4, past=history()) == int(STEPS_AHEAD * 300)


def test_a_round_is_one_step_and_what_its_tool_appends():
    past = history()
    part = next_round(policy_context(history=past))
    t = add_trajectory(ledger_of(), "t", output_tokens=4_000, step=4)
    growth = 1.0 + past.appended_per_output
    assert growth > 1.0
    assert part.reserve_tokens(t, 1e9) == int(growth * 1_000)
    assert part.reserve_tokens(t, 500.0) == int(growth * 500)
    assert part.keeps_kv
    assert next_round(policy_context()).reserve_tokens(t, 1e9) == 1_000


def test_without_history_a_common_step_is_assumed():
    assert reserve(0.0) == int(UNKNOWN_STEP_TOKENS)
    assert ReserveOutput(policy_context()).keeps_kv


def test_without_history_steps_that_end_tell_what_one_makes_and_its_tool_appends():
    known, learns = next_round(policy_context(history=history())), next_round(policy_context())
    t = add_trajectory(ledger_of(), "t")
    usual = known.reserve_tokens(t, 1e9)
    for part in (known, learns):
        for step in range(10 * UNKNOWN_STEPS):
            part.observe_step(
                t,
                StepFinished(
                    time_s=0.0,
                    trajectory=t.id,
                    step=step,
                    engine=EngineId("e0"),
                    output_tokens=2_000,
                    reason="tool_call",
                ),
            )
            part.observe_tool(
                t,
                ToolReturned(
                    time_s=0.0,
                    trajectory=t.id,
                    step=step,
                    tool="sh",
                    ok=True,
                    observation_tokens=1_000,
                    context_tokens=0,
                ),
            )
    assert known.reserve_tokens(t, 1e9) == usual
    assert 0.9 * 3_000 < learns.reserve_tokens(t, 1e9) < 3_000


def test_reserved_output_and_parked_kv_keep_the_next_step_waiting():
    ledger = ledger_of(1)
    engine = ledger.engine(EngineId("e0"))
    runs = add_trajectory(ledger, "runs", "e0", context_tokens=30_000)
    runs.reserved_tokens = 5_000
    ledger.enqueue(runs, engine, 0.0)
    ledger.start(runs, engine)
    waits = add_trajectory(ledger, "waits", "e0", context_tokens=24_000)
    waits.reserved_tokens = 1_000
    assert engine.fits(waits)  # 30,000 + 5,000 + 25,000 = 60,000
    waits.reserved_tokens = 1_001
    assert not engine.fits(waits)
    waits.reserved_tokens = 0
    parked = add_trajectory(ledger, "parked", "e0", context_tokens=1_001)
    ledger.park(parked, engine)
    assert not engine.fits(waits)
    assert ledger.unpark(parked) is engine
    assert engine.fits(waits)
    ledger.check()
