"""A plan for a trace without replaying it: engines, homes and the estimated end.

It is the plan that a run with the same planner makes once all trajectories have arrived, from the
same cost estimates. Only oracles read the lengths in the trace.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from heddle.cluster.profiles import (
    ClassProfile,
    ClusterProfiles,
    capacity_tokens,
    load_profiles,
)
from heddle.config import RunConfig
from heddle.config_error import ConfigError, require
from heddle.cost.objective import Objective, prices_for
from heddle.cost.prices import Prices, RunCost
from heddle.policies.plugins import load_part
from heddle.policy_inputs import HistorySource, LoadedModel, extras, model_used
from heddle.setup import Workspace
from heddle.workload import CapacityError, filled_counts
from heddle_core.estimate.ordered import Cost
from heddle_core.ids import EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.parts.planner import SearchedPlan
from heddle_core.policy import PolicyContext, Predictor
from heddle_core.solve.joint import JointProblem, SolvedPlan, Solver
from heddle_core.trajectory import Trajectory
from heddle_rollout.speculation import Speculation
from heddle_trace.complete import FillReport
from heddle_trace.schema import Trace, TrajectoryScript

SCHEMA = "heddle.plan/1"
NO_ROLES = (
    "plan.search = false plans engines that prefill and decode: leave out cluster.roles, or search"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The report of `heddle plan`."""

    config: RunConfig
    trace: Trace
    fill: FillReport
    profiles: ClusterProfiles
    left_out: tuple[EngineShape, ...]
    """Shapes whose engines do not hold the trace's largest context."""
    largest_tokens: int
    history: HistorySource
    predictor: str
    predictor_model: Mapping[str, Any] | None
    """Name and hash of the model that the predictor used; None if it used none."""
    spread: bool
    """Whether lengths are history's quantiles, in the order of the predictions."""
    problem: JointProblem
    solved: SolvedPlan
    bound_s: float
    """No plan of contiguous groups ends earlier under the same (closed-form) cost."""
    solver_s: float
    """Wall time of the search."""
    prices: Prices
    objective: Objective
    arrived: tuple[Trajectory, ...]
    """What is known of the trajectories before anything has run."""
    replayed_s: float | None = None
    """Simulated makespan of the trace itself; None if it was not simulated."""

    @property
    def makespan_s(self) -> float:
        """Estimated makespan."""
        return self.solved.makespan_s

    @property
    def mix(self) -> dict[EngineShape, int]:
        """Engines of each shape, widest first."""
        return dict(Counter(group.shape for group in self.solved.groups))

    @property
    def estimate_error(self) -> float | None:
        """Estimated makespan over the trace's, less 1; None if that was not simulated."""
        return None if self.replayed_s is None else self.makespan_s / self.replayed_s - 1.0

    @property
    def run_cost(self) -> RunCost:
        """Of the rollout, if it ends as simulated, or else as estimated."""
        seconds = self.makespan_s if self.replayed_s is None else self.replayed_s
        return self.prices.cost(self.profiles.pools, seconds)

    def groups(self) -> list[dict[str, Any]]:
        """One row for each engine: members, their estimated lengths and end."""
        several, rows = len(self.problem.pools) > 1, []
        for number, group in enumerate(self.solved.groups):
            tokens = [self.problem.output_tokens[k] for k in group.members]
            rows.append(
                {
                    "engine": f"e{number}",
                    **({"gpu": group.shape.gpu} if several else {}),
                    "tp": group.shape.tp,
                    "members": len(tokens),
                    "longest_tokens": max(tokens, default=None),
                    "shortest_tokens": min(tokens, default=None),
                    "estimated_end_s": group.end_s,
                }
            )
        return rows

    def drafts(self) -> dict[EngineShape, Speculation]:
        """Speculative decoding of the plan's engines, by shape; empty without."""
        found = {}
        for shape in self.mix:
            drafts = self.profiles.of(shape.gpu).drafts(shape.tp)
            if drafts is not None:
                found[shape] = drafts.speculation
        return found

    def _plain_speculation(self) -> dict[str, Any]:
        found = self.drafts()
        if not found:
            return {}
        by_tp = {str(shape.tp): str(each) for shape, each in found.items()}
        return {"speculation": self.config.cluster.speculation, "drafts": by_tp}

    def plain(self) -> dict[str, Any]:
        """As JSON; equal inputs give equal values but for `solver_s`."""
        problem, several = self.problem, len(self.problem.pools) > 1
        pools = [{"gpu": gpu, "gpus": gpus} for gpu, gpus in problem.pools.items()]
        return {
            "schema": SCHEMA,
            "trace": {
                "name": self.trace.name,
                "trajectories": len(problem.trajectories),
                "sha256": self.trace.sha256,
                **filled_counts(self.fill),
            },
            "cluster": {
                "gpus": self.config.cluster.gpus,
                "gpu": ", ".join(problem.pools),
                **({"pools": pools} if several else {}),
                "model": self.profiles.model,
                "profile": self.profiles.name,
                **self.profiles.marks,
                "max_running": problem.max_running,
                **self._plain_speculation(),
                "tp_choices": sorted({shape.tp for shape in problem.by_shape}),
                "tp_left_out": [shape.tp for shape in self.left_out],
            },
            "history": self.history.plain(),
            "predictor": self.predictor,
            "predictor_model": self.predictor_model,
            "planner": problem.solver,
            "cost": problem.cost,
            "tp_mix": {
                f"{shape.gpu} {shape.tp}" if several else str(shape.tp): count
                for shape, count in self.mix.items()
            },
            "groups": self.groups(),
            "estimated_makespan_s": self.solved.makespan_s,
            "trace_makespan_s": self.replayed_s,
            "estimate_error": self.estimate_error,
            **self.run_cost.plain(),
            "prices": self.prices.plain(self.profiles.pools),
            "objective": self.objective,
            "bound_s": self.bound_s,
            "solver_s": self.solver_s,
        }


