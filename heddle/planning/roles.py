"""Plans with engines that prefill and engines that decode: how long they take, and the best split.

No cost estimate of a group knows of a second engine, of copies of KV, or of queues for a prefill.
Splits are therefore simulated: the trajectories of the plan, with the lengths, steps and tools that
it estimates and no others, under `heddle` with the plan's own planner. Prompts and groups are those
of the trace, which a policy knows before anything has run.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from heddle.cluster.profiles import capacity_tokens
from heddle.cluster.role_choice import role_choices
from heddle.comparison.tuning import speculations
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.planning.plan import Planned, RoleSplit, plan
from heddle.planning.simulation import simulated_s
from heddle.setup import Workspace
from heddle_trace.schema import StepScript, TrajectoryScript
from heddle_trace.table import Scripts

OnSplit = Callable[[int, int], None]
"""Called with the numbers of simulated and of all splits."""


def plan_with_drafts(config: RunConfig, speculation: str | None, **options: Any) -> Planned:
    """Plan as `plan_by_role`, with the setting of ``best`` whose estimated makespan is least.

    Raises:
        ValueError: what `plan_by_role` raises, or the model has no drafter.
    """
    if speculation is None:
        return plan_by_role(config, **options)
    cluster = config.cluster
    plans = [
        plan_by_role(replace(config, cluster=replace(cluster, speculation=each)), **options)
        for each in speculations(cluster, speculation)
    ]
    tried = {each.config.cluster.speculation: each.makespan_s for each in plans}
    return replace(min(plans, key=lambda each: each.makespan_s), speculations=tried)


def plan_by_role(
    config: RunConfig,
    *,
    best: bool,
    workspace: Workspace | None = None,
    on_split: OnSplit | None = None,
    **options: Any,
) -> Planned:
    """Plan a rollout on the split of `config.cluster.roles`, or on the best one.

    The best is that whose simulated makespan is least: of some splits near a closed form, and of
    engines that all do both. Without roles, and without `best`, it is `plan`, which has the other
    `options` too.

    Raises:
        ConfigError: `best` beside given roles, a mix or pools, or too few GPUs for both roles.
        ValueError: what `plan` raises.
    """
    shared = Workspace() if workspace is None else workspace
    cluster = config.cluster
    if best and (cluster.roles or cluster.mix or cluster.pool):
        raise ConfigError(
            "--sweep cluster.roles=best chooses the GPUs of prefill and decode engines of one GPU "
            "class: leave out cluster.roles, cluster.mix and pools, or the sweep"
        )
    first = plan(config, workspace=shared, **options)
    if not best and not cluster.roles:
        return first
    scripts = estimated_scripts(first)
    plans = [first]
    if best:
        # As `plan` has it with roles: all engines of the least TP degree, or wider.
        least = replace(cluster, tp=first.least_tp)
        choices = role_choices(scripts, least)
        if not choices:
            raise ConfigError(
                f"--sweep cluster.roles=best: {cluster.gpus} GPUs are no engines of both roles, of "
                f"TP {least.prefill_tp or least.tp} to prefill and TP {least.tp} to decode: take "
                "more GPUs, or leave the sweep out"
            )
        clusters = [least, *(replace(least, roles=str(roles)) for roles in choices)]
        plans = [
            plan(replace(config, cluster=each), workspace=shared, **options) for each in clusters
        ]
    timed = []
    for number, each in enumerate(plans):
        timed.append(replace(each, simulated_s=simulated_s(each, scripts, "oracle", shared)))
        if on_split is not None:
            on_split(number + 1, len(plans))
    timed.sort(key=lambda each: each.makespan_s)
    splits = [RoleSplit(roles=each.roles, simulated_s=each.makespan_s) for each in timed]
    return replace(timed[0], splits=tuple(splits))


def estimated_scripts(planned: Planned) -> Scripts:
    """The trajectories of a plan as it estimates them, to simulate.

    Each has its prompt and its estimated output, in equal steps as long as history's on average.
    Tools take and append what history has per output token; without one, there are none. Contexts
    end where the KV of the smallest engine of either role does.
    """
    profile, tp = planned.profiles.only, planned.least_tp
    prefill_tp = planned.config.cluster.prefill_tp or tp
    held = min(capacity_tokens(profile, each) for each in (tp, prefill_tp))
    problem, history = planned.problem, planned.history.history
    step_tokens = history.step_output_tokens if history else float("inf")
    appended, tool_s = problem.appended_per_output, problem.tool_s_per_output
    made = []
    for known, output, prompt in zip(
        planned.arrived, problem.output_tokens, problem.context_tokens, strict=True
    ):
        most = max(1.0, (held - prompt) / (1.0 + appended))
        tokens = max(1, int(min(output, most)))
        count = max(1, min(tokens, round(tokens / step_tokens)))
        sizes = [tokens * (k + 1) // count - tokens * k // count for k in range(count)]
        made.append(
            TrajectoryScript(
                id=known.id,
                group=known.group,
                task=known.task,
                arrival_s=0.0,
                steps=_steps(sizes, prompt, appended, tool_s),
                truncated=False,
            )
        )
    return Scripts.of(made)


def _steps(
    sizes: Sequence[int], prompt: int, appended: float, tool_s: float
) -> tuple[StepScript, ...]:
    steps: list[StepScript] = []
    shared = 0
    for number, output in enumerate(sizes):
        last = number == len(sizes) - 1
        tool_tokens = 0 if last else int(appended * output)
        steps.append(
            StepScript(
                prompt_tokens=prompt,
                shared_tokens=shared,
                output_tokens=output,
                tool=None if last else "tool",
                tool_s=0.0 if last else tool_s * output,
                tool_ok=None,
                tool_tokens=tool_tokens,
            )
        )
        shared = prompt + output
        prompt = shared + tool_tokens
    return tuple(steps)
