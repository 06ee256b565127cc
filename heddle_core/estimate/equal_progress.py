"""Estimated makespan when all trajectories advance alike, and engines widen late in the rollout.

Nothing is known of single lengths here, only their distribution. Once every trajectory has made
`x` output tokens, the longer ones are left, `n` in all. They are spread over the engines for the
most output tokens a second, which assumes that trajectories may move. With a batch of `b`, each
with `c` tokens of context, and for each output token `a` tokens that tools append and `p` prefills,
an engine makes

    rate(b) = b / (t0 + b * (t1 + t2 * c + prefill * a + per_prefill * p))

tokens a second. Those in tools are in no batch: `n` is the sum of all batches, and of the sum of
all rates times the tool seconds per output token. More than the slots or the KV hold wait. An
output token of all takes `n` over the sum of the rates, and the makespan is the sum of that over
`x`. Late in the rollout all engines may change to the widest shape, at the cost of their start
and the prefill, or load, of every context.

A model with experts has two such planes, and its iterations take the lesser (`FillingCost`), so the
makespan has the pace of the plane that is faster at each length. That is exact where all engines
are on one side of their knee; else the rates of single engines are higher still.

Trajectories do not in fact advance alike: some wait for a first slot, and others are done early.
That matters little, since an engine makes as many tokens either way.
"""

from collections.abc import Mapping, Sequence
from statistics import NormalDist

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray
from heddle_core.estimate.history import History
from heddle_core.ids import EngineShape

_BEYOND = 8
"""Lengths beyond history's last quantile."""

_MULTIPLIERS = (1e-15, 1e10)
"""Holds every multiplier that `_pace_s` may find: output tokens a second for one more sequence."""

_HALVINGS = 60
"""Of the interval that holds the logarithm of a multiplier; more than a double has digits for."""

_LEAST_S = 1e-12
"""In place of times of 0."""


def equal_progress_s(
    history: History,
    by_shape: Mapping[EngineShape, StepCost],
    mixes: Sequence[Mapping[EngineShape, int]],
    *,
    widened: Mapping[EngineShape, int],
    trajectories: int,
    prompt_tokens: float,
    prefilled_tokens: float,
    max_running: int,
    start_s: float,
    widened_at: int,
    longest_at: Sequence[float] = (0.5,),
) -> list[list[float]]:
    """Return the estimated makespan in seconds by `longest_at` and by `mixes`, engines by shape.

    `prompt_tokens` is the mean, `prefilled_tokens` the sum over prompts, each counted once. The
    longest trajectory is as long as a quantile `longest_at` of the longest of so many. With
    `widened_at` trajectories left or fewer, the engines change to `widened`, in `start_s`, as soon
    as that brings the end forward.
    """
    stretches = [_stretches(history, trajectories, at) for at in longest_at]
    # Up to history's last quantile they are the same, whatever the longest is.
    distinct, places = np.unique(np.concatenate(stretches), axis=0, return_inverse=True)
    begin, end, left = np.ascontiguousarray(distinct.T)
    tool_s, appended = history.rates_beyond(begin)
    steps = 1.0 / max(history.step_output_tokens, 1.0)
    context = prompt_tokens + 0.5 * (end + begin) * (1.0 + appended)
    shapes = sorted(by_shape, key=lambda shape: shape.gpus)
    costs = [by_shape[shape] for shape in shapes]
    tried = [*mixes, widened]
    engines = np.array([[mix.get(shape, 0) for shape in shapes] for mix in tried], dtype=float)
    below = [cost.below_knee for cost in costs]
    pace = _pace_s(below, engines, left, context, (tool_s, appended, steps), max_running)
    if any(cost.filling for cost in costs):
        filled = [cost.beyond_knee for cost in costs]
        other = _pace_s(filled, engines, left, context, (tool_s, appended, steps), max_running)
        pace = np.minimum(pace, other)
    spans = (end - begin) * pace
    restore_rates = engines @ np.array([1.0 / max(cost.restore_s, _LEAST_S) for cost in costs])
    loaded_s = np.where(left <= widened_at, left * context / restore_rates[-1], np.inf)
    prefill_rates = engines @ np.array([1.0 / max(cost.prefill_s, _LEAST_S) for cost in costs])
    first_s = prefilled_tokens / prefill_rates
    counts = np.cumsum([len(each) for each in stretches])[:-1]
    return [
        [float(s) for s in (_ends_s(spans[:, own], start_s, loaded_s[own]) + first_s)[:-1]]
        for own in np.split(places.ravel(), counts)
    ]


