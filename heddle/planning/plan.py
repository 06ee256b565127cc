"""A plan for a trace without replaying it: engines, homes and the estimated end.

It is the plan that a run with the same planner makes once all trajectories have arrived, from the
same cost estimates. Only oracles read the lengths in the trace.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from heddle.cluster.config import ClusterConfig
from heddle.cluster.disaggregation import check_roles
from heddle.cluster.profiles import (
    ClassProfile,
    ClusterProfiles,
    capacity_tokens,
    load_profiles,
)
from heddle.cluster.roles import RoleGpus
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
from heddle_sim.profile_files import Profile
from heddle_trace.complete import FillReport
from heddle_trace.schema import Trace, TrajectoryScript

SCHEMA = "heddle.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSplit:
    """How a plan divides its GPUs by role, and how long it takes."""

    roles: RoleGpus | None
    """None: every engine does both."""
    simulated_s: float
    """Makespan with the estimated lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The report of `heddle plan`."""

    config: RunConfig
    """With roles, the TP degree is the least whose engines hold the largest context."""
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
    simulated_s: float | None = None
    """Makespan with the estimated lengths, where roles were planned: `solved` knows of no engines
    that prefill."""
    splits: tuple[RoleSplit, ...] = ()
    """Those that were simulated, the best first."""
    replayed_s: float | None = None
    """Simulated makespan of the trace itself; None if it was not simulated."""
    speculations: Mapping[str, float] = field(default_factory=dict)
    """Estimated makespan by setting of speculative decoding, where several were tried."""

    @property
    def roles(self) -> RoleGpus | None:
        """GPUs by role; None where every engine does both."""
        return self.config.cluster.role_gpus

    @property
    def least_tp(self) -> int:
        """The least TP degree whose engines hold the largest context."""
        return min(shape.tp for shape in self.problem.by_shape)

    @property
    def makespan_s(self) -> float:
        """Estimated makespan, the simulated one where there is one."""
        return self.solved.makespan_s if self.simulated_s is None else self.simulated_s

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

    def _plain_roles(self) -> dict[str, Any]:
        if self.simulated_s is None:
            return {}
        cluster = self.config.cluster
        return {
            "simulated_makespan_s": self.simulated_s,
            "roles": cluster.roles or None,
            "prefill_tps": list(cluster.prefill_tps),
            "splits": [
                {
                    "roles": None if each.roles is None else str(each.roles),
                    "simulated_makespan_s": each.simulated_s,
                }
                for each in self.splits
            ],
        }

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
        tried = {"speculations_s": dict(self.speculations)} if self.speculations else {}
        by_tp = {str(shape.tp): str(each) for shape, each in found.items()}
        return {"speculation": self.config.cluster.speculation, "drafts": by_tp, **tried}

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
            **self._plain_roles(),
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

    With roles, the plan is of the engines that decode, as if they prefilled everything too, and
    nothing is proven of it; `heddle.planning.roles` simulates it.

    Give the same `workspace` to plans that have inputs in common.

    Raises:
        ConfigError: the portfolio with another cost than its own, no predictor of this name, or a
            history or a model made from the trace itself; a wrong price, or to rank by cost, none.
        CapacityError: no TP degree holds the largest context of the trace.
        ValueError: any other of the packages' errors for bad input.
    """
    require(
        planner != "portfolio" or cost == "context",
        f"policy.cost = {cost} goes with policy.planner = exact, anneal or libra-dp: the portfolio "
        "tries plans of both costs and judges them by simulation",
    )
    cluster = config.cluster
    shared = Workspace() if workspace is None else workspace
    trace = shared.trace(config.trace)
    scripts, fill = shared.completed(config)
    profiles = load_profiles(cluster, check_tp=False)
    prices = prices_for(objective, config.prices, profiles.pools)
    largest_tokens = int(scripts.largest_context().max())
    found = [_choices(each, largest_tokens) for each in profiles.classes]
    shapes, left_out = (tuple(chain.from_iterable(each)) for each in zip(*found, strict=True))
    if cluster.roles:
        config = replace(
            config, cluster=_with_roles(cluster, profiles.only, shapes, largest_tokens)
        )
        shapes = tuple(shape.as_role("decode") for shape in shapes)
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
        bound_s=0.0 if cluster.roles else _bound_s(problem, solved),
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
    """What a policy knows, with engines that decode on the GPUs that do."""
    cost_model = profiles.cost_estimate(shapes)
    by_shape = cost_model.by_shape
    return PolicyContext(
        pools={each.profile.gpu: each.cluster.home_gpus for each in profiles.classes},
        shape=shapes[0],
        shape_choices=shapes,
        max_running=config.cluster.max_running,
        cost=replace(cost_model, by_shape={s: by_shape[s.as_role("both")] for s in shapes}),
        history=history.history,
        learned=model.factory,
        seed=config.seed,
    )


def _bound_s(problem: JointProblem, solved: SolvedPlan) -> float:
    """What the exact planner proves of the same problem."""
    exact = solved if problem.solver == "exact" else replace(problem, solver="exact").search()
    return exact.bound_s


def _with_roles(
    cluster: ClusterConfig, profile: Profile, shapes: Sequence[EngineShape], largest_tokens: int
) -> ClusterConfig:
    """The cluster with engines of the least TP degree to decode, and to prefill unless it has one.

    Raises:
        ConfigError: the roles do not go with the GPUs.
        CapacityError: an engine that prefills does not hold the largest context.
    """
    found = replace(cluster, tp=min(shape.tp for shape in shapes))
    check_roles(found, profile)
    prefill_tp = found.prefill_tp or found.tp
    holds = capacity_tokens(profile, prefill_tp)
    if holds < largest_tokens:
        raise CapacityError(
            f"cluster.prefill_tp={prefill_tp}: an engine that prefills holds {holds:,} tokens, and "
            f"the largest context has {largest_tokens:,}: take prefill_tp={found.tp}"
        )
    return found


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
