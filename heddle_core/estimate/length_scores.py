"""Lengths as standard normal scores: the distribution of earlier rollouts, whatever its shape."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Final

import numpy as np

from heddle_core.estimate.group_cost import FloatArray

SCORE_BOUND: Final = 9.0
"""Scores lie within plus and minus this; beyond them the normal density is below 1e-18."""

_TYPICAL_TOKENS = 3_000.0
_LEAST_SLOPE = 0.05
_BODY = 0.9
"""Beyond its outermost quantiles a distribution goes on as steeply, in logs, as on average between
its median and this quantile (below: its mirror image)."""


class LengthScores:
    """Maps output tokens of a whole trajectory to scores and back.

    The score of a length is the standard normal quantile at its probability in `quantiles`, with
    logarithms interpolated linearly. So scores of that distribution are normal. Many equal lengths,
    as at an output limit, share an interval of scores.
    """

    def __init__(self, quantiles: Sequence[float] = ()) -> None:
        """Take total output tokens at the probabilities ``(i + 0.5) / len``, ascending.

        Without any, lengths are lognormal around 3,000 tokens with a log deviation of 1.
        """
        if len(quantiles) == 0:
            self._logs = np.log(_TYPICAL_TOKENS) + np.array([-SCORE_BOUND, SCORE_BOUND])
            self._scores = np.array([-SCORE_BOUND, SCORE_BOUND])
            return
        normal, count = NormalDist(), len(quantiles)
        scores = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
        logs = np.log(np.maximum(np.asarray(quantiles, np.float64), 1.0))
        logs = np.maximum.accumulate(logs) + 1e-9 * np.arange(count)  # strictly rising
        body = normal.inv_cdf(_BODY)
        low, middle, high = np.interp([-body, 0.0, body], scores, logs)
        below = max((middle - low) / body, _LEAST_SLOPE) * (SCORE_BOUND + scores[0])
        above = max((high - middle) / body, _LEAST_SLOPE) * (SCORE_BOUND - scores[-1])
        self._logs = np.concatenate([[logs[0] - below], logs, [logs[-1] + above]])
        self._scores = np.concatenate([[-SCORE_BOUND], scores, [SCORE_BOUND]])

    def scores(self, tokens: FloatArray) -> FloatArray:
        """Return the score of each length, of the same shape; lengths in tokens, above 0."""
        return np.asarray(np.interp(np.log(tokens), self._logs, self._scores))

    def tokens(self, scores: FloatArray) -> FloatArray:
        """Return the length at each score, in tokens."""
        return np.asarray(np.exp(np.interp(scores, self._scores, self._logs)))
