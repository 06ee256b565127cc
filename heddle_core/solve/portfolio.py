"""Several plans, each simulated by the cost estimate, and the best taken.

Closed-form costs rank plans well but are wrong at the edges: few huge members that hardly fit, or
long tools. `simulate_group` therefore evaluates candidates from different costs and mixes, and the
best are refined: each engine's closed form is scaled by its error against the simulation of its
group, and the groups are cut again for the same engines.

Simulation takes most of the time, so it stops where it cannot change the result: a plan is
simulated once, latest group first, and no further than to a group that ends too late. Of a plan of
thousands of engines only some groups are simulated; the error of the closed form is interpolated in
between.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Final

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import (
    FloatArray,
    IntArray,
    SegmentCost,
    Work,
    context_costs,
    longest_first,
)
from heddle_core.estimate.paper_cost import paper_costs
from heddle_core.estimate.simulate_group import simulate_group
from heddle_core.ids import EngineShape
from heddle_core.solve.class_shares import class_shares
from heddle_core.solve.exact import exact_plan, level_plan
from heddle_core.solve.group_plan import GroupPlan, ends_s, shapes_of
from heddle_core.solve.presorted import search_partition

_HOPELESS: Final = 1.5
"""Candidates estimated this much later than the best are dropped without simulation: the closed
form was at most a fifth too early, and overloaded groups are slow to simulate."""

_LEVELLED_GPUS: Final = 8_192
"""Rounds of `level_plan` times GPUs: 8 s of search for a million trajectories on 8,192."""

_ROUNDS_OVER_CLASSES: Final = 16
"""Groups that are levelled one by one with several classes, whose idle GPUs are many at times."""

_TOLERANCE_OVER_CLASSES: Final = 1e-2
"""Of these rounds, each of which would take as long as the exact plan otherwise."""

MOST_SIMULATED: Final = 128
"""Groups of one plan that are simulated, 2 ms each. On 640 GPUs the plans found with 64 to 256 of
304 groups simulated end earlier than with all: errors of single groups are smoothed."""


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
        return max(self.ends_s, default=0.0)


class PlanSimulation:
    """Simulates plans that cut the trajectories in one order; each plan once."""

    def __init__(
        self,
        work: Work,
        order: IntArray,
        by_shape: Mapping[EngineShape, StepCost],
        *,
        max_running: int,
    ) -> None:
        """`order` lists positions in `work`, longest first."""
        self.order = order
        self._work, self._by_shape, self._max_running = work.take(order), by_shape, max_running
        self.costs = context_costs(self._work, by_shape, max_running=max_running)
        self._known: dict[tuple[tuple[EngineShape, ...], tuple[int, ...]], tuple[float, ...]] = {}

    def estimated_s(self, plan: GroupPlan) -> FloatArray:
        """End of every group by the closed form."""
        return np.array(ends_s(self.costs, plan.shapes, plan.bounds))

    def ends_s(self, plan: GroupPlan, *, limit_s: float = math.inf) -> tuple[float, ...] | None:
        """Simulated end of every group; None once a group has ended after `limit_s`."""
        known = self._known.get((plan.shapes, plan.bounds))
        if known is not None:
            return known
        estimated = self.estimated_s(plan)
        chosen = _evenly(plan.shapes, MOST_SIMULATED)
        ends = np.zeros(len(plan.shapes))
        for k in chosen[np.argsort(-estimated[chosen], kind="stable")].tolist():
            group = self._work.take(slice(plan.bounds[k], plan.bounds[k + 1]))
            cost = self._by_shape[plan.shapes[k]]
            ends[k] = simulate_group(group, cost, max_running=self._max_running).end_s
            if ends[k] > limit_s:
                return None
        if len(chosen) < len(ends):
            ends = _interpolated(plan.shapes, chosen, ends, estimated)
        known = self._known[plan.shapes, plan.bounds] = tuple(ends.tolist())
        return known

    def refine(self, candidate: Candidate, *, rounds: int) -> Candidate:
        """Cut the groups of `candidate` again, engine by engine corrected; the best of all rounds.

        The candidate must have this order, and keeps its name.
        """
        best = now = candidate
        for left in reversed(range(rounds)):
            factors = _ratios(np.array(now.ends_s), self.estimated_s(now.plan))
            costs = [self.costs[shape] for shape in now.plan.shapes]
            found = search_partition(
                costs, len(self._work), tolerance=1e-4, factors=factors.tolist()
            )
            plan = replace(
                now.plan,
                bounds=(0, *accumulate(found.sizes)),
                makespan_s=found.makespan_s,
                bound_s=0.0,
            )
            # What no round follows counts only if it is better.
            limit_s = math.inf if left else math.nextafter(best.simulated_s, 0.0)
            ends = self.ends_s(plan, limit_s=limit_s)
            if ends is None:
                break
            now = replace(now, plan=plan, ends_s=ends)
            if now.simulated_s < best.simulated_s:
                best = now
        return best


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
    `refined` (at least 1) of them also after `rounds` of refinement. Those that end later than
    these may be left out. With GPUs of several classes: the exact plan over all of them, and the
    best candidates of each class for its share of the trajectories (`class_shares`); where the
    first leaves GPUs idle, the levelled plan too, which comes before equal ones. Raises ValueError
    when no shape fits.
    """
    if len(pools) > 1:
        return _over_classes(work, by_shape, pools, max_running=max_running, rounds=rounds)
    count = len(work)
    by_solo = longest_first(work, by_shape[min(by_shape)])
    by_output = np.argsort(-work.output_tokens, kind="stable")
    aware = PlanSimulation(work, by_solo, by_shape, max_running=max_running)
    published = PlanSimulation(work, by_output, by_shape, max_running=max_running)
    published_costs = paper_costs(work.take(by_output), by_shape, max_running=max_running)
    plans = {
        "exact-context": (aware, exact_plan(aware.costs, count, pools)),
        "level-context": (aware, level_plan(aware.costs, count, pools, rounds=_levelled(pools))),
        "exact-paper": (published, exact_plan(published_costs, count, pools)),
    }
    for shape in sorted(by_shape):
        if shape.gpus <= pools[shape.gpu]:
            uniform = uniform_plan(aware.costs, count, pools, shape)
            plans[f"uniform-tp{shape.tp}"] = (aware, uniform)
    estimated = {
        name: float(simulation.estimated_s(plan).max(initial=0.0))
        for name, (simulation, plan) in plans.items()
    }
    hopeless_s = _HOPELESS * min(estimated.values())
    tried: dict[str, Candidate] = {}
    for name in sorted(plans, key=lambda name: estimated[name]):
        simulation, plan = plans[name]
        if estimated[name] > hopeless_s:
            break
        simulated = sorted(candidate.simulated_s for candidate in tried.values())
        limit_s = simulated[refined - 1] if len(simulated) >= refined else math.inf
        ends = simulation.ends_s(plan, limit_s=limit_s)
        if ends is not None:
            tried[name] = Candidate(name=name, order=simulation.order, plan=plan, ends_s=ends)
    found = [tried[name] for name in plans if name in tried]
    found.sort(key=lambda candidate: candidate.simulated_s)
    better: list[Candidate] = []
    cuts: dict[tuple[object, ...], Candidate] = {}
    for candidate in found[:refined]:
        simulation, plan = plans[candidate.name]
        key = (id(simulation), plan.shapes, plan.bounds)
        if key not in cuts:
            cuts[key] = simulation.refine(candidate, rounds=rounds)
        better.append(replace(cuts[key], name=f"{candidate.name}-refined"))
    return tuple(sorted([*better, *found], key=lambda candidate: candidate.simulated_s))


