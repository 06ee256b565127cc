"""Means over the seeds of a comparison."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SEEDS: Final = 3
LONG_S: Final = 60.0
"""Wall time of a simulation above which one seed has to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over seeds, and the half-width of its 95 % confidence interval (Student's t).

    `ci95` is None with one seed: one run gives no spread.
    """

    mean: float
    ci95: float | None

    def plain(self) -> dict[str, float | None]:
        return {"mean": self.mean, "ci95": self.ci95}

    def plain_range(self) -> dict[str, float | None]:
        """As JSON, with the ends of the interval too."""
        low, high = self.ends
        return {**self.plain(), "low": low, "high": high}

    @property
    def ends(self) -> tuple[float, float] | tuple[None, None]:
        """The interval of a mean above 0, by that of its logarithm (delta method)."""
        if self.ci95 is None:
            return None, None
        factor = math.exp(self.ci95 / self.mean)
        return self.mean / factor, self.mean * factor


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of runs, and its confidence interval."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean=mean, ci95=None)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Estimate(mean=mean, ci95=t_quantile(n - 1) * math.sqrt(variance / n))


def t_quantile(degrees: int) -> float:
    """The t such that Student's distribution is between -t and t with a probability of 95 %.

    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, solved by bisection. Exact but for rounding.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_within(angle, degrees) < 0.95 else (low, angle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _t_within(angle: float, degrees: int) -> float:
    """Probability that abs(t) < sqrt(degrees) * tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
