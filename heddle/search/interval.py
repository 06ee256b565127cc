"""How long one rollout of unseen prompts may take.

Drawn rollouts repeat prompts, so that none has a trajectory that is longer than the longest known.
Of as many new prompts one has, in half of all rollouts. So an interval has two parts, and is as
wide as both: the spread of rollouts that are drawn from both halves (Student's t, of logarithms),
and the mean, longer or shorter as the longest trajectory of as many new groups may be. Lengths
beyond the `TAIL` longest known ones are taken as exponential, as those of most distributions are
(Pickands, Annals of Statistics 3(1), 1975), with a mean that is known from these alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, stdev
from typing import Final

from heddle.comparison.estimates import t_quantile

WITHIN: Final = 0.95
TAIL: Final = 0.15
"""Share of groups whose longest trajectories are the tail."""
FEWEST, MOST = 12, 40
"""Groups of a tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionInterval:
    """A makespan of one rollout of unseen prompts in seconds: mean and 95 % prediction interval."""

    mean: float
    low: float | None
    """None where one rollout and nothing else is known."""
    high: float | None

    @property
    def text(self) -> str:
        """The interval in whole seconds."""
        if self.low is None or self.high is None:
            return "-"
        return f"{self.low:,.0f} to {self.high:,.0f}"

    def plain(self) -> dict[str, float | None]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


def prediction_interval(
    judged: Sequence[float],
    searched: Sequence[float] = (),
    longest_s: Sequence[Sequence[float]] = (),
) -> PredictionInterval:
    """The mean of judged makespans, and the interval.

    Args:
        judged: Makespans of rollouts drawn from one half of the prompts, in seconds.
        searched: The same of the other half.
        longest_s: Time alone of the longest trajectory of each group, of those of the one half and
            of the other, or of all that a rollout repeats, in seconds.
    """
    mean = fmean(judged)
    values = [*judged, *searched]
    n = len(values)
    if n == 1 and not longest_s:
        return PredictionInterval(mean=mean, low=None, high=None)
    middle = fmean(values)
    ends = [mean, middle]
    if n == 2 and longest_s:
        # Student's t of one degree of freedom is wide by chance: 12.7 times the spread.
        ends += values
    elif n > 1:
        logs = [*map(math.log, values)]
        half = t_quantile(n - 1) * stdev(logs) * math.sqrt(1.0 + 1.0 / n)
        ends += [math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)]
    if longest_s:
        known_s = [*chain.from_iterable(longest_s)]
        usual_s = fmean(map(max, longest_s))
        ends += [
            middle * _longest_s(known_s, chance) / usual_s
            for chance in ((1.0 - WITHIN) / 2.0, (1.0 + WITHIN) / 2.0)
        ]
    return PredictionInterval(mean=mean, low=min(ends), high=max(ends))


def _longest_s(known_s: Sequence[float], chance: float) -> float:
    """What the longest of as many new groups takes at most, with this chance."""
    ordered = sorted(known_s, reverse=True)
    n = len(ordered)
    count = min(max(FEWEST, round(TAIL * n)), MOST, n - 1)
    least_s = ordered[count]
    beyond_s = fmean(ordered[:count]) - least_s
    later = n * (1.0 - chance ** (1.0 / n)) / count
    # The predictive distribution: with the mean estimated from so many, its tail is of a power.
    return least_s + count * beyond_s * max(0.0, math.pow(later, -1.0 / count) - 1.0)
