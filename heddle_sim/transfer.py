"""KV prefixes on their way from engine to engine, in simulated time."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import simpy

from heddle_core.ids import EngineId
from heddle_core.transfers import Move, TransferQueue


class _Load:
    """What one transfer carries."""

    __slots__ = ("callback", "kv_bytes")

    def __init__(self, kv_bytes: float, callback: Callable[[], None]) -> None:
        self.kv_bytes, self.callback = kv_bytes, callback


Transfer: TypeAlias = Move[_Load]


class Transfers:
    """KV transfers between engines; each takes ``fixed_s + bytes / bytes_per_s``.

    `TransferQueue` says which may begin. Those asked for at one instant compete by length, whatever
    their order.
    """

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
        self._queue: TransferQueue[_Load] = TransferQueue()
        self._review_is_due = False

    @property
    def waiting(self) -> int:
        """Transfers that have not started."""
        return self._queue.waiting

    @property
    def moving(self) -> int:
        """Transfers under way."""
        return self._queue.moving

    def seconds(self, kv_bytes: float) -> float:
        """Seconds that `kv_bytes` take once both engines are free."""
        return self._fixed_s + kv_bytes / self._bytes_per_s

    def move(
        self,
        source: EngineId,
        target: EngineId,
        kv_bytes: float,
        callback: Callable[[], None],
    ) -> Transfer:
        """Move `kv_bytes`; `callback` is called when they are there, or once `drop` gave them up.

        Raises:
            ValueError: the two engines are one, or the size is negative.
        """
        move = self._queue.ask(source, target, kv_bytes, _Load(kv_bytes, callback))
        self._review()
        return move

    def withdraw(self, move: Transfer) -> bool:
        """Give up a transfer that has not started; returns whether that was so. Calls nothing."""
        return self._queue.withdraw(move)

    def drop(self, engine: EngineId) -> None:
        """Give up every transfer from or to an engine that died; their callbacks are called now.

        "Now" is this instant of simulated time, not from inside this call.
        """
        for move in self._queue.drop(engine):
            self._after(0.0, move.what.callback)
        self._review()

    def _review(self) -> None:
        if self._queue.changed and not self._review_is_due:
            self._review_is_due = True
            self._after(0.0, self._begin_what_can)

    def _begin_what_can(self) -> None:
        self._review_is_due = False
        for move in self._queue.begin():
            self._after(self.seconds(move.what.kv_bytes), partial(self._arrived, move))

    def _arrived(self, move: Transfer) -> None:
        if self._queue.end(move):
            self._review()
            move.what.callback()

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        callbacks = self._env.timeout(delay_s).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())
