"""Several plans, each simulated by the cost estimate, and the best taken.

Closed-form costs rank plans well but are wrong at the edges: few huge members that hardly fit, or
long tools. `simulate_group` therefore evaluates candidates from different costs and mixes, and the
best are refined: each engine's closed form is scaled by its error against the simulation of its
group, and the groups are cut again for the same engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    IntArray,
    ScaledCost,
    SegmentCost,
    Work,
    context_costs,
    longest_first,
)
from heddle_core.estimate.paper_cost import paper_costs
from heddle_core.estimate.simulate_group import simulate_group
from heddle_core.ids import EngineShape
from heddle_core.solve.exact import exact_plan, level_plan
from heddle_core.solve.group_plan import GroupPlan, ends_s, one_class
from heddle_core.solve.presorted_search import search_partition

_HOPELESS = 1.5
"""Candidates estimated this much later than the best are dropped without simulation: the closed
form was at most a fifth too early, and overloaded groups are slow to simulate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan over trajectories in `order`, and how its simulation by the cost estimate ended."""

    name: str
    order: IntArray
    """Positions in the given work, longest first; `plan.bounds` count in this order."""
    plan: GroupPlan
    ends_s: tuple[float, ...]
    """Simulated end of every group."""

    @property
    def simulated_s(self) -> float:
        """Simulated makespan."""
        return max(self.ends_s, default=0.0)


def portfolio(
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    pools: Mapping[str, int],
    *,
    max_running: int,
    rounds: int = 3,
    refined: int = 2,
) -> tuple[Candidate, ...]:
    """Return the candidates, best simulated makespan first; equal ones in the order of trial.

    `work` may stand in any order. Candidates: the exact plan under the context-aware and under the
    published cost, the levelled one, and each uniform mix, all on the GPUs of `pools`; the best
    `refined` of them also after `rounds` of refinement. Raises ValueError when no shape fits, or
    there are several GPU classes.
    """
    count = len(work)
    by_solo = longest_first(work, by_shape[min(by_shape)])
    by_output = np.argsort(-work.output_tokens, kind="stable")
    costs = context_costs(work.take(by_solo), by_shape, max_running=max_running)
    published = paper_costs(work.take(by_output), by_shape, max_running=max_running)
    plans = {
        "exact-context": (by_solo, exact_plan(costs, count, pools)),
        "level-context": (by_solo, level_plan(costs, count, pools)),
        "exact-paper": (by_output, exact_plan(published, count, pools)),
    }
    for shape in sorted(by_shape):
        if shape.tp <= pools[shape.gpu]:
            plans[f"uniform-tp{shape.tp}"] = (by_solo, uniform_plan(costs, count, pools, shape))
    aware = {id(by_solo): costs}
    aware[id(by_output)] = context_costs(work.take(by_output), by_shape, max_running=max_running)
    estimated = {
        name: max(ends_s(aware[id(order)], plan.shapes, plan.bounds), default=0.0)
        for name, (order, plan) in plans.items()
    }
    limit_s = _HOPELESS * min(estimated.values())
    tried = [
        Candidate(
            name=name,
            order=order,
            plan=plan,
            ends_s=simulate_plan(work.take(order), by_shape, plan, max_running=max_running),
        )
        for name, (order, plan) in plans.items()
        if estimated[name] <= limit_s
    ]
    tried.sort(key=lambda candidate: candidate.simulated_s)
    better = [
        refine(
            candidate,
            work,
            by_shape,
            aware[id(candidate.order)],
            max_running=max_running,
            rounds=rounds,
        )
        for candidate in tried[:refined]
    ]
    return tuple(sorted([*better, *tried], key=lambda candidate: candidate.simulated_s))


def uniform_plan(
    costs: Mapping[EngineShape, SegmentCost],
    trajectories: int,
    pools: Mapping[str, int],
    shape: EngineShape,
) -> GroupPlan:
    """As many engines of `shape` as fit, with the best contiguous groups."""
    engines = one_class(pools, costs) // shape.tp
    found = search_partition([costs[shape]] * engines, trajectories, tolerance=1e-6)
    return GroupPlan(
        shapes=(shape,) * engines, bounds=(0, *accumulate(found.sizes)), makespan_s=found.makespan_s
    )


def simulate_plan(
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    plan: GroupPlan,
    *,
    max_running: int,
    grain: float = 1 / 12,
) -> tuple[float, ...]:
    """Simulated end of every group of `plan`; `work` stands in the plan's order."""
    return tuple(
        simulate_group(
            work.take(slice(start, start + size)),
            by_shape[shape],
            max_running=max_running,
            grain=grain,
        ).end_s
        for shape, start, size in zip(plan.shapes, plan.bounds[:-1], plan.sizes(), strict=True)
    )


def refine(
    candidate: Candidate,
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    costs: Mapping[EngineShape, SegmentCost],
    *,
    max_running: int,
    rounds: int,
) -> Candidate:
    """Cut the groups of `candidate` again, engine by engine corrected; the best of all rounds.

    `costs` must be over the candidate's order.
    """
    ordered = work.take(candidate.order)
    best = now = replace(candidate, name=f"{candidate.name}-refined")
    for _ in range(rounds):
        estimated = ends_s(costs, now.plan.shapes, now.plan.bounds)
        scaled = [
            ScaledCost(cost=costs[shape], factor=ahead / end if end > 0 else 1.0)
            for shape, ahead, end in zip(now.plan.shapes, now.ends_s, estimated, strict=True)
        ]
        found = search_partition(scaled, len(ordered), tolerance=1e-4)
        plan = replace(
            now.plan, bounds=(0, *accumulate(found.sizes)), makespan_s=found.makespan_s, bound_s=0.0
        )
        ends = simulate_plan(ordered, by_shape, plan, max_running=max_running)
        now = replace(now, plan=plan, ends_s=ends)
        if now.simulated_s < best.simulated_s:
            best = now
    return best
