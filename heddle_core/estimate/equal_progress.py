"""Estimated makespan on engines of one shape when all trajectories advance alike.

Nothing is known of single lengths here, only their distribution. Once every trajectory has made `x`
output tokens, the longer ones are left; `n` of them share an engine. With a batch `b` and `c` tokens
of context in each sequence, an output token takes

    iteration(b) = t0 + b * (t1 + t2 * c + prefill * tokens that tools append per output token)
    pace         = iteration(b) + tool seconds per output token,  b = n * (share of time not in tools)
    pace         = iteration(b) * n / b,                          b = the most that fits, if that is less

seconds, and the makespan is the sum of the paces over `x`. Trajectories do not in fact advance
alike: some wait for a first slot, and others are done early. Both errors are small beside that of
the lengths, since an engine makes as many tokens either way.
"""

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray
from heddle_core.estimate.history import History
from heddle_core.ids import EngineShape

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
) -> dict[EngineShape, float]:
    """Return the estimated makespan in seconds if all `gpus` carry engines of one shape.

    Shapes of which `gpus` hold no whole number are left out. `prompt_tokens` is the mean.
    """
    probabilities, lengths = _quantiles(history, trajectories)
    made = np.concatenate(([0.0], lengths))
    middle, tokens = 0.5 * (made[1:] + made[:-1]), np.diff(made)
    longer = 1.0 - 0.5 * (probabilities + np.concatenate(([0.0], probabilities[:-1])))
    context = prompt_tokens + middle * (1.0 + history.appended_per_output)
    found: dict[EngineShape, float] = {}
    for shape in sorted(by_shape):
        if gpus % shape.tp == 0:
            cost, engines = by_shape[shape], gpus // shape.tp
            each = np.maximum(trajectories * longer, 1.0) / engines
            prefill_s = cost.prefill_s * prompt_tokens * trajectories / engines
            found[shape] = prefill_s + float(
                _pace_s(cost, each, context, history, max_running) @ tokens
            )
    return found


def _quantiles(history: History, trajectories: int) -> tuple[FloatArray, FloatArray]:
    """Probabilities and lengths, up to the longest to be expected of so many trajectories.

    History's last quantile is not the longest. Beyond it, log lengths go on in proportion to normal
    scores, as between the last tenth of the quantiles; equal last ones are taken for a limit.
    """
    lengths = np.maximum(np.asarray(history.output_quantiles, dtype=np.float64), 1.0)
    probabilities = (np.arange(len(lengths)) + 0.5) / len(lengths)
    last = 1.0 - 0.5 / max(trajectories, 1)
    tenth = len(lengths) // 10
    if tenth < 2 or last <= probabilities[-1] or lengths[-1] == lengths[-2]:
        return probabilities, lengths
    score = NormalDist().inv_cdf
    beyond = 1.0 - np.geomspace(1.0 - probabilities[-1], 1.0 - last, 9)[1:]
    first = score(float(probabilities[-tenth]))
    slope = np.log(lengths[-1] / lengths[-tenth]) / (score(float(probabilities[-1])) - first)
    further = [score(float(p)) - score(float(probabilities[-1])) for p in beyond]
    return (
        np.concatenate((probabilities, beyond)),
        np.concatenate((lengths, lengths[-1] * np.exp(slope * np.array(further)))),
    )


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
