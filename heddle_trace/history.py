"""Summarises a trace of earlier rollouts for policies."""

from collections.abc import Sequence

import numpy as np

from heddle_core.estimate.history import History, Levels
from heddle_core.ids import GroupId
from heddle_trace.schema import TrajectoryScript

_QUANTILES = 256


def history_of(scripts: Sequence[TrajectoryScript]) -> History:
    """Summarise complete trajectories. Raises ValueError without any."""
    if not scripts:
        raise ValueError("a history needs at least one trajectory")
    outputs = np.array([sum(step.output_tokens for step in s.steps) for s in scripts])
    appended = sum(step.tool_tokens for s in scripts for step in s.steps[:-1])
    tool_s = sum(step.tool_s for s in scripts for step in s.steps)
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    groups: dict[GroupId, list[int]] = {}
    for s, output in zip(scripts, outputs, strict=True):
        groups.setdefault(GroupId(s.group), []).append(int(output))
    tasks: dict[str, list[TrajectoryScript]] = {}
    for s in scripts:
        tasks.setdefault(s.task, []).append(s)
    total = float(outputs.sum())
    return History(
        output_quantiles=tuple(float(q) for q in np.quantile(outputs, at)),
        appended_per_output=appended / total,
        tool_s_per_output=tool_s / total,
        group_totals=groups,
        tasks={task: levels_of(own) for task, own in tasks.items()},
        step_output_tokens=total / sum(len(s.steps) for s in scripts),
    )


def levels_of(scripts: Sequence[TrajectoryScript]) -> Levels:
    """Means over trajectories, steps, tool answers and prompts; at least 1 token each."""
    steps = sum(len(script.steps) for script in scripts)
    payloads = [step.tool_tokens for script in scripts for step in script.steps[:-1]]
    made = sum(step.output_tokens for script in scripts for step in script.steps)
    return Levels(
        total_tokens=max(made / len(scripts), 1.0),
        step_tokens=max(made / steps, 1.0),
        payload_tokens=max(sum(payloads) / max(len(payloads), 1), 1.0),
        prompt_tokens=max(sum(s.steps[0].prompt_tokens for s in scripts) / len(scripts), 1.0),
    )
