"""KV prefixes on their way from engine to engine.

A transfer uses both of its engines alone: it starts only when neither its source nor its target is
in another transfer. Of those that could start, the longest goes first (the endpoint-exclusive order
of the Heddle paper), so that short ones fill in around it.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import simpy

from heddle_core.ids import EngineId


class _Move(NamedTuple):
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
        self._pending: list[_Move] = []
        """Longest first, equal ones in the order they were asked for."""
        self._moving: list[_Move] = []
        self._review_due = False

    @property
    def waiting(self) -> int:
        """Transfers that have not started."""
        return len(self._pending)

    @property
    def moving(self) -> int:
        """Transfers under way."""
        return len(self._moving)

    def seconds(self, kv_bytes: float) -> float:
        """Seconds that `kv_bytes` take once both engines are free."""
        return self._fixed_s + kv_bytes / self._bytes_per_s

    def move(
        self,
        source: EngineId,
        target: EngineId,
        kv_bytes: float,
        callback: Callable[[], None],
    ) -> None:
        """Move `kv_bytes`; `callback` is called when they are there, or once `drop` gave them up.

        Moves asked for at one instant compete by length, whatever their order.

        Raises:
            ValueError: the two engines are one, or the size is negative.
        """
        if source == target or not kv_bytes >= 0:
            raise ValueError(f"cannot move {kv_bytes} bytes of KV from {source} to {target}")
        self._pending.append(_Move(source, target, kv_bytes, callback))
        self._pending.sort(key=lambda move: -move.kv_bytes)
        self._review()

    def drop(self, engine: EngineId) -> None:
        """Give up every transfer from or to an engine that died; their callbacks are called now.

        "Now" is this instant of simulated time, not from inside this call.
        """
        for moves in (self._pending, self._moving):
            for move in [m for m in moves if engine in (m.source, m.target)]:
                _forget(moves, move)
                self._after(0.0, move.callback)
        self._review()

    def _review(self) -> None:
        if not self._review_due:
            self._review_due = True
            self._after(0.0, self._begin_what_can)

    def _begin_what_can(self) -> None:
        self._review_due = False
        used = [engine for m in self._moving for engine in (m.source, m.target)]
        for move in list(self._pending):
            if move.source not in used and move.target not in used:
                used += (move.source, move.target)
                _forget(self._pending, move)
                self._moving.append(move)
                self._after(self.seconds(move.kv_bytes), partial(self._arrived, move))

    def _arrived(self, move: _Move) -> None:
        if _forget(self._moving, move):
            self._review()
            move.callback()

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        callbacks = self._env.timeout(delay_s).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())


def _forget(moves: list[_Move], move: _Move) -> bool:
    """Remove this very move, not an equal one; returns whether it was there."""
    for i, other in enumerate(moves):
        if other is move:
            del moves[i]
            return True
    return False
