"""Requests without a session, joined to conversations by common prefixes of their prompts."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heddle_trace.importers.notes import Notes

OPEN_PREFIXES: Final = 200_000
"""Prefixes that may still be continued, at most; older ones are forgotten, to bound memory."""

LEAST_BLOCKS: Final = 2
"""Full blocks that a prefix needs: a single block may be a prompt that all share."""

SAME_PREFIX: Final = 64
"""Requests of one prefix that may be continued, at most, the latest of them."""


@dataclass(slots=True)
class _Node:
    """A request that a later one may continue."""

    trajectory: str
    tree: str
    end_tokens: int
    blocks: int
    continued: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The trajectory of a request. `shared` counts the blocks that it repeats of the one before."""

    trajectory: str
    tree: str
    shared: int


class PrefixJoin:
    """Finds, for each request, the earlier one that it continues.

    A request continues an earlier one when its prompt begins with all full blocks of the earlier
    prompt, of which there are at least `LEAST_BLOCKS`, and is at least as long as that prompt and
    its output. The longest such prefix wins, then the latest request. Where two continue the same
    one, the second begins a trajectory of its own in the same tree.
    """

    def __init__(self, limit: int = OPEN_PREFIXES) -> None:
        self._limit = limit
        self._open: OrderedDict[int, list[_Node]] = OrderedDict()
        self.forgotten = 0

    def place(
        self, name: str, blocks: Sequence[int], *, full: int, input_tokens: int, output_tokens: int
    ) -> Place:
        """Put a request in its trajectory. Its first `full` blocks are full; `name` is unique."""
        keys = _keys(blocks)
        before = self._before(keys, input_tokens)
        if before is None:
            place = Place(name, name, 0)
        elif before.continued:
            place = Place(name, before.tree, before.blocks)
        else:
            before.continued = True
            place = Place(before.trajectory, before.tree, before.blocks)
        if full >= LEAST_BLOCKS:
            node = _Node(place.trajectory, place.tree, input_tokens + output_tokens, full)
            same = self._open.setdefault(keys[full - 1], [])
            same.append(node)
            if len(same) > SAME_PREFIX:
                del same[0]
                self.forgotten += 1
            self._open.move_to_end(keys[full - 1])
            if len(self._open) > self._limit:
                self.forgotten += len(self._open.popitem(last=False)[1])
        return place

    def note_forgotten(self, what: str, notes: Notes) -> None:
        """Note how many cannot be continued any more."""
        if self.forgotten:
            notes.assume(f"{what} too old to be continued, to bound memory", self.forgotten)

    def _before(self, keys: Sequence[int], input_tokens: int) -> _Node | None:
        for key in reversed(keys):
            fitting = [n for n in self._open.get(key, ()) if n.end_tokens <= input_tokens]
            if fitting:
                return max(reversed(fitting), key=lambda node: node.end_tokens)
        return None


def _keys(blocks: Sequence[int]) -> list[int]:
    """A hash of each prefix, from one block to all."""
    keys = []
    key = 0
    for block in blocks:
        key = hash((key, block))
        keys.append(key)
    return keys
