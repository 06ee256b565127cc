"""Which KV transfers may begin: endpoint-exclusive, longest first (Heddle paper, section 5.3).

A transfer uses both of its engines alone: it may begin only when neither its source nor its target
is in another transfer. Of those that could begin, the longest goes first, so that short ones fill
in around it. The engines know how long a transfer takes and how it is done.
"""

from bisect import insort
from heapq import merge
from typing import Generic, NamedTuple, TypeVar

from heddle_core.ids import EngineId

T = TypeVar("T")


class Move(NamedTuple, Generic[T]):
    order: tuple[float, int]
    """Longest first, then by request; no two are equal."""
    source: EngineId
    target: EngineId
    what: T


class TransferQueue(Generic[T]):
    """Waiting transfers, and those under way."""

    def __init__(self) -> None:
        self._pending: dict[EngineId, list[Move[T]]] = {}
        """By engine, in order; each move is listed under both of its engines."""
        self._moving: dict[EngineId, Move[T]] = {}
        """By engine, also under both."""
        self._requests = 0
        self._freed: dict[EngineId, None] = {}
        """Engines whose moves may have become possible since the last `begin`."""

    @property
    def changed(self) -> bool:
        """Whether `begin` may return any transfer."""
        return bool(self._freed)

    def request(self, source: EngineId, target: EngineId, size: float, what: T) -> Move[T]:
        """Queue a transfer of `size`, in the unit that all transfers share.

        Raises:
            ValueError: the two engines are one, or the size is negative.
        """
        if source == target or not size >= 0:
            raise ValueError(f"cannot move {size} bytes of KV from {source} to {target}")
        self._requests += 1
        move = Move((-size, self._requests), source, target, what)
        for engine in (source, target):
            insort(self._pending.setdefault(engine, []), move)
            self._freed[engine] = None
        return move

    def begin(self) -> list[Move[T]]:
        """Start and return all that can begin now; only engines freed since then are checked."""
        freed, self._freed = self._freed, {}
        free = {engine: None for engine in freed if engine not in self._moving}
        chosen: list[Move[T]] = []
        taken: dict[EngineId, None] = {}
        for move in merge(*(self._pending.get(engine, ()) for engine in free)):
            ends = (move.source, move.target)
            if any(end in self._moving or end in taken for end in ends):
                continue
            chosen.append(move)
            taken |= dict.fromkeys(ends)
            if all(engine in taken for engine in free):
                break
        for move in chosen:
            self._forget(move)
            self._moving[move.source] = self._moving[move.target] = move
        return chosen

    def end(self, move: Move[T]) -> bool:
        """End a transfer; return False when it had been dropped before."""
        if self._moving.get(move.source) is not move:
            return False
        for engine in (move.source, move.target):
            del self._moving[engine]
            self._freed[engine] = None
        return True

    def withdraw(self, move: Move[T]) -> bool:
        """Remove a transfer that has not begun; return whether there was one."""
        if move not in self._pending.get(move.source, ()):
            return False
        self._forget(move)
        return True

    def drop(self, engine: EngineId) -> list[Move[T]]:
        """Remove and return every transfer from or to a failed engine."""
        lost = list(self._pending.get(engine, ()))
        for move in lost:
            self._forget(move)
        if engine in self._moving:
            lost.append(self._moving[engine])
            self.end(lost[-1])
        return lost

    def _forget(self, move: Move[T]) -> None:
        for engine in (move.source, move.target):
            self._pending[engine].remove(move)
