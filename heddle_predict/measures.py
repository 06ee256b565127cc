"""Quality of predictions: ranks, sizes and calibration, after a number of steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

AFTER: Final = (0, 1, 2, 4, 8)
"""Steps after which predictors are judged."""
LONGEST: Final = 0.2
FEWEST: Final = 20
"""Fewer trajectories give no meaningful rank correlation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one predictor after one number of steps, over the trajectories that have another step."""

    trajectories: int
    recall: float
    """Share of the truly longest 20 % among the 20 % that are predicted longest."""
    pearson: float
    spearman: float
    median_error_tokens: float
    coverage: tuple[float, ...] = ()
    """Share of the truths at or below each quantile; empty for predictors of one number."""


def figures(
    estimates: NDArray[Any],
    truths: NDArray[Any],
    *,
    quantiles: NDArray[Any] | None = None,
) -> Figures | None:
    """Judge `estimates`. None for fewer than `FEWEST` truths."""
    if len(truths) < FEWEST:
        return None
    coverage: Sequence[float] = ()
    if quantiles is not None:
        coverage = [float(share) for share in (truths[:, None] <= quantiles).mean(axis=0)]
    return Figures(
        trajectories=len(truths),
        recall=recall(estimates, truths),
        pearson=correlation(estimates, truths),
        spearman=correlation(rankdata(estimates), rankdata(truths)),
        median_error_tokens=float(np.median(np.abs(estimates - truths))),
        coverage=tuple(coverage),
    )


def recall(estimates: NDArray[Any], truths: NDArray[Any]) -> float:
    """Share of the truly longest among as many predicted longest, ties counted by chance."""
    size = max(1, round(LONGEST * len(truths)))
    return float(_chosen(estimates, size) @ _chosen(truths, size)) / size


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Pearson's, and 0 where one side does not vary."""
    if np.ptp(a) <= 1e-12 * np.abs(a).max(initial=0.0) or np.ptp(b) == 0.0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _chosen(values: NDArray[Any], size: int) -> NDArray[np.float64]:
    """The chance of each to be among the `size` largest when ties are broken by lot."""
    least = np.sort(values)[-size]
    above, equal = values > least, values == least
    return np.asarray(above + equal * ((size - above.sum()) / equal.sum()), np.float64)
