"""Tail consolidation: the time of the problem, and its contents."""

from dataclasses import replace

from heddle_core.ids import TrajectoryId
from heddle_core.parts.consolidation import TailConsolidation
from tests.core.ledgers import add_trajectory, ledger_of, policy_context
from tests.core.shapes import h100


def ledger_with(count: int, *tps: int):
    ledger = ledger_of(*tps)
    for i in range(count):
        add_trajectory(ledger, f"t{i}", f"e{i % len(tps)}", remaining_tokens=100.0 * (i + 1))
    return ledger


def end(ledger, count: int) -> None:
    live = [t for t in ledger.trajectories.values() if t.phase != "finished"]
    for t in live[:count]:
        ledger.finish(t)


def test_the_search_begins_when_few_are_left_and_again_when_a_tenth_of_them_has_ended():
    part = TailConsolidation(policy_context(gpus=8))
    ledger = ledger_with(80, 1, 1, 2)
    asked = []
    while ledger.unfinished:
        if part.consolidate(ledger) is not None:
            asked.append(ledger.unfinished)
        end(ledger, 1)
    assert asked[0] == 64, "eight for each GPU"
    assert asked[1:] == [
        57,
        51,
        45,
        40,
        36,
        32,
        28,
        25,
        22,
        19,
        17,
        15,
        13,
        11,
        9,
        8,
        7,
        6,
        5,
        4,
        3,
        2,
        1,
    ]
    assert part.consolidate(ledger) is None


def test_a_new_rollout_begins_anew_and_engines_have_to_come_back_for_the_next_one():
    context = replace(policy_context(gpus=8), engine_start_s=40.0)
    part = TailConsolidation(context, min_gain_s=3.0)
    ledger = ledger_with(4, 1, 1)
    first = part.consolidate(ledger)
    assert first is not None
    assert first.min_gain_s == 3.0, "nothing says that another rollout follows"
    while ledger.unfinished:
        part.consolidate(ledger)
        end(ledger, 1)
    part.consolidate(ledger)
    for i in range(10):
        add_trajectory(ledger, f"next{i}", "e0")
    second = part.consolidate(ledger)
    assert second is not None
    assert second.min_gain_s == 43.0


def test_large_clusters_search_late():
    ledger = ledger_with(600, 1, 1)
    part = TailConsolidation(policy_context(gpus=4096))
    assert part.consolidate(ledger) is None
    end(ledger, 88)
    assert part.consolidate(ledger) is not None


def test_no_search_begins_while_a_step_waits():
    part = TailConsolidation(policy_context(gpus=8))
    ledger = ledger_with(4, 1)
    waiting = ledger.trajectories[TrajectoryId("t0")]
    ledger.enqueue(waiting, ledger.engines[0], 0.0)
    assert part.consolidate(ledger) is None
    ledger.start(waiting, ledger.engines[0])
    assert part.consolidate(ledger) is not None


def test_the_problem_has_the_remaining_work_and_the_ratios_of_each_trajectory():
    s = replace(policy_context(gpus=8, tps=(1, 2)), engine_start_s=33.0)
    ledger = ledger_of(1, 2)
    add_trajectory(ledger, "homeless", None)
    t = add_trajectory(
        ledger,
        "shown",
        "e1",
        context_tokens=1_000,
        output_tokens=200,
        remaining_tokens=600.0,
        tool_s=4.0,
    )
    t.prompt_tokens = 700
    add_trajectory(ledger, "new", "e0", remaining_tokens=0.0)
    problem = TailConsolidation(s).consolidate(ledger)
    assert problem is not None
    assert problem.trajectories == ("shown", "new")
    assert problem.homes == (1, 0)
    assert problem.output_tokens == (600.0, 1.0)
    assert problem.context_tokens == (1_000, 1_000)
    assert problem.appended_per_output == (0.5, 0.0)
    assert problem.tool_s_per_output == (0.02, 0.0)
    assert [e.shape.tp for e in problem.engines] == [1, 2]
    assert problem.start_s == 33.0
    assert sorted(problem.by_shape) == [h100(1), h100(2)]


def test_a_running_step_has_made_something_but_never_all():
    ledger = ledger_of(1)
    t = add_trajectory(ledger, "t", "e0", remaining_tokens=1_000.0, context_tokens=500)
    ledger.enqueue(t, ledger.engines[0], 0.0)
    ledger.start(t, ledger.engines[0])
    cost = policy_context().cost.by_shape[h100(1)]
    for later_s, made in ((10 * cost.iteration_s(1, 500), 10.0), (1e6, 750.0)):
        ledger.advance(later_s)
        problem = TailConsolidation(policy_context()).consolidate(ledger)
        assert problem is not None
        assert abs(problem.output_tokens[0] - (1_000.0 - made)) < 1e-6
        assert abs(problem.context_tokens[0] - (500.0 + made)) < 1e-6


def test_without_homes_there_is_no_problem():
    ledger = ledger_of(1)
    add_trajectory(ledger, "held", None)
    assert TailConsolidation(policy_context()).consolidate(ledger) is None