def plan(
    config: RunConfig,
    *,
    planner: Solver = "portfolio",
    cost: Cost = "context",
    predictor: str = "learned",
    objective: Objective = "makespan",
    workspace: Workspace | None = None,
) -> Planned:
    """Plan a rollout of a trace on `config.cluster`, whose own `tp` does not matter.

    Give the same `workspace` to plans that have inputs in common.

    Raises:
        ConfigError: engines with roles, the portfolio with another cost than its own, no predictor
            of this name, a history or a model of the trace itself; a price is wrong or missing.
        CapacityError: no TP degree holds the largest context of the trace.
        ValueError: any other of the packages' errors for bad input.
    """
    require(
        planner != "portfolio" or cost == "context",
        f"policy.cost = {cost} goes with policy.planner = exact, anneal or libra-dp: the portfolio "
        "tries plans of both costs and judges them by simulation",
    )
    cluster = config.cluster
    require(not cluster.roles, NO_ROLES)
    shared = Workspace() if workspace is None else workspace
    trace = shared.trace(config.trace)
    scripts, fill = shared.completed(config)
    profiles = load_profiles(cluster, check_tp=False)
    prices = prices_for(objective, config.prices, profiles.pools)
    largest_tokens = int(scripts.largest_context().max())
    found = [_choices(each, largest_tokens) for each in profiles.classes]
    shapes, left_out = (tuple(chain.from_iterable(each)) for each in zip(*found, strict=True))
    history, model = shared.history(config, trace), shared.model(config.predictor_model)
    context = _context(config, profiles, shapes, history, model)
    ts = [arrived(script) for script in scripts]
    predicts = _predictor(predictor, context, scripts)
    used = model_used(model, predicts, trace)
    remaining = [predicts.remaining_tokens(t) for t in ts]
    problem = SearchedPlan(context, solver=planner, cost=cost).plan(ts, remaining)
    began_s = time.perf_counter()
    solved = problem.search()
    solver_s = time.perf_counter() - began_s
    return Planned(
        config=config,
        trace=trace,
        fill=fill,
        profiles=profiles,
        left_out=left_out,
        largest_tokens=largest_tokens,
        history=history,
        predictor=predictor,
        predictor_model=used,
        spread=list(problem.output_tokens) != [max(1.0, r) for r in remaining],
        problem=problem,
        solved=solved,
        bound_s=_bound_s(problem, solved),
        solver_s=solver_s,
        prices=prices,
        objective=objective,
        arrived=tuple(ts),
    )


def _context(
    config: RunConfig,
    profiles: ClusterProfiles,
    shapes: tuple[EngineShape, ...],
    history: HistorySource,
    model: LoadedModel,
) -> PolicyContext:
    """What a policy knows."""
    return PolicyContext(
        pools={each.profile.gpu: each.cluster.home_gpus for each in profiles.classes},
        shape=shapes[0],
        shape_choices=shapes,
        max_running=config.cluster.max_running,
        cost=profiles.cost_estimate(shapes),
        history=history.history,
        learned=model.factory,
        seed=config.seed,
    )


def _bound_s(problem: JointProblem, solved: SolvedPlan) -> float:
    """What the exact planner proves of the same problem."""
    exact = solved if problem.solver == "exact" else replace(problem, solver="exact").search()
    return exact.bound_s


def _choices(
    each: ClassProfile, largest_tokens: int
) -> tuple[tuple[EngineShape, ...], tuple[EngineShape, ...]]:
    """Shapes of a class to plan with, and those left out because a trajectory does not fit."""
    profile, gpus = each.profile, each.cluster.home_gpus
    tps = sorted(each.tps)
    holds = {tp: capacity_tokens(profile, tp) for tp in tps}
    choices = tuple(tp for tp in tps if holds[tp] >= largest_tokens)
    if not choices:
        where = f"{profile.model} on {profile.gpu}"
        if not tps:
            raise CapacityError(
                f"{where} needs at least {min(profile.tps)} GPUs, not {gpus}: take more "
                "GPUs, or a GPU class with more memory"
            )
        said = ", ".join(f"TP {tp} holds {tokens:,}" for tp, tokens in holds.items())
        raise CapacityError(
            f"no engine holds the largest context of the trace, {largest_tokens:,} tokens: {where} "
            f"at {said}. Take more GPUs for a higher TP degree, or a GPU class with more memory"
        )
    left_out = (tp for tp in tps if tp not in choices)
    return tuple(map(profile.shape, choices)), tuple(map(profile.shape, left_out))


def _predictor(name: str, context: PolicyContext, scripts: Sequence[TrajectoryScript]) -> Predictor:
    extra = extras(f"+{name}", scripts, context.seed)
    kind, part = load_part(name, context, extra=extra)
    if kind != "predictor":
        raise ConfigError(
            f"policy.predictor = {name}: is no predictor; `heddle policies list` lists them"
        )
    predictor: Predictor = part
    return predictor


def arrived(script: TrajectoryScript) -> Trajectory:
    """A trajectory as a policy sees it on arrival."""
    prompt_tokens = script.steps[0].prompt_tokens
    return Trajectory(
        id=TrajectoryId(script.id),
        rollout=RolloutId("rollout"),
        group=GroupId(script.group),
        task=script.task,
        weights_version=0,
        prompt_tokens=prompt_tokens,
        arrived_s=0.0,
        context_tokens=prompt_tokens,
        runnable_s=0.0,
    )
