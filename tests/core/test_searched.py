"""Searched plans: valid whatever the solver, deterministic, and the same after a journal."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from heddle.runs.journal_entries import decode
from heddle_core import Entry
from heddle_core.commands import SolvePlan
from heddle_core.events import PlanSolved, RolloutStarted
from heddle_core.ids import RolloutId
from heddle_core.parts.planner import CHARGED_S, SearchedPlan, estimated_lengths
from heddle_core.solve.joint import JointProblem
from tests.app.journals import table
from tests.core.ledgers import add_trajectory, history, ledger_of, policy_context
from tests.core.shapes import h100

SOLVERS = [
    ("exact", "context"),
    ("exact", "paper"),
    ("anneal", "paper"),
    ("anneal", "context"),
    ("libra-dp", "context"),
    ("libra-dp", "paper"),
    ("anneal", "paper-simulated"),
    ("exact", "paper-simulated"),
    ("portfolio", "context"),
]
every_solver = pytest.mark.parametrize(("solver", "cost"), SOLVERS)


def problem_of(solver, cost, outputs, *, gpus=8, tps=(1, 2, 4, 8), assignment="planner", past=None):
    ledger = ledger_of()
    for i, output in enumerate(outputs):
        add_trajectory(ledger, f"t{i}", remaining_tokens=output, context_tokens=200 + 37 * i)
    planner = SearchedPlan(
        policy_context(gpus=gpus, tps=tps, history=past),
        solver=solver,
        cost=cost,
        assignment=assignment,
    )
    ts = list(ledger.trajectories.values())
    return planner.plan(ts, [t.remaining_tokens for t in ts])


def check_valid(plan, problem):
    used = sum(e.shape.tp for e in plan.engines)
    assert problem.pools["h100"] - min(problem.by_shape).tp < used <= problem.pools["h100"], (
        "GPUs stand idle"
    )
    assert all(e.shape in problem.by_shape for e in plan.engines)
    assert all(e.shape.gpu == "h100" and e.max_running == problem.max_running for e in plan.engines)
    names = [e.engine for e in plan.engines]
    assert len(dict.fromkeys(names)) == len(names)
    assert [e.shape.tp for e in plan.engines] == sorted(
        (e.shape.tp for e in plan.engines), reverse=True
    )
    assert [name for name, _ in plan.homes] == names
    placed = [t for _, members in plan.homes for t in members]
    assert sorted(placed) == sorted(problem.trajectories), "not in exactly one group"
    assert plan.estimated_makespan_s > 0.0


@every_solver
@settings(max_examples=12)
@given(
    outputs=st.lists(st.floats(0.0, 40_000.0), min_size=1, max_size=80),
    gpus=st.integers(1, 12),
    tps=st.sampled_from([(1,), (1, 2), (1, 2, 4, 8)]),
)
def test_a_plan_fits_the_gpus_and_homes_every_trajectory_once(solver, cost, outputs, gpus, tps):
    problem = problem_of(solver, cost, outputs, gpus=gpus, tps=tps)
    check_valid(problem.solve(), problem)


@every_solver
def test_equal_problems_have_equal_plans(solver, cost):
    outputs = [100.0 + 991.0 * i % 20_000 for i in range(120)]
    first, second = (problem_of(solver, cost, outputs, past=history()) for _ in range(2))
    assert first == second
    assert first.solve() == first.solve() == second.solve()


@every_solver
def test_a_problem_and_its_plan_survive_a_journal(solver, cost):
    problem = problem_of(solver, cost, [50.5 + 333.3 * i for i in range(30)], past=history())
    plan = problem.solve()
    entries = [
        Entry(
            RolloutStarted(time_s=0.0, rollout=RolloutId("r"), trajectories=30),
            (SolvePlan(plan=1, problem=problem),),
        ),
        Entry(PlanSolved(time_s=problem.charged_s, plan=1, resource_plan=plan), ()),
    ]
    back = list(decode(table(entries).to_batches()))
    assert back == entries
    [again] = back[0].commands
    assert again.problem.solve() == plan


@every_solver
def test_engines_alone_leave_homes_to_placement(solver, cost):
    plan = problem_of(solver, cost, [10.0, 5_000.0], assignment="placement").solve()
    assert plan.homes == ()
    assert plan.engines


@pytest.mark.parametrize(
    ("outputs", "planned"), [([3_000.0] * 9, False), ([9.0, 900.0, 30_000.0], True)]
)
def test_homes_are_planned_only_from_predictions_that_vary(outputs, planned):
    plan = problem_of("exact", "context", outputs, assignment="auto", past=history()).solve()
    assert bool(plan.homes) == planned
    assert plan.engines


@pytest.mark.parametrize("past", [None, history()])
def test_ties_give_no_homes_and_any_ranking_does(past):
    def homes(outputs):
        return problem_of("anneal", "paper", outputs, assignment="ranked", past=past).homes

    assert not homes([3_000.0] * 9)
    assert homes([1_500.0, 3_000.0, 6_000.0])  # they spread half as much as history
    assert homes([9.0, 900.0, 30_000.0])
    if past is not None:
        assert not homes([3_000.0, 3_000.0, 3_100.0])


def test_degrees_whose_engines_hold_too_little_kv_are_not_planned():
    ledger = ledger_of()
    ts = [add_trajectory(ledger, f"t{i}", context_tokens=11_500) for i in range(9)]
    remaining = [1_000.0] * 9  # contexts of 12,000 tokens on average, 16 slots: 192,000 tokens

    def tps(share):
        planner = SearchedPlan(policy_context(), solver="anneal", least_full_slots=share)
        return sorted(shape.tp for shape in planner.plan(ts, remaining).by_shape)

    assert tps(0.0) == tps(0.3125) == [1, 2, 4, 8]  # 60,000 tokens at TP 1
    assert tps(0.32) == [2, 4, 8]
    assert tps(99.0) == [8]  # none holds so much: the largest
    empty = SearchedPlan(policy_context(), solver="anneal", least_full_slots=1.0).plan([], [])
    assert len(empty.by_shape) == 4


@pytest.mark.parametrize("solver", CHARGED_S)
def test_the_time_of_the_search_is_charged_by_its_solver(solver):
    problem = problem_of(solver, "context", [10.0])
    assert problem.charged_s == CHARGED_S[solver] > 0.0


@every_solver
def test_what_a_solver_finds_is_no_worse_than_one_engine_for_all(solver, cost):
    outputs = [40_000.0, *[300.0] * 60]
    problem = problem_of(solver, cost, outputs)
    alone = replace(problem, pools={"h100": 1}, by_shape={h100(1): problem.by_shape[h100(1)]})
    assert problem.solve().estimated_makespan_s < 0.6 * alone.solve().estimated_makespan_s


@every_solver
def test_engines_stand_ready_when_no_trajectory_has_arrived_in_time(solver, cost):
    plan = problem_of(solver, cost, [], gpus=6, tps=(2, 4)).solve()
    assert [e.shape.tp for e in plan.engines] == [2, 2, 2]
    assert plan.homes == ()


def test_a_long_tail_gets_a_wide_engine_and_the_rest_narrow_ones():
    plan = problem_of("exact", "context", [60_000.0, *[3_000.0] * 100], gpus=32).solve()
    [wide, *narrow] = plan.engines
    assert wide.shape.tp > max(e.shape.tp for e in narrow)
    assert plan.homes[0][1][0] == "t0"


def test_another_seed_may_anneal_to_another_plan_and_never_to_an_invalid_one():
    problem = problem_of("anneal", "paper", [100.0 + 700 * i for i in range(40)], gpus=12)
    for seed in range(5):
        check_valid(replace(problem, seed=seed).solve(), problem)


def test_lengths_without_history_are_the_predictions_and_at_least_one():
    assert estimated_lengths(None, [0.0, 7.5]) == [1.0, 7.5]
    assert max(estimated_lengths(history(), [10.0, 10.1, 10.2])) > 1_000.0


def test_the_problem_of_a_planner_has_the_values_of_its_arguments():
    problem = problem_of("exact", "context", [5.0, 6.0], past=history())
    assert isinstance(problem, JointProblem)
    assert problem.trajectories == ("t0", "t1")
    assert problem.context_tokens == (200, 237)
    assert problem.appended_per_output == history().appended_per_output
    assert problem.tool_s_per_output == history().tool_s_per_output
    assert SearchedPlan(policy_context(), solver="exact").needs_all
