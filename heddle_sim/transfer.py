"""KV prefixes on their way from engine to engine.

A transfer uses both of its engines alone: it starts only when neither its source nor its target is
in another transfer. Of those that could start, the longest goes first (the endpoint-exclusive order
of the Heddle paper), so that short ones fill in around it.
"""

from bisect import insort
from collections.abc import Callable
from functools import partial
from heapq import merge
from typing import NamedTuple

import simpy

from heddle_core.ids import EngineId


class Move(NamedTuple):
    """One transfer that was asked for."""

    order: tuple[float, int]
    """Longest first, equal ones as they were asked for; no two are the same."""
    source: EngineId
    target: EngineId
    kv_bytes: float
    callback: Callable[[], None]


class Transfers:
    """KV transfers between engines; each takes ``fixed_s + bytes / bytes_per_s``."""

    def __init__(self, env: simpy.Environment, fixed_s: float, bytes_per_s: float) -> None:
        """A link of `bytes_per_s` between any two engines.

        Raises:
            ValueError: a negative fixed time or no bandwidth.
        """
        if not (fixed_s >= 0.0 and bytes_per_s > 0.0):
            raise ValueError(
                f"a KV transfer needs fixed_s >= 0 and bytes_per_s > 0, "
                f"not {fixed_s} and {bytes_per_s}"
            )
        self._env = env
        self._fixed_s = fixed_s
        self._bytes_per_s = bytes_per_s
        self._pending: dict[EngineId, list[Move]] = {}
        """By engine, in order; a move stands under both of its engines."""
        self._moving: dict[EngineId, Move] = {}
        """By engine, under both as well."""
        self._asked = 0
        self._freed: dict[EngineId, None] = {}
        """Engines whose moves may have become possible since the last review."""

    @property
    def waiting(self) -> int:
        """Transfers that have not started."""
        return sum(map(len, self._pending.values())) // 2

    @property
    def moving(self) -> int:
        """Transfers under way."""
        return len(self._moving) // 2

    def seconds(self, kv_bytes: float) -> float:
        """Seconds that `kv_bytes` take once both engines are free."""
        return self._fixed_s + kv_bytes / self._bytes_per_s

    def move(
        self,
        source: EngineId,
        target: EngineId,
        kv_bytes: float,
        callback: Callable[[], None],
    ) -> Move:
        """Move `kv_bytes`; `callback` is called when they are there, or once `drop` gave them up.

        Moves asked for at one instant compete by length, whatever their order.

        Raises:
            ValueError: the two engines are one, or the size is negative.
        """
        if source == target or not kv_bytes >= 0:
            raise ValueError(f"cannot move {kv_bytes} bytes of KV from {source} to {target}")
        self._asked += 1
        move = Move((-kv_bytes, self._asked), source, target, kv_bytes, callback)
        for engine in (source, target):
            insort(self._pending.setdefault(engine, []), move)
            self._review(engine)
        return move

    def withdraw(self, move: Move) -> bool:
        """Give up a transfer that has not started; returns whether that was so. Calls nothing."""
        if move not in self._pending.get(move.source, ()):
            return False
        self._forget(move)
        return True

    def drop(self, engine: EngineId) -> None:
        """Give up every transfer from or to an engine that died; their callbacks are called now.

        "Now" is this instant of simulated time, not from inside this call.
        """
        lost = list(self._pending.get(engine, ()))
        for move in lost:
            self._forget(move)
        if engine in self._moving:
            lost.append(self._moving[engine])
            self._release(lost[-1])
        for move in lost:
            self._after(0.0, move.callback)

    def _review(self, engine: EngineId) -> None:
        if not self._freed:
            self._after(0.0, self._begin_what_can)
        self._freed[engine] = None

    def _begin_what_can(self) -> None:
        """Only moves of freed engines can have become possible: look at those, longest first."""
        freed, self._freed = self._freed, {}
        free = {engine: None for engine in freed if engine not in self._moving}
        chosen: list[Move] = []
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
            self._after(self.seconds(move.kv_bytes), partial(self._arrived, move))

    def _arrived(self, move: Move) -> None:
        if self._moving.get(move.source) is move:
            self._release(move)
            move.callback()

    def _release(self, move: Move) -> None:
        for engine in (move.source, move.target):
            del self._moving[engine]
            self._review(engine)

    def _forget(self, move: Move) -> None:
        for engine in (move.source, move.target):
            self._pending[engine].remove(move)

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        callbacks = self._env.timeout(delay_s).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())
