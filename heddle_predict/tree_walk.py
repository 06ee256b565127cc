"""A forest for one row at a time by a walk through each tree: the quick way in the compiled build.

`heddle_predict.forest` tests all nodes of all trees with a few numpy calls. A walk visits a
quarter of them, which pays once the visits are compiled. Both give the same sums, to the last
digit: the walk adds in the order in which numpy adds a row of numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from heddle_predict.forest import MOST_LEAVES, Forest
from heddle_predict.model import LOG_BOUND

_ALL: Final = (1 << MOST_LEAVES) - 1


class TreeColumn:
    """One number of the row."""

    def __init__(self) -> None:
        self.value = 0.0


class Node:
    """An inner node, or a leaf, whose `threshold` is its value."""

    def __init__(
        self, column: TreeColumn, threshold: float, left: "Node | None", right: "Node | None"
    ) -> None:
        self.column = column
        self.threshold = threshold
        self.inner = left is not None and right is not None
        self.left: Node = self if left is None else left
        self.right: Node = self if right is None else right


class TreeWalk:
    """The trees of a forest as linked nodes, and the row that they test: for one thread."""

    def __init__(self, columns: list[TreeColumn], roots: list[Node]) -> None:
        self._columns, self._roots = columns, roots

    @staticmethod
    def of(forest: Forest) -> "TreeWalk | None":
        """Link the nodes of `forest`; None if its masks are not those of trees."""
        columns = [TreeColumn() for _ in range(int(forest.feature.max(initial=0)) + 1)]
        roots: list[Node] = []
        for feature, threshold, mask, leaf in zip(
            forest.feature.tolist(),
            forest.threshold.tolist(),
            forest.mask.tolist(),
            forest.leaf.tolist(),
            strict=True,
        ):
            nodes = [
                _Split(columns[feature[k]], threshold[k], *_left_leaves(remain))
                for k, remain in enumerate(mask)
                if remain != _ALL
            ]
            roots.append(_linked(nodes, leaf, 0, len(leaf) - 1))
            if nodes:
                return None
        return TreeWalk(columns, roots)

    def __len__(self) -> int:
        return len(self._roots)

    def read(self, row: Sequence[float]) -> None:
        """Take the row that `total` is about."""
        for column, value in zip(self._columns, row):  # noqa: B905 - slow with it, compiled
            column.value = value

    def total(self, first: int, count: int) -> float:
        """Sum of `count` trees from `first` on, in the order of `numpy.add.reduce`."""
        roots = self._roots
        if count < 8:
            total = 0.0
            for i in range(first, first + count):
                total += _value(roots[i])
            return total
        if count > 128:
            half = count // 2
            half -= half % 8
            return self.total(first, half) + self.total(first + half, count - half)
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        e, f, g, h = 0.0, 0.0, 0.0, 0.0
        rest = first + count - count % 8
        for i in range(first, rest, 8):
            a += _value(roots[i])
            b += _value(roots[i + 1])
            c += _value(roots[i + 2])
            d += _value(roots[i + 3])
            e += _value(roots[i + 4])
            f += _value(roots[i + 5])
            g += _value(roots[i + 6])
            h += _value(roots[i + 7])
        total = ((a + b) + (c + d)) + ((e + f) + (g + h))
        for i in range(rest, first + count):
            total += _value(roots[i])
        return total


class WalkedQuantile:
    """`TreesModel.row_quantile` by a walk: `trees` of location come first, the rest are spread."""

    def __init__(self, walk: TreeWalk, trees: int, error: float) -> None:
        self._walk, self._trees, self._error = walk, trees, error
        self._spread_trees = len(walk) - trees

    def __call__(self, row: Sequence[float]) -> float:
        walk, trees = self._walk, self._trees
        walk.read(row)
        location = walk.total(0, trees)
        log_spread = walk.total(trees, self._spread_trees)
        return location + float(np.exp(min(max(log_spread, -LOG_BOUND), LOG_BOUND))) * self._error


def _value(root: Node) -> float:
    node = root
    while node.inner:
        node = node.right if node.column.value > node.threshold else node.left
    return node.threshold


@dataclass(frozen=True, slots=True)
class _Split:
    """An inner node that is not linked yet."""

    column: TreeColumn
    threshold: float
    first: int
    last: int
    """The leaves to its left."""


def _left_leaves(remain: int) -> tuple[int, int]:
    """First and last leaf that a mask excludes; an empty range if it excludes others between."""
    left = ~remain & _ALL
    first, last = (left & -left).bit_length() - 1, left.bit_length() - 1
    return (first, last) if left == (2 << last) - (1 << first) else (last, first)


def _linked(splits: list[_Split], leaf: Sequence[float], first: int, last: int) -> Node:
    """Link the subtree over the leaves from `first` to `last`; takes its nodes out of `splits`."""
    inside = [split for split in splits if split.first == first <= split.last < last]
    if not inside:
        return Node(TreeColumn(), leaf[first], None, None)
    root = max(inside, key=lambda split: split.last)
    splits.remove(root)
    left = _linked(splits, leaf, first, root.last)
    right = _linked(splits, leaf, root.last + 1, last)
    return Node(root.column, root.threshold, left, right)
