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
