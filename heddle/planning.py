"""A plan for a trace without replaying it: engines, homes and the estimated end.

It is the plan that a run with the same planner makes once all trajectories have arrived, from the
same cost estimates. Only oracles read the lengths in the trace.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.knowledge import HistorySource, extras, model_used
from heddle.plugins import load_part
from heddle.setup import Workspace, layout_profile
from heddle.workload import CapacityError, capacity_tokens, filled_counts
from heddle_core.estimate.ordered import Cost
from heddle_core.ids import GroupId, RolloutId, TrajectoryId
from heddle_core.parts.planner.searched import SearchedPlan
from heddle_core.policy import PolicyContext, Predictor
from heddle_core.solve.joint import JointProblem, SolvedPlan, Solver
from heddle_core.trajectory import Trajectory
from heddle_sim.profile_files import Profile
from heddle_trace.complete import FillReport
from heddle_trace.schema import Trace, TrajectoryScript

SCHEMA = "heddle.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The report of `heddle plan`."""

    config: RunConfig
    trace: Trace
    fill: FillReport
    profile: Profile
    left_out: tuple[int, ...]
    """TP degrees whose engines do not hold the trace's largest context."""
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

    @property
    def tp_mix(self) -> dict[int, int]:
        """Engines of each TP degree, widest first."""
        tps = [group.shape.tp for group in self.solved.groups]
        return {tp: tps.count(tp) for tp in dict.fromkeys(tps)}

    def groups(self) -> list[dict[str, Any]]:
        """One row for each engine: members, their estimated lengths and end."""
        lengths = self.problem.output_tokens
        rows = []
        for number, group in enumerate(self.solved.groups):
            tokens = [lengths[k] for k in group.members]
            rows.append(
                {
                    "engine": f"e{number}",
                    "tp": group.shape.tp,
                    "members": len(tokens),
                    "longest_tokens": max(tokens, default=None),
                    "shortest_tokens": min(tokens, default=None),
                    "estimated_end_s": group.end_s,
                }
            )
        return rows

    def plain(self) -> dict[str, Any]:
        """As JSON; equal inputs give equal values but for `solver_s`."""
        problem = self.problem
        return {
            "schema": SCHEMA,
            "trace": {
                "name": self.trace.name,
                "trajectories": len(problem.trajectories),
                "sha256": self.trace.sha256,
                **filled_counts(self.fill),
            },
            "cluster": {
                "gpus": sum(problem.pools.values()),
                "gpu": self.profile.gpu,
                "model": self.profile.model,
                "profile": f"{self.profile.model}.{self.profile.gpu}",
                **self.profile.marks,
                "max_running": problem.max_running,
                "tp_choices": sorted(shape.tp for shape in problem.by_shape),
                "tp_left_out": list(self.left_out),
            },
            "history": self.history.plain(),
            "predictor": self.predictor,
            "predictor_model": self.predictor_model,
            "planner": problem.solver,
            "cost": problem.cost,
            "tp_mix": {str(tp): count for tp, count in self.tp_mix.items()},
            "groups": self.groups(),
            "estimated_makespan_s": self.solved.makespan_s,
            "bound_s": self.bound_s,
            "solver_s": self.solver_s,
        }


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
        ConfigError: the portfolio with another cost than its own, no predictor of this name, or a
            history or a model made from the trace itself.
        CapacityError: no TP degree holds the largest context of the trace.
        ValueError: any other of the packages' errors for bad input.
    """
    if planner == "portfolio" and cost != "context":
        raise ConfigError(
            f"--cost {cost} goes with --planner exact, anneal or libra-dp: the portfolio tries "
            "plans of both costs and judges them by simulation"
        )
    cluster = config.cluster
    shared = Workspace() if workspace is None else workspace
    trace = shared.trace(config.trace)
    scripts, fill = shared.completed(config)
    profile = layout_profile(cluster)
    largest_tokens = int(scripts.largest_context().max())
    choices, left_out = _choices(config, profile, largest_tokens)
    history = shared.history(config, trace)
    model = shared.model(config.predictor_model)
    shapes = tuple(profile.shape(tp) for tp in choices)
    context = PolicyContext(
        pools={profile.gpu: cluster.gpus},
        shape=shapes[0],
        shape_choices=shapes,
        max_running=cluster.max_running,
        cost=profile.cost_estimate(choices),
        history=history.history,
        learned=model.factory,
        seed=config.seed,
    )
    ts = [_arrived(script) for script in scripts]
    predicts = _predictor(predictor, context, scripts)
    used = model_used(model, predicts, trace)
    remaining = [predicts.remaining_tokens(t) for t in ts]
    problem = SearchedPlan(context, solver=planner, cost=cost).plan(ts, remaining)
    began_s = time.perf_counter()
    solved = problem.search()
    solver_s = time.perf_counter() - began_s
    exact = solved if planner == "exact" else replace(problem, solver="exact").search()
    return Planned(
        config=config,
        trace=trace,
        fill=fill,
        profile=profile,
        left_out=left_out,
        largest_tokens=largest_tokens,
        history=history,
        predictor=predictor,
        predictor_model=used,
        spread=list(problem.output_tokens) != [max(1.0, r) for r in remaining],
        problem=problem,
        solved=solved,
        bound_s=exact.bound_s,
        solver_s=solver_s,
    )


def _choices(
    config: RunConfig, profile: Profile, largest_tokens: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """TP degrees to plan with, and those left out because a trajectory does not fit."""
    cluster = config.cluster
    tps = sorted(cluster.tp_choices or profile.tps_on(cluster.gpus))
    holds = {tp: capacity_tokens(profile, tp) for tp in tps}
    choices = tuple(tp for tp in tps if holds[tp] >= largest_tokens)
    if not choices:
        where = f"{profile.model} on {profile.gpu}"
        if not tps:
            raise CapacityError(
                f"{where} needs at least {min(profile.tps)} GPUs, not {cluster.gpus}: take more "
                "GPUs, or a GPU class with more memory"
            )
        said = ", ".join(f"TP {tp} holds {tokens:,}" for tp, tokens in holds.items())
        raise CapacityError(
            f"no engine holds the largest context of the trace, {largest_tokens:,} tokens: {where} "
            f"at {said}. Take more GPUs for a higher TP degree, or a GPU class with more memory"
        )
    return choices, tuple(tp for tp in tps if tp not in choices)


def _predictor(name: str, context: PolicyContext, scripts: Sequence[TrajectoryScript]) -> Predictor:
    extra = extras(f"+{name}", scripts, context.seed)
    kind, part = load_part(name, context, extra=extra)
    if kind != "predictor":
        raise ConfigError(f"--predictor {name}: is no predictor; `heddle policies` lists them")
    predictor: Predictor = part
    return predictor


def _arrived(script: TrajectoryScript) -> Trajectory:
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
