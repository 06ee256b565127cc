"""A posterior of lengths in groups, from those that ended and those that still run.

Scores of lengths (`LengthScores`) differ between groups and within them:

    score = level + group effect + own effect        effects normal, with spreads `b` and `s`

A trajectory that ended shows its score. One that still runs shows only that its score is larger
than that of the tokens made so far (right-censored). Both are evidence of the group's mean. Level
and spreads are learned from all groups in the same way, so that survivors, which are long by
selection, do not raise them.

Computed on a grid: cells ``(s, group mean)``, and beside them ``(level, b)``. Evidence is a vector
of log likelihoods, one for each cell; that of independent trajectories is added."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


def normal_scores(count: int) -> FloatArray:
    """Standard normal quantiles at the probabilities ``(i + 0.5) / count``, ascending."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])


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
        count = len(quantiles)
        scores = normal_scores(count)
        logs = np.log(np.maximum(np.asarray(quantiles, np.float64), 1.0))
        logs = np.maximum.accumulate(logs) + 1e-9 * np.arange(count)  # strictly rising
        body = NormalDist().inv_cdf(_BODY)
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


_STEP = 0.1
_SCORES: Final = tuple(np.arange(-SCORE_BOUND, SCORE_BOUND + _STEP / 2, _STEP).tolist())
_MEANS: Final = tuple(np.arange(-6.0, 6.01, 0.25).tolist())
_LEVELS: Final = tuple(np.arange(-4.0, 4.01, 0.25).tolist())
"""Deviations of the level, in its prior's standard deviations."""
_SPREADS: Final = (-2.0, -1.0, 0.0, 1.0, 2.0)
"""Log deviations of a spread, in its prior's standard deviations."""

_GROUP_WEIGHT = 0.1
"""Weight of a group's likelihood when level and spreads are learned. The model is not exact, and a
full likelihood of hundreds of groups outweighs a history that is right."""

_ASSUMED_GROUPS = 10
"""Weight of the assumed share of the variance between groups."""
_LEAST_SHARE = 0.05
"""Of the variance, between groups and within."""

_LEAST_LOG = -300.0  # its exponential is a normal double
_UNSAFE_LOG = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPrior:
    """What is assumed of scores before a rollout."""

    between_share: float = 0.5
    """Share of the variance that lies between groups."""
    level_sd: float = 0.3
    """Standard deviation of the level."""
    spread_sd: float = 0.2
    """Standard deviation of the logarithms of both spreads."""


