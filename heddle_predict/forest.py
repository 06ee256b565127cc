"""Gradient-boosted trees as arrays: inference with numpy alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MOST_LEAVES: Final = 16
"""Leaves of a tree that fit the bits of a mask."""

_ALL: Final = (1 << MOST_LEAVES) - 1
_AT_ONCE: Final = 16
"""Rows tested together: their tests still fit a processor's nearest cache."""


@cache
def _first_bits() -> NDArray[np.uint8]:
    """For every mask but 0 the position of its lowest bit."""
    masks = np.arange(1 << MOST_LEAVES)
    masks[0] = 1
    bits: NDArray[np.uint8] = np.log2(masks & -masks).astype(np.uint8)
    return bits


@cache
def _first_zeros() -> NDArray[np.uint8]:
    """For every mask but that of all the position of its lowest zero."""
    return _first_bits()[::-1].copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """A sum of trees over a row of numbers.

    Every tree has as many inner nodes and leaves as the largest; extra ones have no effect. A row's
    leaf is found without traversal. Each inner node whose test fails (``value > threshold``)
    excludes the leaves to its left, the zeros of its mask. The first remaining leaf is the row's.
    So all nodes of all trees are tested at once (after QuickScorer, Lucchese et al., SIGIR 2015).
    They are tested node by node with the trees side by side: one row costs a few passes over long
    arrays, since a policy predicts one trajectory at a time.
    """

    feature: NDArray[np.int32]
    """Column that each inner node tests, (trees, nodes)."""
    threshold: NDArray[np.float64]
    mask: NDArray[np.uint16]
    """Leaves that remain when a node's test fails, as bits from the leftmost leaf on."""
    leaf: NDArray[np.float64]
    """Value of each leaf, (trees, leaves)."""
    _column: NDArray[np.intp]
    """`feature`, (nodes, trees) and flat; the next two alike."""
    _at_most: NDArray[np.float64]
    _left: NDArray[np.uint16]
    _first: NDArray[np.uint8]
    _leaf_0: NDArray[np.intp]
    """Where each tree's leaves begin in the flat `leaf`."""

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
            raise ValueError(f"a tree tests a column beyond the {columns} of a row")
        if not (np.isfinite(leaf).all() and not np.isnan(threshold).any()):
            raise ValueError("a tree contains a value that is no number")
        # A mask that keeps no leaf at all would have no first one.
        if not (np.bitwise_and.reduce(mask, axis=1, initial=_ALL) != 0).all():
            raise ValueError("a tree rules out all of its leaves")
        return Forest._laid_out(feature, threshold, mask, leaf)

    @staticmethod
    def _laid_out(
        feature: NDArray[np.int32],
        threshold: NDArray[np.float64],
        mask: NDArray[np.uint16],
        leaf: NDArray[np.float64],
    ) -> "Forest":
        return Forest(
            feature=feature,
            threshold=threshold,
            mask=mask,
            leaf=leaf,
            _column=feature.T.ravel().astype(np.intp),
            _at_most=threshold.T.ravel(),
            _left=mask.T.ravel(),
            _first=_first_bits(),
            _leaf_0=np.arange(len(leaf)) * leaf.shape[1],
        )

    def _widened(self, nodes: int) -> tuple[NDArray[Any], ...]:
        """Its arrays for trees of so many nodes, the added ones idle."""
        more = ((0, 0), (0, nodes - self.feature.shape[1]))
        return (
            np.pad(self.feature, more),
            np.pad(self.threshold, more, constant_values=np.inf),
            np.pad(self.mask, more, constant_values=_ALL),
            np.pad(self.leaf, more),
        )

    def __len__(self) -> int:
        return len(self.leaf)

    def beside(self, other: "Forest") -> "Forest":
        """Return the trees of both, these first."""
        nodes = max(self.feature.shape[1], other.feature.shape[1])
        one, two = self._widened(nodes), other._widened(nodes)
        return Forest._laid_out(*(np.concatenate(pair) for pair in zip(one, two, strict=True)))

    def sums(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over the trees, for each of `rows` of shape (rows, columns)."""
        return np.asarray(self.each(rows).sum(axis=1), np.float64)

    def each(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Value of each tree for each row, (rows, trees)."""
        if len(rows) <= _AT_ONCE:
            return self._each(rows)
        parts = [self._each(rows[i : i + _AT_ONCE]) for i in range(0, len(rows), _AT_ONCE)]
        return np.concatenate(parts)

    def one_row(self) -> "OneRow":
        """Return a copy that evaluates one row at a time."""
        return OneRow(self)

    def _each(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        trees, nodes = self.feature.shape
        fails = rows.take(self._column, axis=1) > self._at_most
        left = np.where(fails, self._left, np.uint16(_ALL)).reshape(len(rows), nodes, trees)
        chosen = self._first.take(np.bitwise_and.reduce(left, axis=1))
        return self.leaf.take(self._leaf_0 + chosen)


class OneRow:
    """The values of a forest's trees for one row at a time, in arrays of its own: for one thread.

    The same as `Forest.each`, to the last digit, in half the time: nothing is allocated, and a
    product takes the place of a choice. It marks the leaves that are excluded, not those that
    remain.
    """

    def __init__(self, forest: Forest) -> None:
        trees, nodes = forest.feature.shape
        self._column = forest._column
        self._at_most = forest._at_most
        self._excluded = np.invert(forest._left).reshape(nodes, trees)
        self._first_0 = _first_zeros()
        self._leaf_0 = forest._leaf_0
        self._leaf = forest.leaf.ravel()
        self._tested = np.empty(nodes * trees)
        self._fails = np.empty(nodes * trees, np.bool_)
        self._fails_by_node = self._fails.reshape(nodes, trees)
        self._excluded_by_node = np.empty((nodes, trees), np.uint16)
        self._excluded_in_all = np.empty(trees, np.uint16)
        self._chosen = np.empty(trees, np.uint8)
        self._at = np.empty(trees, np.intp)
        self._values = np.empty(trees)

    def each(self, row: Sequence[float]) -> NDArray[np.float64]:
        """Value of each tree, (trees,); the next call overwrites it."""
        # With a mode other than "raise" numpy writes to `out` directly; no index is out of bounds.
        np.array(row, np.float64).take(self._column, out=self._tested, mode="clip")
        np.greater(self._tested, self._at_most, out=self._fails)
        np.multiply(self._fails_by_node, self._excluded, out=self._excluded_by_node)
        np.bitwise_or.reduce(self._excluded_by_node, axis=0, out=self._excluded_in_all)
        self._first_0.take(self._excluded_in_all, out=self._chosen, mode="clip")
        np.add(self._leaf_0, self._chosen, out=self._at)
        return self._leaf.take(self._at, out=self._values, mode="clip")
