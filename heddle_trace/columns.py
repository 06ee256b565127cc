"""Helpers for columns: words as codes, and slices of a column, one of each trajectory."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.int32]

NONE = -1
"""The code of no word, and of a whole number or a flag that is not recorded."""


class Words(dict[str | None, int]):
    """Codes of words, from 0 in order of first sight; a word gets its code when it is looked up."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        super().__init__({None: NONE})
        for word in words:
            self[word]

    def __missing__(self, word: str) -> int:
        code = self[word] = len(self) - 1
        return code

    def codes(self, words: Iterable[str | None]) -> Codes:
        """The code of each word."""
        return np.fromiter(map(self.__getitem__, words), np.int32)

    def listed(self) -> list[str]:
        """The words, each at its code."""
        return [word for word in self if word is not None]


def constant(value: Any, size: int, kind: Any) -> Any:
    """A read-only column of one value, which takes no memory."""
    return np.broadcast_to(np.array(value, kind), size)


def smallest(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Whole numbers in 32 bits if they fit, else in 64."""
    if values.dtype == np.int32:
        return values
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    return values.astype(np.int32 if low >= -(2**31) and high < 2**31 else np.int64)


def positions(start: Ints, stop: Ints) -> Ints | slice:
    """Positions of the slices `start` to `stop`, one after the other; a slice if they are one."""
    if not len(start):
        return slice(0, 0)
    if (start[1:] == stop[:-1]).all():
        return slice(int(start[0]), int(stop[-1]))
    count = stop - start
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(int(count.sum()))


def sums(values: npt.NDArray[Any], start: Ints, stop: Ints) -> Ints:
    """The sum of whole numbers over each slice."""
    total = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=total[1:])
    return np.asarray(total[stop] - total[start], np.int64)


def by_code(codes: npt.NDArray[Any]) -> list[Ints]:
    """Positions of each code that occurs, ascending; codes in order of first sight."""
    order = np.argsort(codes, kind="stable")
    edges = np.flatnonzero(np.diff(codes[order])) + 1
    members = np.split(order, edges) if len(order) else []
    return sorted(members, key=lambda own: int(own[0]))


def carried(known: Bools, base: Ints, growth: Ints) -> Ints:
    """`base` where it is known, else the item before and its growth; the first one is known."""
    grown = np.cumsum(growth) - growth
    since = np.maximum.accumulate(np.where(known, np.arange(len(known)), 0))
    return np.asarray(base[since] + grown - grown[since], np.int64)
