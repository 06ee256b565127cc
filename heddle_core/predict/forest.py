"""Gradient-boosted trees as arrays: what was trained elsewhere, answered here with numpy alone."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_LEAVES: Final = 16
"""Leaves of a tree that fit the bits of a mask."""

_ALL: Final = (1 << MOST_LEAVES) - 1
_AT_ONCE: Final = 128
"""Rows tested together: their tests still fit a processor's cache."""


def _first_bits() -> NDArray[np.uint8]:
    """For every mask but 0 the position of its lowest bit."""
    masks = np.arange(1 << MOST_LEAVES)
    masks[0] = 1
    bits: NDArray[np.uint8] = np.log2(masks & -masks).astype(np.uint8)
    return bits


@dataclass(frozen=True, slots=True)
class Forest:
    """A sum of trees over a row of numbers.

    Every tree has as many inner nodes and leaves as the largest, the missing ones idle. The leaf of
    a row is found without walking: each inner node whose test fails (``value > threshold``) rules
    out the leaves to its left, which are the zeros of its mask; the first leaf left over is the
    row's. So all nodes of all trees are tested at once (after QuickScorer, Lucchese et al.,
    SIGIR 2015).
    """

    feature: NDArray[np.int32]
    """Column that each inner node looks at, (trees, nodes)."""
    threshold: NDArray[np.float64]
    mask: NDArray[np.uint16]
    """Leaves that remain when a node's test fails, as bits from the leftmost leaf on."""
    leaf: NDArray[np.float64]
    """What each leaf adds, (trees, leaves)."""
    _first: NDArray[np.uint8]

    @staticmethod
    def of(
        *,
        feature: NDArray[np.int32],
        threshold: NDArray[np.float64],
        mask: NDArray[np.uint16],
        leaf: NDArray[np.float64],
        columns: int,
    ) -> "Forest":
        """Check that the arrays fit together and to rows of `columns` numbers.

        Raises:
            ValueError: they do not.
        """
        shape = feature.shape
        if len(shape) != 2 or threshold.shape != shape or mask.shape != shape:
            raise ValueError("features, thresholds and masks of the trees differ in shape")
        if leaf.shape != (shape[0], shape[1] + 1) or leaf.shape[1] > MOST_LEAVES:
            raise ValueError(f"the trees have {shape[1]} nodes and leaves of shape {leaf.shape}")
        if feature.size and not 0 <= int(feature.min()) <= int(feature.max()) < columns:
            raise ValueError(f"a tree looks at a column beyond the {columns} of a row")
        if not (np.isfinite(leaf).all() and not np.isnan(threshold).any()):
            raise ValueError("a tree holds a value that is no number")
        # A mask that keeps no leaf at all would have no first one.
        if not (np.bitwise_and.reduce(mask, axis=1, initial=_ALL) != 0).all():
            raise ValueError("a tree rules out all of its leaves")
        return Forest(feature, threshold, mask, leaf, _first_bits())

    def sums(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over the trees, for each of `rows` of shape (rows, columns)."""
        return np.asarray(self.each(rows).sum(axis=1), np.float64)

    def each(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """What each tree gives for each row, (rows, trees)."""
        parts = [self._each(rows[i : i + _AT_ONCE]) for i in range(0, len(rows), _AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.leaf)))

    def _each(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        trees, nodes = self.feature.shape
        fails = rows[:, self.feature.ravel()] > self.threshold.ravel()
        left = np.where(fails, self.mask.ravel(), np.uint16(_ALL)).reshape(len(rows), trees, nodes)
        chosen = self._first[np.bitwise_and.reduce(left, axis=2)]
        return np.asarray(self.leaf[np.arange(trees), chosen])
