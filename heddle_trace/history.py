"""Summarises a trace of earlier rollouts for policies."""

from collections.abc import Sequence

import numpy as np

from heddle_core.estimate.group_cost import FloatArray, IntArray
from heddle_core.estimate.history import History, Levels
from heddle_core.ids import GroupId
from heddle_core.loop.epoch import Totals
from heddle_trace.schema import TrajectoryScript
from heddle_trace.table import Scripts

_QUANTILES = 256


def history_of(scripts: Sequence[TrajectoryScript]) -> History:
    """Summarise complete trajectories. Raises ValueError without any."""
    if not scripts:
        raise ValueError("a history needs at least one trajectory")
    columns = Scripts.of(scripts)
    outputs = columns.total("output_tokens")
    at = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    total = float(outputs.sum())
    quantiles = np.quantile(outputs, at)
    tool_s, appended = _rates_beyond(columns, outputs, quantiles)
    return History(
        output_quantiles=tuple(float(q) for q in quantiles),
        tool_s_beyond=tuple(tool_s.tolist()),
        appended_beyond=tuple(appended.tolist()),
        appended_per_output=_appended(columns) / total,
        tool_s_per_output=sum(columns.step("tool_s").plain()) / total,
        group_totals={
            GroupId(name): outputs[own].tolist()
            for name, own in columns.trajectory("group").occurring().items()
        },
        tasks={
            name: levels_of(columns.take(own))
            for name, own in columns.trajectory("task").occurring().items()
        },
        step_output_tokens=total / int(columns.counts.sum()),
        longest_output_tokens=float(outputs.max()),
        trajectories=len(columns),
    )


def totals_by_epoch(scripts: Sequence[TrajectoryScript]) -> list[Totals]:
    """Output tokens by prompt in each epoch, the newest last.

    An epoch begins with the first step of training in which a prompt comes again. Trajectories
    without a step are of the oldest.
    """
    columns = Scripts.of(scripts)
    outputs = columns.total("output_tokens").tolist()
    names = [GroupId(name) for name in columns.trajectory("group").plain()]
    steps = [-1 if step is None else step for step in columns.trajectory("rl_step").plain()]
    epochs: list[dict[GroupId, list[int]]] = [{}]
    of_step: dict[GroupId, int] = {}
    """Step in which each prompt of the newest epoch came."""
    for place in sorted(range(len(steps)), key=steps.__getitem__):
        name = names[place]
        if of_step.setdefault(name, steps[place]) != steps[place]:
            of_step = {name: steps[place]}
            epochs.append({})
        epochs[-1].setdefault(name, []).append(outputs[place])
    return list(epochs)


def _rates_beyond(
    columns: Scripts, outputs: IntArray, quantiles: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What tools take in seconds, and append in tokens, per output token of the longer ones.

    Long trajectories may call tools less often for their tokens than short ones.
    """
    order = np.argsort(-outputs, kind="stable")
    lengths = outputs[order]
    made = np.cumsum(lengths.astype(np.float64))
    tool_s = np.cumsum(np.add.reduceat(columns.step("tool_s").values, columns.first)[order]) / made
    last = columns.table.rows["tool_tokens"][columns.stop - 1]
    appended = np.cumsum((columns.total("tool_tokens") - last)[order]) / made
    row = np.maximum(np.searchsorted(-lengths, -quantiles, side="right"), 1) - 1
    return tool_s[row], appended[row]


def levels_of(scripts: Sequence[TrajectoryScript]) -> Levels:
    """Means over trajectories, steps, tool answers and prompts; at least 1 token each."""
    columns = Scripts.of(scripts)
    count, steps = len(columns), int(columns.counts.sum())
    made = int(columns.total("output_tokens").sum())
    prompts = int(columns.table.rows["prompt_tokens"][columns.start].sum())
    return Levels(
        total_tokens=max(made / count, 1.0),
        step_tokens=max(made / steps, 1.0),
        payload_tokens=max(_appended(columns) / max(steps - count, 1), 1.0),
        prompt_tokens=max(prompts / count, 1.0),
    )


def _appended(scripts: Scripts) -> int:
    """Tokens that tools appended; nothing reads what the last one did."""
    last = scripts.table.rows["tool_tokens"][scripts.stop - 1]
    return int(scripts.total("tool_tokens").sum()) - int(last.sum())
