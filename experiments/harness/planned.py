"""What a planner plans once all trajectories of a trace have arrived: engines and their groups.

It is the plan of a run with the same planner, from the same cost estimates, for the study of
planners. Its ends are those of the cost estimate: `heddle.plan` says what to run. Only oracles
read the lengths in the trace.
"""

import time
from collections import Counter
from collections.abc import Sequence
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
from heddle.policies.plugins import load_part
from heddle.policy_inputs import HistorySource, LoadedModel, extras, model_used
from heddle.search.result import arrived
from heddle.setup import Workspace
from heddle.workload import CapacityError
from heddle_core.estimate.ordered import Cost
from heddle_core.ids import EngineShape
from heddle_core.parts.planner import SearchedPlan
from heddle_core.policy import PolicyContext, Predictor
from heddle_core.solve.joint import JointProblem, SolvedPlan, Solver
from heddle_core.trajectory import Trajectory
from heddle_trace.schema import TrajectoryScript

NO_ROLES = "a planner plans engines that prefill and decode: leave out cluster.roles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a planner found."""

    config: RunConfig
    profiles: ClusterProfiles
    left_out: tuple[EngineShape, ...]
    """Shapes whose engines do not hold the trace's largest context."""
    largest_tokens: int
    history: HistorySource
    problem: JointProblem
    solved: SolvedPlan
    bound_s: float
    """No plan of contiguous groups ends earlier under the same (closed-form) cost."""
    solver_s: float
    """Wall time of the search."""
    arrived: tuple[Trajectory, ...]
    """What is known of the trajectories before anything has run."""

    @property
    def makespan_s(self) -> float:
        """Estimated makespan."""
        return self.solved.makespan_s

    @property
    def mix(self) -> dict[EngineShape, int]:
        """Engines of each shape, widest first."""
        return dict(Counter(group.shape for group in self.solved.groups))

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


def plan(
    config: RunConfig,
    *,
    planner: Solver = "portfolio",
    cost: Cost = "context",
    predictor: str = "learned",
    workspace: Workspace | None = None,
) -> Planned:
    """Plan a rollout of a trace on `config.cluster`, whose own `tp` does not matter.

    Give the same `workspace` to plans that have inputs in common.

    Raises:
        ConfigError: engines with roles, the portfolio with another cost than its own, no predictor
            of this name, or a history or a model of the trace itself.
        CapacityError: no TP degree holds the largest context of the trace.
        ValueError: any other of the packages' errors for bad input.
    """
    require(
        planner != "portfolio" or cost == "context",
        f"cost {cost} goes with planner exact, anneal or libra-dp: the portfolio "
        "tries plans of both costs and judges them by simulation",
    )
    cluster = config.cluster
    require(not cluster.roles, NO_ROLES)
    shared = Workspace() if workspace is None else workspace
    scripts, _, trace = shared.completed(config)
    profiles = load_profiles(cluster, check_tp=False)
    largest_tokens = int(scripts.largest_context().max())
    found = [_choices(each, largest_tokens) for each in profiles.classes]
    shapes, left_out = (tuple(chain.from_iterable(each)) for each in zip(*found, strict=True))
    history, model = shared.history(config, trace), shared.model(config.predictor_model)
    context = _context(config, profiles, shapes, history, model)
    ts = [arrived(script) for script in scripts]
    predicts = _predictor(predictor, context, scripts)
    model_used(model, predicts, trace)
    remaining = [predicts.remaining_tokens(t) for t in ts]
    problem = SearchedPlan(context, solver=planner, cost=cost).plan(ts, remaining)
    began_s = time.perf_counter()
    solved = problem.search()
    solver_s = time.perf_counter() - began_s
    return Planned(
        config=config,
        profiles=profiles,
        left_out=left_out,
        largest_tokens=largest_tokens,
        history=history,
        problem=problem,
        solved=solved,
        bound_s=_bound_s(problem, solved),
        solver_s=solver_s,
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
        raise ConfigError(f"{name} is no predictor; `heddle policies list` lists them")
    predictor: Predictor = part
    return predictor