class LengthPosterior:
    """Posterior of the scores of trajectories in groups; see the module."""

    def __init__(self, prior: LengthPrior) -> None:
        scores, means = np.array(_SCORES), np.array(_MEANS)
        factors = np.exp(prior.spread_sd * np.array(_SPREADS))
        own = math.sqrt(1.0 - prior.between_share) * factors
        between = math.sqrt(prior.between_share) * factors
        levels = prior.level_sd * np.array(_LEVELS)
        apart = (scores[:, None, None] - means) / own[:, None]  # scores, s, means
        log_density = -0.5 * np.square(apart) - np.log(own)[:, None]
        self._log_density = np.maximum(log_density, _LEAST_LOG).reshape(len(scores), -1)
        self._log_longer = _log_normal_survival(apart).reshape(len(scores), -1)
        self._longer = np.exp(self._log_longer)
        self._first, self._last = float(scores[0]), float(scores[-1])
        self._scores = scores
        group = np.exp(
            -0.5 * np.square((means - levels[:, None, None]) / between[:, None])
        )  # levels, b, means
        self._means_at = (group / group.sum(axis=-1, keepdims=True)).reshape(-1, len(means))
        at_level = -0.5 * np.square(np.array(_LEVELS))
        at_spread = -0.5 * np.square(np.array(_SPREADS))
        prior_log = at_spread[:, None, None] + at_level[:, None] + at_spread  # s, levels, b
        self._prior_log = prior_log.reshape(len(own), -1)
        self._cells = (len(own), len(means))
        self._cell_log = self._log_of_cells(self._prior_log)

    def nothing(self) -> FloatArray:
        """Return the evidence of no trajectory, (cells,)."""
        return np.zeros(self._cells[0] * self._cells[1])

    def ended(self, score: float) -> FloatArray:
        """Return the evidence of a trajectory that ended with this score, (cells,)."""
        return np.asarray(self._rows(self._log_density, np.array([score]))[0])

    def running(self, scores: FloatArray) -> FloatArray:
        """Return the evidence of each trajectory beyond its score, (scores, cells)."""
        return self._rows(self._log_longer, scores)

    def learn(self, groups: FloatArray) -> None:
        """Compute level and spreads from the evidence of all groups, (groups, cells)."""
        shaped = groups.reshape(-1, *self._cells)
        most = shaped.max(axis=-1, keepdims=True)
        likelihood = np.exp(shaped - most) @ self._means_at.T
        logs = np.log(np.maximum(likelihood, math.exp(_LEAST_LOG))) + most
        self._cell_log = self._log_of_cells(self._prior_log + _GROUP_WEIGHT * logs.sum(axis=0))

    def quantiles(
        self, others: FloatArray, beyond: float, probabilities: Sequence[float]
    ) -> FloatArray:
        """Return quantiles of the score of a trajectory whose score is larger than `beyond`.

        `others` is the evidence of the rest of its group, (cells,); one quantile for each
        probability, in their order.
        """
        log = self._log_survival(others, beyond)
        at = float(np.interp(beyond, self._scores, log))
        wanted = at + np.log1p(-np.asarray(probabilities, np.float64))
        found = np.interp(-wanted, -np.minimum.accumulate(log), self._scores)
        return np.asarray(np.maximum(found, beyond))

    def _log_survival(self, others: FloatArray, beyond: float) -> FloatArray:
        """Log chance of each score of the grid to be exceeded, up to a constant."""
        cells = self._cell_log + others
        own = self._rows(self._log_longer, np.array([beyond]))[0]
        joint = cells + own
        most = float(joint.max())
        if most > float(cells.max()) - _UNSAFE_LOG:
            chance = self._longer @ np.exp(cells - most)
        else:  # the trajectory is longer than anything expected: keep what is left of the chances
            chance = np.exp(np.minimum(self._log_longer - own, 0.0)) @ np.exp(joint - most)
        return np.asarray(np.log(np.maximum(chance, math.exp(_LEAST_LOG))))

    def _log_of_cells(self, log: FloatArray) -> FloatArray:
        """Log prior of the cells for one more group, given logs of ``(s, (level, b))``."""
        chance = np.exp(log - log.max())
        cells = (chance / chance.sum()) @ self._means_at
        return np.asarray(np.log(np.maximum(cells, math.exp(_LEAST_LOG))).ravel())

    def _rows(self, table: FloatArray, scores: FloatArray) -> FloatArray:
        """Rows of a table over `_SCORES` at any scores, interpolated."""
        place = (np.clip(scores, self._first, self._last) - self._first) / _STEP
        low = np.minimum(place.astype(np.int64), len(self._scores) - 2)
        part = (place - low)[:, None]
        return np.asarray((1.0 - part) * table[low] + part * table[low + 1])


def _log_normal_survival(scores: FloatArray) -> FloatArray:
    """Logarithm of the chance that a standard normal number is larger, at least `_LEAST_LOG`."""
    flat = [0.5 * math.erfc(score / math.sqrt(2.0)) for score in scores.ravel().tolist()]
    least = math.exp(_LEAST_LOG)
    return np.asarray(np.log(np.maximum(np.array(flat), least)).reshape(scores.shape))


def between_share(scores: Sequence[FloatArray], *, assumed: float = 0.5) -> float:
    """Estimate the share of the variance of scores that lies between groups.

    One array for each group; those of one score do not count. It is the intraclass correlation by
    analysis of variance, averaged with `assumed` as if that came from ten groups.
    """
    groups = [group for group in scores if len(group) > 1]
    if len(groups) < 2:
        return assumed
    sizes = np.array([len(group) for group in groups])
    total = int(sizes.sum())
    means = np.array([group.mean() for group in groups])
    within = sum(float(np.square(group - group.mean()).sum()) for group in groups)
    within /= total - len(groups)
    mean = float(sizes @ means) / total
    between = float(sizes @ np.square(means - mean)) / (len(groups) - 1)
    size = (total - float(np.square(sizes).sum()) / total) / (len(groups) - 1)
    effect = max((between - within) / size, 0.0)
    share = effect / (effect + within) if within + effect > 0.0 else assumed
    weighted = (len(groups) * share + _ASSUMED_GROUPS * assumed) / (len(groups) + _ASSUMED_GROUPS)
    return min(max(weighted, _LEAST_SHARE), 1.0 - _LEAST_SHARE)
