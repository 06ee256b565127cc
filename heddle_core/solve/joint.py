"""The joint problem as plain data: which engines exist, and the home of each trajectory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import IntArray, Work, work_of
from heddle_core.estimate.ordered import Cost, ordered_costs
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec, ResourcePlan
from heddle_core.solve.anneal import anneal_plan
from heddle_core.solve.class_shares import class_shares
from heddle_core.solve.exact import exact_plan
from heddle_core.solve.group_plan import GroupPlan, ends_s, shapes_of
from heddle_core.solve.libra_dp import libra_dp
from heddle_core.solve.portfolio import portfolio
from heddle_core.solve.presorted import aggregate_short

Solver: TypeAlias = Literal["exact", "anneal", "portfolio", "libra-dp"]

LIBRA_UNITS = 1000
"""The DP over (GPUs, requests) is quadratic in units: shorter trajectories are taken together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointProblem:
    """Which engines exist and which homes, for the shortest estimated makespan.

    All sequences have one entry per trajectory.
    """

    solver: Solver
    cost: Cost
    trajectories: tuple[TrajectoryId, ...]
    output_tokens: tuple[float, ...]
    context_tokens: tuple[int, ...]
    appended_per_output: float
    tool_s_per_output: float
    by_shape: Mapping[EngineShape, StepCost]
    pools: Mapping[str, int]
    """GPUs of each class."""
    max_running: int
    seed: int
    homes: bool
    charged_s: float

    def solve(self) -> ResourcePlan:
        """Search; pure and deterministic."""
        if not self.trajectories:
            return self._fallback_plan()
        return self.resource_plan(self.search())

    def _fallback_plan(self) -> ResourcePlan:
        """Return engines of the least shape: no trajectory has arrived in time."""
        idle = self.resource_plan(SolvedPlan(groups=(), makespan_s=0.0, bound_s=0.0))
        return ResourcePlan(engines=idle.engines)

    def search(self) -> "SolvedPlan":
        """Search, and return the plan in numbers."""
        output = np.asarray(self.output_tokens)
        work = work_of(
            output,
            context_tokens=np.asarray(self.context_tokens),
            appended_tokens=self.appended_per_output * output,
            tool_s=self.tool_s_per_output * output,
        )
        if self.solver == "portfolio":
            best = portfolio(work, self.by_shape, self.pools, max_running=self.max_running)[0]
            return _solved(best.order, best.plan, best.ends_s)
        if self.solver == "exact" or len(self.pools) == 1:
            return self._contiguous(work, self.by_shape, self.pools)
        return self._by_class(work)

    def _contiguous(
        self, work: Work, by_shape: Mapping[EngineShape, StepCost], pools: Mapping[str, int]
    ) -> "SolvedPlan":
        """The plan of a solver that cuts one order of the trajectories."""
        order, costs = ordered_costs(work, by_shape, self.cost, max_running=self.max_running)
        match self.solver:
            case "exact":
                plan = exact_plan(costs, len(work), pools)
            case "anneal":
                plan = anneal_plan(costs, len(work), pools, seed=self.seed)
            case "libra-dp":
                lengths = work.output_tokens[order]
                unit = max(1, len(work) // LIBRA_UNITS)
                cuts = aggregate_short(lengths, below=float(lengths[len(lengths) // 50]), unit=unit)
                plan = libra_dp(costs, cuts, pools)
            case "portfolio":
                raise AssertionError("the portfolio has orders of its own")
        return _solved(order, plan, ends_s(costs, plan.shapes, plan.bounds))

    def _by_class(self, work: Work) -> "SolvedPlan":
        """The plans of a solver for GPUs of one class, for the share of each class."""
        _, costs = ordered_costs(work, self.by_shape, self.cost, max_running=self.max_running)
        shares = class_shares(
            work,
            self.by_shape,
            self.pools,
            max_running=self.max_running,
            known_s=exact_plan(costs, len(work), self.pools).makespan_s,
            cost=self.cost,
        )
        groups: list[Group] = []
        for gpu, index in shares.items():
            if len(index):
                own = {shape: self.by_shape[shape] for shape in shapes_of(gpu, self.by_shape)}
                solved = self._contiguous(work.take(index), own, {gpu: self.pools[gpu]})
                groups += [
                    replace(group, members=tuple(index[list(group.members)].tolist()))
                    for group in solved.groups
                ]
        makespan_s = max(group.end_s for group in groups)
        return SolvedPlan(groups=_widest_first(groups), makespan_s=makespan_s, bound_s=0.0)

    def resource_plan(self, solved: "SolvedPlan") -> ResourcePlan:
        """Name the engines of a plan, widest first, and their members.

        GPUs that the plan does not use become engines of the least shape, for late arrivals and
        for migrations.
        """
        idle: list[Group] = []
        for gpu, gpus in self.pools.items():
            known = shapes_of(gpu, self.by_shape)
            if known:
                spare = gpus - sum(g.shape.gpus for g in solved.groups if g.shape.gpu == gpu)
                idle += [Group(shape=known[0], members=(), end_s=0.0)] * (spare // known[0].gpus)
        engines: list[EngineSpec] = []
        homes: list[tuple[EngineId, tuple[TrajectoryId, ...]]] = []
        for group in (*solved.groups, *idle):
            name = EngineId(f"e{len(engines)}")
            engines.append(EngineSpec(engine=name, shape=group.shape, max_running=self.max_running))
            homes.append((name, tuple(self.trajectories[k] for k in group.members)))
        return ResourcePlan(
            engines=tuple(engines),
            homes=tuple(homes) if self.homes else (),
            estimated_makespan_s=solved.makespan_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One engine of a plan: its shape, its members and their estimated end."""

    shape: EngineShape
    members: tuple[int, ...]
    """Positions in the problem, longest first."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPlan:
    """A plan in numbers; groups stand widest engine first."""

    groups: tuple[Group, ...]
    makespan_s: float
    bound_s: float
    """Proven: under the same cost no plan of contiguous groups ends earlier. 0 where nothing is."""


def _solved(order: IntArray, plan: GroupPlan, ends: Sequence[float]) -> SolvedPlan:
    groups = [
        Group(shape=shape, members=tuple(order[start:stop].tolist()), end_s=end_s)
        for shape, start, stop, end_s in zip(
            plan.shapes, plan.bounds[:-1], plan.bounds[1:], ends, strict=True
        )
    ]
    return SolvedPlan(
        groups=_widest_first(groups),
        makespan_s=max(ends, default=0.0),
        bound_s=plan.bound_s,
    )


def _widest_first(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: -group.shape.gpus))