def _over_classes(
    work: Work,
    by_shape: Mapping[EngineShape, StepCost],
    pools: Mapping[str, int],
    *,
    max_running: int,
    rounds: int,
) -> tuple[Candidate, ...]:
    """Candidates on GPUs of several classes, best first."""
    order = longest_first(work, by_shape[min(by_shape)])
    simulation = PlanSimulation(work, order, by_shape, max_running=max_running)
    plan = exact_plan(simulation.costs, len(work), pools)
    ends = simulation.ends_s(plan)
    assert ends is not None
    found = [Candidate(name="exact-context", order=order, plan=plan, ends_s=ends)]
    if sum(shape.gpus for shape in plan.shapes) < sum(pools.values()):
        found.insert(0, _level_over_classes(simulation, plan, pools))
    first = min(found, key=lambda candidate: candidate.simulated_s)
    refined = replace(simulation.refine(first, rounds=rounds), name=f"{first.name}-refined")
    shares = class_shares(work, by_shape, pools, max_running=max_running, known_s=plan.makespan_s)
    parts = []
    for gpu, index in shares.items():
        if len(index):
            own = {shape: by_shape[shape] for shape in shapes_of(gpu, by_shape)}
            best = portfolio(work.take(index), own, {gpu: pools[gpu]}, max_running=max_running)[0]
            parts.append(replace(best, order=index[best.order]))
    every = [*found, refined, _joined(parts)]
    return tuple(sorted(every, key=lambda candidate: candidate.simulated_s))


