"""Numbers in order, to which numbers are added and removed one at a time."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from typing import Final

_MOST: Final = 2_000
"""Numbers of one part. In one list each change would move half of a million numbers."""


class SortedNumbers:
    """A multiset of numbers that counts those above a number."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        ordered = sorted(values)
        half = _MOST // 2
        self._parts = [ordered[i : i + half] for i in range(0, len(ordered), half)] or [[]]
        """Ascending, as are the numbers of each."""
        self._largest = [part[-1] if part else 0.0 for part in self._parts]
        """Of each part but the last, which also takes larger numbers."""
        self._sizes = [len(part) for part in self._parts]

    def __len__(self) -> int:
        return sum(self._sizes)

    def add(self, value: float) -> None:
        k = bisect_left(self._largest, value, 0, len(self._parts) - 1)
        part = self._parts[k]
        insort(part, value)
        self._sizes[k] += 1
        self._largest[k] = part[-1]
        if len(part) > _MOST:
            half = len(part) // 2
            self._parts[k : k + 1] = [part[:half], part[half:]]
            self._largest[k : k + 1] = [part[half - 1], part[-1]]
            self._sizes[k : k + 1] = [half, len(part) - half]

    def remove(self, value: float) -> None:
        """Remove a number that was added, once."""
        k = bisect_left(self._largest, value, 0, len(self._parts) - 1)
        part = self._parts[k]
        del part[bisect_left(part, value)]
        self._sizes[k] -= 1
        if part:
            self._largest[k] = part[-1]
        elif len(self._parts) > 1:
            del self._parts[k], self._largest[k], self._sizes[k]

    def above(self, value: float) -> int:
        """Count the numbers above `value`."""
        k = bisect_right(self._largest, value, 0, len(self._parts) - 1)
        part = self._parts[k]
        return len(part) - bisect_right(part, value) + sum(self._sizes[k + 1 :])
