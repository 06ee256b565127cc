"""From a trace of earlier rollouts to what a policy may know of them."""

from collections.abc import Sequence

import numpy as np

from heddle_core.history import History
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
    total = float(outputs.sum())
    return History(
        output_quantiles=tuple(float(q) for q in np.quantile(outputs, at)),
        appended_per_output=appended / total,
        tool_s_per_output=tool_s / total,
        group_totals=groups,
        step_output_tokens=total / sum(len(s.steps) for s in scripts),
    )
