"""KV on its way between engines: asked for by a Migrate, over with one MigrationFinished."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeAlias

from heddle_core.commands import Migrate
from heddle_core.events import MigrationFinished
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.transfers import Move, TransferQueue
from heddle_runtime.clock import RunClock
from heddle_runtime.engine import EngineClient, KvHandle, KvPlaced


@dataclass(slots=True, eq=False)
class _Moving:
    """One migration that is under way."""

    id: int
    """Comes back with what engines answer: one that was given up may still be answered later."""
    command: Migrate
    group: GroupId
    context_ids: Sequence[int]
    kv: KvHandle | None = None
    without_source: bool = False
    """Whether the target has to do without the source, which has nothing or is gone."""
    transfer: "Transfer | None" = None
    """Its place in the order of transfers, once the source has said what there is to pull."""


Transfer: TypeAlias = Move[_Moving]


class Moves:
    """Carries migrations out: ask the source for a handle, wait for a turn, pull, report."""

    def __init__(
        self,
        clock: RunClock,
        engines: Mapping[EngineId, EngineClient],
        deliver: Callable[[MigrationFinished], None],
    ) -> None:
        self._clock, self._engines, self._deliver = clock, engines, deliver
        self._moving: dict[TrajectoryId, _Moving] = {}
        self._ids = count(1)
        self._queue: TransferQueue[_Moving] = TransferQueue()
        self._review_is_due = False

    @property
    def count(self) -> int:
        """Migrations under way."""
        return len(self._moving)

    def migrate(self, command: Migrate, group: GroupId, context_ids: Sequence[int]) -> None:
        """Move a KV prefix, or bring the context to its new home some other way."""
        moving = _Moving(next(self._ids), command, group, context_ids)
        self._moving[command.trajectory] = moving
        source = self._engines.get(command.source)
        if source is not None:
            source.export_kv(command.trajectory, context_ids, move=moving.id)
        else:
            self._place(moving)

    def exported(self, trajectory: TrajectoryId, kv: KvHandle | None, move: int) -> None:
        """The source has answered: queue for the two engines' turn, or go on without KV."""
        moving = self._moving.get(trajectory)
        if moving is None or moving.id != move:
            return
        moving.kv = kv
        if kv is None:
            self._place(moving)
            return
        command = moving.command
        moving.transfer = self._queue.ask(command.source, command.target, kv.kv_bytes, moving)
        self._review()

    def placed(self, trajectory: TrajectoryId, placed: KvPlaced, move: int) -> None:
        """The target has answered."""
        moving = self._moving.get(trajectory)
        if moving is None or moving.id != move:
            return
        lost = moving.kv is not None and placed.way == "none"
        source = self._engines.get(moving.command.source)
        if source is not None and not lost:
            source.forget(trajectory)
        self._report(moving, placed, ok=not lost)

    def tool_returned(self, trajectory: TrajectoryId) -> None:
        """Give up a move that has not begun: the step that it would hold up can run.

        Migration is opportunistic: what has not begun by the end of the tool call would delay the
        trajectory by other transfers' time, not only by its own.
        """
        moving = self._moving.get(trajectory)
        if moving is None or moving.transfer is None:
            return
        if self._queue.withdraw(moving.transfer):
            self._report(moving, KvPlaced("none", 0), ok=False)

    def engine_gone(self, engine: EngineId) -> None:
        """Give up what goes from or to an engine that died or stops.

        Told after the engine's own event.
        """
        self._queue.drop(engine)
        for moving in self._moving.values():
            command = moving.command
            from_it = command.source == engine and not moving.without_source
            if from_it or command.target == engine:
                self._clock.call_after(0.0, partial(self._give_up, moving))
        self._review()

    def _give_up(self, moving: _Moving) -> None:
        if self._moving.get(moving.command.trajectory) is moving:
            self._report(moving, KvPlaced("none", 0), ok=False)

    def _review(self) -> None:
        """Look what can begin, once everything of this instant has been asked for."""
        if self._queue.changed and not self._review_is_due:
            self._review_is_due = True
            self._clock.call_after(0.0, self._begin_what_can)

    def _begin_what_can(self) -> None:
        self._review_is_due = False
        for transfer in self._queue.begin():
            self._place(transfer.what)

    def _place(self, moving: _Moving) -> None:
        command = moving.command
        moving.without_source = moving.kv is None
        target = self._engines.get(command.target)
        if target is None:
            self._report(moving, KvPlaced("none", 0), ok=False)
        else:
            target.import_kv(
                command.trajectory, moving.group, moving.context_ids, moving.kv, move=moving.id
            )

    def _report(self, moving: _Moving, placed: KvPlaced, *, ok: bool) -> None:
        command = moving.command
        del self._moving[command.trajectory]
        transfer = moving.transfer
        # Both ends of a transfer that never began, or is under way, are free for others again.
        if transfer is not None and (self._queue.withdraw(transfer) or self._queue.end(transfer)):
            self._review()
        self._deliver(
            MigrationFinished(
                time_s=self._clock.now_s,
                trajectory=command.trajectory,
                source=command.source,
                target=command.target,
                ok=ok,
                kv_tokens=placed.tokens,
                way=placed.way,
            )
        )
