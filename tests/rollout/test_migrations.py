"""Migrations one by one: an answer to one that was given up never counts for a later one."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from heddle_runtime.cluster import Cluster
from heddle_runtime.fake_engine import FakeLauncher
from heddle_runtime.moves import Moves

from heddle_core.commands import Dispatch, Migrate, StartEngine
from heddle_core.events import EngineFailed, Event, MigrationFinished
from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_rollout.engines import KvHandle, KvPlaced
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from tests.rollout.contract import request
from tests.runtime.test_fake_contract import model

T, G = TrajectoryId("t"), GroupId("g")
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


class Puppet:
    """Keeps what it is asked for; the test answers."""

    def __init__(self) -> None:
        self.exports: list[int] = []
        self.imports: list[tuple[KvHandle | None, int]] = []
        self.forgotten = 0

    def export_kv(self, trajectory: TrajectoryId, ids: Sequence[int], *, move: int = 0) -> None:
        self.exports.append(move)

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> None:
        self.imports.append((kv, move))

    def forget(self, trajectory: TrajectoryId) -> None:
        self.forgotten += 1


def migrate(source: EngineId, target: EngineId) -> Migrate:
    return Migrate(trajectory=T, source=source, target=target)


def handle(source: EngineId, tokens: int = 64) -> KvHandle:
    return KvHandle(source=source, trajectory=T, kv_tokens=tokens, kv_bytes=tokens, expires_s=1e9)


class Stage:
    """Moves between puppets."""

    def __init__(self) -> None:
        self.clock = RunClock(asyncio.get_running_loop())
        self.clock.thaw()
        self.engines: dict[EngineId, Any] = {name: Puppet() for name in (A, B, C)}
        self.told: list[MigrationFinished] = []
        self.moves = Moves(self.clock, self.engines, self.told.append)

    def lose(self, name: EngineId) -> None:
        del self.engines[name]
        self.moves.engine_gone(name)


def staged(play: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await play(Stage())

    run_virtual(main())


async def instant() -> None:
    await asyncio.sleep(0.001)


def test_a_move_ends_once_with_what_its_own_target_says():
    async def play(stage: Stage) -> None:
        stage.moves.migrate(migrate(A, B), G, ())
        (move,) = stage.engines[A].exports
        stage.moves.exported(T, handle(A), move)
        await instant()
        assert stage.engines[B].imports == [(handle(A), move)]
        for _ in range(2):
            stage.moves.placed(T, KvPlaced("kv", 64), move)
        assert [(e.ok, e.way, e.kv_tokens) for e in stage.told] == [(True, "kv", 64)]
        assert stage.engines[A].forgotten == 1
        assert stage.moves.count == 0

    staged(play)


def test_a_late_word_of_the_target_does_not_end_the_next_move():
    async def play(stage: Stage) -> None:
        stage.moves.migrate(migrate(A, B), G, ())
        (first,) = stage.engines[A].exports
        stage.moves.exported(T, handle(A), first)
        await instant()
        stage.lose(A)
        await instant()
        assert [(e.source, e.ok) for e in stage.told] == [(A, False)]

        stage.moves.migrate(migrate(C, B), G, ())
        (second,) = stage.engines[C].exports
        stage.moves.exported(T, handle(C), second)
        await instant()
        stage.moves.placed(T, KvPlaced("prefill", 32), first)
        assert stage.moves.count == 1
        stage.moves.placed(T, KvPlaced("kv", 64), second)
        assert [(e.source, e.ok, e.kv_tokens) for e in stage.told[1:]] == [(C, True, 64)]

    staged(play)


def test_a_late_handle_is_not_pulled_by_the_next_move():
    async def play(stage: Stage) -> None:
        stage.moves.migrate(migrate(A, B), G, ())
        (first,) = stage.engines[A].exports
        stage.lose(B)
        await instant()
        assert [(e.target, e.ok) for e in stage.told] == [(B, False)]

        stage.moves.migrate(migrate(A, C), G, ())
        second = stage.engines[A].exports[-1]
        assert second != first
        stage.moves.exported(T, handle(A, 32), first)
        await instant()
        assert stage.engines[C].imports == []
        stage.moves.exported(T, handle(A, 96), second)
        await instant()
        assert stage.engines[C].imports == [(handle(A, 96), second)]

    staged(play)


@pytest.mark.parametrize("answers", ["first", "second"])
def test_fake_engines_say_which_move_they_answer(answers: str):
    """The source dies under a transfer of 10 s; 4 s later another begins, to the same target."""
    events: list[Event] = []

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        slow = {"first": (10.0, 10.0), "second": (10.0, 1.0)}[answers]
        left = list(slow)
        launcher = FakeLauncher(
            clock, model, transfer=lambda size: left.pop(0), faults=[(102.0, A)]
        )
        ended = asyncio.Event()
        cluster = Cluster(
            clock,
            launcher,
            deliver=events.append,
            on_end=lambda engine, end: ended.set(),
            on_salvage=lambda end: None,
            report_interval_s=0.0,
            report_delay_s=0.0,
        )
        for name in (A, B, C):
            cluster.start(StartEngine(engine=name, shape=EngineShape("g", 1), max_running=4))
        await asyncio.sleep(1.0)
        for name in (A, C):
            cluster.dispatch(
                Dispatch(trajectory=T, step=0, engine=name, priority=0.0),
                request("t", [1] * 320, 4),
            )
            await ended.wait()
            ended.clear()
        await asyncio.sleep(100.0 - clock.now_s)
        cluster.migrate(migrate(A, B), G, ())
        await asyncio.sleep(6.0)
        cluster.migrate(migrate(C, B), G, ())
        await asyncio.sleep(30.0)

    run_virtual(main())
    moved = [e for e in events if isinstance(e, MigrationFinished)]
    assert [(e.time_s, e.source, e.ok) for e in moved] == [
        (102.0, A, False),
        (116.0 if answers == "first" else 107.0, C, True),
    ]
    assert [e.engine for e in events if isinstance(e, EngineFailed)] == [A]
