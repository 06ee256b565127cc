"""Means over the seeds of a comparison."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over seeds, and the half-width of its 95 % confidence interval (Student's t).

    `ci95` is None with one seed: one run gives no spread.
    """

    mean: float
    ci95: float | None

    def plain(self) -> dict[str, float | None]:
        """As JSON."""
        return {"mean": self.mean, "ci95": self.ci95}


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of runs, and its confidence interval."""
    # Imported here: `heddle --help` should not wait for scipy.
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean=mean, ci95=None)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Estimate(mean=mean, ci95=float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n))
