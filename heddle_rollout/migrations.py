"""KV that moves between engines: requested by a Migrate, over with one MigrationFinished."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import TypeAlias

from heddle_core.commands import Migrate
from heddle_core.events import MigrationFinished
from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.transfers import Move, TransferQueue
from heddle_rollout.clock import Clock
from heddle_rollout.engines import EngineClient, KvHandle, KvPlaced

NOT_PLACED = KvPlaced("none", 0)


class _Migration:
    __slots__ = ("begun", "command", "context_ids", "group", "id", "kv", "transfer")

    def __init__(
        self, id_: int, command: Migrate, group: GroupId, context_ids: Sequence[int]
    ) -> None:
        self.id = id_
        """Engines return it with their reports: the migration may have been given up since."""
        self.command, self.group, self.context_ids = command, group, context_ids
        self.kv: KvHandle | None = None
        self.transfer: Transfer | None = None
        """Its entry in the queue of transfers, once the source has exported the KV."""
        self.begun = False
        """Whether the target imports the context."""


Transfer: TypeAlias = Move[_Migration]


class Migrations:
    """Executes migrations: gets a handle from the source, waits for a turn, pulls, reports."""

    def __init__(
        self,
        clock: Clock,
        engines: Mapping[EngineId, EngineClient],
        deliver: Callable[[MigrationFinished], None],
    ) -> None:
        self._clock, self._engines, self._deliver = clock, engines, deliver
        self._under_way: dict[TrajectoryId, _Migration] = {}
        self._ids = count(1)
        self._queue: TransferQueue[_Migration] = TransferQueue()
        self._review_is_due = False

    @property
    def count(self) -> int:
        """Migrations under way."""
        return len(self._under_way)

    def migrate(self, command: Migrate, group: GroupId, context_ids: Sequence[int]) -> None:
        """Move a KV prefix, or have the context prefilled at its new home."""
        migration = _Migration(next(self._ids), command, group, context_ids)
        self._under_way[command.trajectory] = migration
        source = self._engines.get(command.source)
        if (
            source is None
            or not source.capabilities.export_kv
            or not source.export_kv(command.trajectory, context_ids, move=migration.id)
        ):
            self._begin(migration)

    def exported(self, trajectory: TrajectoryId, kv: KvHandle | None, move: int) -> None:
        """The source has exported: queue the transfer, or go on without KV."""
        migration = self._under_way.get(trajectory)
        if migration is None or migration.id != move:
            return
        if migration.begun or migration.transfer is not None:
            return  # said again: a second transfer of it would never end
        migration.kv = kv
        command = migration.command
        target = self._engines.get(command.target)
        if kv is None or target is None or not target.capabilities.import_kv:
            self._begin(migration)
            return
        migration.transfer = self._queue.request(
            command.source, command.target, kv.kv_bytes, migration
        )
        self._review()

    def placed(self, trajectory: TrajectoryId, placed: KvPlaced, move: int) -> None:
        """The target has imported."""
        migration = self._under_way.get(trajectory)
        if migration is not None and migration.id == move:
            self._end(migration, placed)

    def tool_returned(self, trajectory: TrajectoryId) -> None:
        """Give up a migration that has not begun: the step that it would delay can run.

        Migration is opportunistic: what has not begun by the end of the tool call would delay the
        trajectory by other transfers' time, not only by its own.
        """
        migration = self._under_way.get(trajectory)
        if migration is not None and not migration.begun:
            self._report(migration, NOT_PLACED, ok=False)

    def engine_gone(self, engine: EngineId) -> None:
        """Give up what goes from or to an engine that died or stops, after that event."""
        lost = [transfer.what for transfer in self._queue.drop(engine)]
        for migration in self._under_way.values():
            command = migration.command
            # A prefill on the target goes on without the source.
            from_it = command.source == engine and not migration.begun
            if (from_it or command.target == engine) and migration not in lost:
                lost.append(migration)
        for migration in lost:
            self._clock.call_after(0.0, self._give_up, migration)
        self._review()

    def _give_up(self, migration: _Migration) -> None:
        if self._under_way.get(migration.command.trajectory) is migration:
            self._report(migration, NOT_PLACED, ok=False)

    def _review(self) -> None:
        """Begin transfers that can, after all requests at this time."""
        if self._queue.changed and not self._review_is_due:
            self._review_is_due = True
            self._clock.call_after(0.0, self._begin_transfers)

    def _begin_transfers(self) -> None:
        self._review_is_due = False
        for transfer in self._queue.begin():
            self._begin(transfer.what)

    def _begin(self, migration: _Migration) -> None:
        command = migration.command
        migration.begun = True
        target = self._engines.get(command.target)
        if target is None:
            self._report(migration, NOT_PLACED, ok=False)
            return
        placed = target.import_kv(
            command.trajectory,
            migration.group,
            migration.context_ids,
            migration.kv,
            move=migration.id,
        )
        if placed is not None:
            self._end(migration, placed)

    def _end(self, migration: _Migration, placed: KvPlaced) -> None:
        lost = migration.kv is not None and placed.way == "none"
        source = self._engines.get(migration.command.source)
        if source is not None and not lost and not migration.command.copy:
            source.forget(migration.command.trajectory)
        self._report(migration, placed, ok=not lost)

    def _report(self, migration: _Migration, placed: KvPlaced, *, ok: bool) -> None:
        command = migration.command
        del self._under_way[command.trajectory]
        transfer = migration.transfer
        # Both engines of a transfer that never began, or is under way, are free again.
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
                way=placed.way if placed.tokens > 0 else "none",
            )
        )