def _stretches(history: History, trajectories: int, longest_at: float) -> FloatArray:
    """Rows of output tokens between two lengths, and of how many trajectories are longer."""
    probabilities, lengths = _quantiles(history, trajectories, longest_at)
    longer = 1.0 - 0.5 * (probabilities + np.concatenate(([0.0], probabilities[:-1])))
    left = np.maximum(trajectories * longer, 1.0)
    return np.stack((np.concatenate(([0.0], lengths[:-1])), lengths, left), axis=1)


def _ends_s(spans: FloatArray, start_s: float, loaded_s: FloatArray) -> FloatArray:
    """Ends by mix, of seconds by mix and stretch; from each, all may change to the last mix."""
    ends = np.zeros(len(spans))
    for k in reversed(range(len(loaded_s))):
        ends = ends + spans[:, k]
        ends = np.minimum(ends, ends[-1] + start_s + loaded_s[k])
    return ends


def _quantiles(
    history: History, trajectories: int, longest_at: float
) -> tuple[FloatArray, FloatArray]:
    """Probabilities and lengths, up to the quantile `longest_at` of the longest of so many.

    Between history's last quantile and its longest, log lengths are proportional to normal scores.
    No length is beyond history's longest: it may be the longest context that is allowed.
    """
    lengths = np.maximum(np.asarray(history.output_quantiles, dtype=np.float64), 1.0)
    probabilities = (np.arange(len(lengths)) + 0.5) / len(lengths)
    last = longest_at ** (1.0 / trajectories)
    if last <= probabilities[-1] or history.longest_output_tokens <= lengths[-1]:
        kept = max(1, int(np.searchsorted(probabilities, last, side="right")))
        return probabilities[:kept], lengths[:kept]
    beyond = 1.0 - np.geomspace(1.0 - probabilities[-1], 1.0 - last, _BEYOND + 1)[1:]
    known_at = 1.0 - 0.5 / (history.trajectories or trajectories)
    known = np.maximum(known_at, beyond[0])
    scores = [NormalDist().inv_cdf(float(p)) for p in (probabilities[-1], known, *beyond)]
    share = np.minimum((np.array(scores[2:]) - scores[0]) / (scores[1] - scores[0]), 1.0)
    further = lengths[-1] * (history.longest_output_tokens / lengths[-1]) ** share
    return np.concatenate((probabilities, beyond)), np.concatenate((lengths, further))


def _pace_s(
    costs: Sequence[StepCost],
    engines: FloatArray,
    left: FloatArray,
    context: FloatArray,
    tools: tuple[FloatArray, FloatArray, float],
    max_running: int,
) -> FloatArray:
    """Seconds per output token of all, by mix and length.

    `engines` counts them by mix and cost. `left` is the number of trajectories by length, `context`
    the tokens of each, `tools` what they take, append and prefill (seconds, tokens, times) per
    output token. The rates of a mix are largest where one more sequence adds the same to each
    engine that is not full. That is the multiplier, `rate'(b) = t0 / (t0 + b * sequence)^2`.
    """
    tool_s, appended, steps = tools
    t0_s = np.maximum([cost.t0_s for cost in costs], _LEAST_S)
    # By length and cost.
    by_cost = (
        c.t1_s + c.t2_s * context + c.prefill_s * appended + c.per_prefill_s * steps for c in costs
    )
    sequence_s = np.maximum(np.stack(list(by_cost), -1), _LEAST_S)
    most = np.stack([np.clip(c.kv_capacity_tokens / context, 1.0, max_running) for c in costs], -1)

    def rates(log_multiplier: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Trajectories that the engines hold, and their output tokens a second."""
        batch = (np.sqrt(t0_s / np.exp(log_multiplier)[..., None]) - t0_s) / sequence_s
        batch = np.clip(batch, 0.0, most)
        rate = np.einsum("mk,mlk->ml", engines, batch / (t0_s + sequence_s * batch))
        return np.einsum("mk,mlk->ml", engines, batch) + rate * tool_s, rate

    low = np.full((len(engines), len(left)), np.log(_MULTIPLIERS[0]))
    high = np.full_like(low, np.log(_MULTIPLIERS[1]))
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        too_cheap = rates(middle)[0] > left
        low, high = np.where(too_cheap, middle, low), np.where(too_cheap, high, middle)
    return left / rates(high)[1]
