"""Quantiles: at which levels models answer, and how they are taken and judged."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEVELS: Final = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Probabilities at which models answer."""


def weighted_quantiles(
    values: NDArray[Any], weights: NDArray[Any], levels: Sequence[float]
) -> NDArray[np.float64]:
    """Return the least values below or at which lie the shares `levels` of the weight."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    at = np.minimum(np.searchsorted(share, levels), len(values) - 1)
    return np.asarray(values[order][at], np.float64)


def shifted(
    truths: NDArray[Any], found: NDArray[Any], weights: NDArray[Any]
) -> tuple[NDArray[np.float64], float]:
    """By how much to shift each quantile so that it holds its share of `truths`, and what is left.

    `found` are the answers, (truths, levels). Shifts keep quantiles in order: no upper one is
    shifted down by more than the one below it. The second number is the weighted root mean squared
    error of the median after its shift.
    """
    wrong = truths[:, None] - found
    each = [weighted_quantiles(wrong[:, i], weights, [level]) for i, level in enumerate(LEVELS)]
    shifts = np.concatenate(each)
    middle = LEVELS.index(0.5)
    shifts[middle:] = np.maximum.accumulate(shifts[middle:])
    shifts[: middle + 1] = np.minimum.accumulate(shifts[middle::-1])[::-1]
    square = np.square(wrong[:, middle] - shifts[middle])
    return shifts, float(np.sqrt(np.average(square, weights=weights)))
