"""The engine with the fewest steps in flight, found without looking at every engine.

A tournament over the engines: each node holds the winner of two. A step changes the load of one
engine, which costs one match per level, and only when the winner is asked for.
"""

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

E = TypeVar("E")

NONE: Final = 1 << 60
"""The key of a place without an item."""


class Tournament(Generic[E]):
    """The first of the items with the least load. Loads are whole numbers, 0 or more."""

    __slots__ = ("_items", "_keys", "_size")

    def __init__(self, items: Sequence[E], loads: Sequence[int]) -> None:
        self._items = items
        size = 1
        while size < len(items):
            size *= 2
        self._size = size
        # Of equal loads the first place wins, so that a key alone tells the winner.
        places = [load * size + place for place, load in enumerate(loads)]
        keys = self._keys = [NONE] * size + places + [NONE] * (size - len(items))
        for node in range(size - 1, 0, -1):
            keys[node] = min(keys[2 * node], keys[2 * node + 1])

    def change(self, place: int, load: int) -> None:
        """Set the load of the item at `place`."""
        size, keys = self._size, self._keys
        node, key = size + place, load * size + place
        while keys[node] != key:
            keys[node] = key
            if node == 1:
                return
            other = keys[node ^ 1]
            if other < key:
                key = other
            node //= 2

    def winner(self) -> E:
        """Return the item with the least load, the first of equals."""
        return self._items[self._keys[1] % self._size]