def _level_over_classes(
    simulation: PlanSimulation, plan: GroupPlan, pools: Mapping[str, int]
) -> Candidate:
    """The exact `plan` with later groups made earlier on the GPUs that it leaves idle."""
    level = level_plan(
        simulation.costs,
        plan.bounds[-1],
        pools,
        rounds=_ROUNDS_OVER_CLASSES,
        tolerance=_TOLERANCE_OVER_CLASSES,
        known=plan,
        idle_only=True,
    )
    ends = simulation.ends_s(level)
    assert ends is not None
    return Candidate(name="level-context", order=simulation.order, plan=level, ends_s=ends)


def _joined(parts: Sequence[Candidate]) -> Candidate:
    """Plans of several classes, each for its own trajectories, as one."""
    bounds = [0]
    for part in parts:
        bounds += [bounds[-1] + bound for bound in part.plan.bounds[1:]]
    plan = GroupPlan(
        shapes=tuple(chain.from_iterable(part.plan.shapes for part in parts)),
        bounds=tuple(bounds),
        makespan_s=max(part.plan.makespan_s for part in parts),
    )
    return Candidate(
        name="by-class",
        order=np.concatenate([part.order for part in parts]),
        plan=plan,
        ends_s=tuple(chain.from_iterable(part.ends_s for part in parts)),
    )


def _levelled(pools: Mapping[str, int]) -> int:
    """Groups that are levelled one by one, each in the time of an exact plan."""
    return max(1, min(8, _LEVELLED_GPUS // max(1, sum(pools.values()))))


def uniform_plan(
    costs: Mapping[EngineShape, SegmentCost],
    trajectories: int,
    pools: Mapping[str, int],
    shape: EngineShape,
) -> GroupPlan:
    """As many engines of `shape` as fit, with the best contiguous groups."""
    engines = pools[shape.gpu] // shape.gpus
    found = search_partition([costs[shape]] * engines, trajectories, tolerance=1e-6)
    return GroupPlan(
        shapes=(shape,) * engines, bounds=(0, *accumulate(found.sizes)), makespan_s=found.makespan_s
    )


def _evenly(shapes: tuple[EngineShape, ...], most: int) -> IntArray:
    """Choose about `most` engines, those of each shape at even distances, the outer ones included.

    All if there are no more.
    """
    if len(shapes) <= most:
        return np.arange(len(shapes))
    chosen: list[IntArray] = []
    for shape in dict.fromkeys(shapes):
        mine = _engines_of(shape, shapes)
        count = min(len(mine), max(2, round(most * len(mine) / len(shapes))))
        chosen.append(mine[np.linspace(0, len(mine) - 1, count).round().astype(np.int64)])
    return np.concatenate(chosen)


def _interpolated(
    shapes: tuple[EngineShape, ...], chosen: IntArray, ends: FloatArray, estimated: FloatArray
) -> FloatArray:
    """Ends of all groups, from those of the chosen ones and the closed form's."""
    every = ends.copy()
    for shape in dict.fromkeys(shapes):
        mine = _engines_of(shape, shapes)
        known = np.intersect1d(chosen, mine)
        ratios = _ratios(ends[known], estimated[known])
        others = np.setdiff1d(mine, known)
        every[others] = estimated[others] * np.interp(others, known, ratios)
    return every


def _engines_of(shape: EngineShape, shapes: tuple[EngineShape, ...]) -> IntArray:
    return np.flatnonzero([each == shape for each in shapes])


def _ratios(ends: FloatArray, estimated: FloatArray) -> FloatArray:
    """How many times as late as estimated; 1 for empty groups."""
    return np.divide(ends, estimated, out=np.ones(len(ends)), where=estimated > 0.0)
