"""The engine with the fewest steps in flight, found without looking at every engine.

A tournament over the engines: each node holds the winner of two. A step changes the load of one
engine, which costs one match per level, and only when the winner is asked for.
"""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

E = TypeVar("E")

NONE: Final = 1 << 60
"""The load of a place without an engine."""


class Tournament(Generic[E]):
    """The first of the items with the least load. Loads are whole numbers."""

    __slots__ = ("_items", "_loads", "_size", "_winners")

    def __init__(self, items: Sequence[E], loads: Sequence[int]) -> None:
        self._items = items
        size = 1
        while size < len(items):
            size *= 2
        self._size = size
        self._loads = [*loads] + [NONE] * (size - len(items))
        self._winners = [0] * size + list(range(size))
        for node in range(size - 1, 0, -1):
            self._play(node)

    def change(self, place: int, load: int) -> None:
        """Set the load of the item at `place`."""
        self._loads[place] = load
        node = (self._size + place) // 2
        while node > 0:
            self._play(node)
            node //= 2

    def winner(self) -> E:
        """Return the item with the least load, the first of equals."""
        return self._items[self._winners[1] if self._size > 1 else 0]

    def _play(self, node: int) -> None:
        winners, loads = self._winners, self._loads
        left, right = winners[2 * node], winners[2 * node + 1]
        winners[node] = left if loads[left] <= loads[right] else right
