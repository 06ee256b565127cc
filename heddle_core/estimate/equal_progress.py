"""Estimated makespan when all trajectories advance alike, and engines widen late in the rollout.

Nothing is known of single lengths here, only their distribution. Once every trajectory has made
`x` output tokens, the longer ones are left; `n` of them share an engine. With a batch of `b`, each
with `c` tokens of context, and `a` tokens that tools append per output token, an output token takes

    iteration(b) = t0 + b * (t1 + t2 * c + prefill * a)
    pace         = iteration(b) + tool seconds per output token    b: those of `n` not in a tool
    pace         = iteration(b) * n / b                            b: the most that fits, if less

seconds, and the makespan is the sum of the paces over `x`. All engines have one shape. Late in the
rollout they may change to the widest one, for the price of their start and the prefill, or load, of
every context.

Trajectories do not in fact advance alike: some wait for a first slot, and others are done early.
That matters little, since an engine makes as many tokens either way.
"""

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray
from heddle_core.estimate.history import History
from heddle_core.ids import EngineShape

_BEYOND = 8
"""Lengths beyond history's last quantile."""

_HALVINGS = 40
"""Of the interval that holds a batch; more than a double has digits for."""


def equal_progress_s(
    history: History,
    by_shape: Mapping[EngineShape, StepCost],
    *,
    gpus: int,
    trajectories: int,
    prompt_tokens: float,
    max_running: int,
    start_s: float,
    widened_at: int,
) -> dict[EngineShape, float]:
    """Return the estimated makespan in seconds by the shape that all engines begin with.

    Shapes of which `gpus` hold no whole number are left out. `prompt_tokens` is the mean. With
    `widened_at` trajectories left or fewer, all engines change to the widest shape, in `start_s`,
    as soon as that brings the end forward.
    """
    probabilities, lengths = _quantiles(history, trajectories)
    made = np.concatenate(([0.0], lengths))
    middle, tokens = 0.5 * (made[1:] + made[:-1]), np.diff(made)
    longer = 1.0 - 0.5 * (probabilities + np.concatenate(([0.0], probabilities[:-1])))
    left = np.maximum(trajectories * longer, 1.0)
    context = prompt_tokens + middle * (1.0 + history.appended_per_output)
    shapes = sorted((s for s in by_shape if gpus % s.tp == 0), key=lambda s: s.tp)
    if not shapes:
        return {}
    spans, prices = [], []
    for shape in shapes:
        cost, engines = by_shape[shape], gpus // shape.tp
        spans.append(tokens * _pace_s(cost, left / engines, context, history, max_running))
        prices.append(start_s + cost.restore_s * left * context / engines)
    ends = np.zeros(len(shapes))
    for k in reversed(range(len(tokens))):
        ends = ends + np.array([span[k] for span in spans])
        if left[k] <= widened_at:
            ends = np.minimum(ends, ends[-1] + prices[-1][k])
    first_s = [
        by_shape[shape].prefill_s * prompt_tokens * trajectories / (gpus // shape.tp)
        for shape in shapes
    ]
    return dict(zip(shapes, (ends + np.array(first_s)).tolist(), strict=True))


def _quantiles(history: History, trajectories: int) -> tuple[FloatArray, FloatArray]:
    """Probabilities and lengths, up to the longest to be expected of so many trajectories.

    That is history's longest, if they are so many that one lies beyond its last quantile. Between
    the two, log lengths are proportional to normal scores.
    """
    lengths = np.maximum(np.asarray(history.output_quantiles, dtype=np.float64), 1.0)
    probabilities = (np.arange(len(lengths)) + 0.5) / len(lengths)
    last = 1.0 - 0.5 / trajectories
    if last <= probabilities[-1] or history.longest_output_tokens <= lengths[-1]:
        return probabilities, lengths
    beyond = 1.0 - np.geomspace(1.0 - probabilities[-1], 1.0 - last, _BEYOND + 1)[1:]
    scores = [NormalDist().inv_cdf(float(p)) for p in (probabilities[-1], *beyond)]
    share = (np.array(scores[1:]) - scores[0]) / (scores[-1] - scores[0])
    further = lengths[-1] * (history.longest_output_tokens / lengths[-1]) ** share
    return np.concatenate((probabilities, beyond)), np.concatenate((lengths, further))


def _pace_s(
    cost: StepCost, each: FloatArray, context: FloatArray, history: History, max_running: int
) -> FloatArray:
    """Seconds per output token with `each` trajectories on an engine, all arrays by length."""
    tool_s = history.tool_s_per_output
    sequence_s = cost.t1_s + cost.t2_s * context + cost.prefill_s * history.appended_per_output
    most = np.clip(cost.kv_capacity_tokens / context, 1.0, max_running)
    # The batch that `each` trajectories make, less those in tools: b = each * i(b) / (i(b) + tool).
    low, high = np.zeros_like(each), each.copy()
    for _ in range(_HALVINGS):
        batch = 0.5 * (low + high)
        iteration_s = cost.t0_s + sequence_s * batch
        less = batch * (iteration_s + tool_s) < each * iteration_s
        low, high = np.where(less, batch, low), np.where(less, high, batch)
    batch = np.minimum(high, most)
    iteration_s = cost.t0_s + sequence_s * batch
    return np.where(high > most, iteration_s * each / batch, iteration_s + tool_s)
