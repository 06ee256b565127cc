"""Migrations one by one: an answer to one that was given up never counts for a later one."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from heddle_core.commands import Dispatch, Migrate, StartEngine
from heddle_core.events import EngineFailed, Event, MigrationFinished
from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.transfers import TransferQueue
from heddle_rollout.cluster import Cluster
from heddle_rollout.engines import EngineCapabilities, KvHandle, KvPlaced
from heddle_rollout.migrations import Migrations
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from heddle_sim.config import SimulationConfig
from heddle_sim.engine_client import SimLauncher
from tests.rollout.contract import request
from tests.rollout.test_sim_contract import CONFIG

T, G = TrajectoryId("t"), GroupId("g")
A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


class Puppet:
    """Keeps its requests; the test answers."""

    def __init__(self) -> None:
        self.capabilities = EngineCapabilities()
        self.exports: list[int] = []
        self.imports: list[tuple[KvHandle | None, int]] = []
        self.forgotten = 0

    def export_kv(self, trajectory: TrajectoryId, ids: Sequence[int], *, move: int = 0) -> bool:
        self.exports.append(move)
        return True

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
    """Moves between engines that the test controls."""

    def __init__(self) -> None:
        self.clock = RunClock(asyncio.get_running_loop())
        self.clock.thaw()
        self.engines: dict[EngineId, Any] = {name: Puppet() for name in (A, B, C)}
        self.finished: list[MigrationFinished] = []
        self.migrations = Migrations(self.clock, self.engines, self.finished.append)

    def lose(self, name: EngineId) -> None:
        del self.engines[name]
        self.migrations.engine_gone(name)


def staged(play: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await play(Stage())

    run_virtual(main())


async def instant() -> None:
    await asyncio.sleep(0.001)


def test_a_move_ends_once_with_the_report_of_its_own_target():
    async def play(stage: Stage) -> None:
        stage.migrations.migrate(migrate(A, B), G, ())
        (move,) = stage.engines[A].exports
        stage.migrations.exported(T, handle(A), move)
        await instant()
        assert stage.engines[B].imports == [(handle(A), move)]
        for _ in range(2):
            stage.migrations.placed(T, KvPlaced("kv", 64), move)
        assert [(e.ok, e.way, e.kv_tokens) for e in stage.finished] == [(True, "kv", 64)]
        assert stage.engines[A].forgotten == 1
        assert stage.migrations.count == 0

    staged(play)


def test_a_handle_that_comes_twice_keeps_no_link_from_other_moves():
    async def play(stage: Stage) -> None:
        stage.migrations.migrate(migrate(A, B), G, ())
        (move,) = stage.engines[A].exports
        for _ in range(2):
            stage.migrations.exported(T, handle(A), move)
        await instant()
        stage.migrations.exported(T, handle(A), move)
        assert stage.engines[B].imports == [(handle(A), move)]
        stage.migrations.placed(T, KvPlaced("kv", 64), move)

        stage.migrations.migrate(migrate(A, B), G, ())
        *_, second = stage.engines[A].exports
        stage.migrations.exported(T, handle(A), second)
        await instant()
        assert stage.engines[B].imports[1:] == [(handle(A), second)]

    staged(play)


def test_a_late_word_of_the_target_does_not_end_the_next_move():
    async def play(stage: Stage) -> None:
        stage.migrations.migrate(migrate(A, B), G, ())
        (first,) = stage.engines[A].exports
        stage.migrations.exported(T, handle(A), first)
        await instant()
        stage.lose(A)
        await instant()
        assert [(e.source, e.ok) for e in stage.finished] == [(A, False)]

        stage.migrations.migrate(migrate(C, B), G, ())
        (second,) = stage.engines[C].exports
        stage.migrations.exported(T, handle(C), second)
        await instant()
        stage.migrations.placed(T, KvPlaced("prefill", 32), first)
        assert stage.migrations.count == 1
        stage.migrations.placed(T, KvPlaced("kv", 64), second)
        assert [(e.source, e.ok, e.kv_tokens) for e in stage.finished[1:]] == [(C, True, 64)]

    staged(play)


def test_a_late_handle_is_not_pulled_by_the_next_move():
    async def play(stage: Stage) -> None:
        stage.migrations.migrate(migrate(A, B), G, ())
        (first,) = stage.engines[A].exports
        stage.lose(B)
        await instant()
        assert [(e.target, e.ok) for e in stage.finished] == [(B, False)]

        stage.migrations.migrate(migrate(A, C), G, ())
        second = stage.engines[A].exports[-1]
        assert second != first
        stage.migrations.exported(T, handle(A, 32), first)
        await instant()
        assert stage.engines[C].imports == []
        stage.migrations.exported(T, handle(A, 96), second)
        await instant()
        assert stage.engines[C].imports == [(handle(A, 96), second)]

    staged(play)


@pytest.mark.parametrize("answers", ["first", "second"])
def test_simulated_engines_say_which_move_they_answer(answers: str):
    """The source dies under a transfer of 10 s; 4 s later another begins, to the same target."""
    events: list[Event] = []

    async def main() -> None:
        clock = RunClock(asyncio.get_running_loop())
        clock.thaw()
        left = {"first": [10.0, 10.0], "second": [10.0, 1.0]}[answers]

        class Slow(SimulationConfig):
            def transfer_s(self, kv_bytes: float) -> float:
                return left.pop(0)

        fields = {f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)}
        launcher = SimLauncher(Slow(**fields | {"faults": ((102.0, A),)}), clock)
        launcher.schedule_faults()
        ended = asyncio.Event()
        cluster = Cluster(
            clock,
            launcher,
            deliver=events.append,
            on_end=lambda engine, end: ended.set(),
            on_salvage=lambda trajectory, end: True,
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
        cluster.migrations.migrate(migrate(A, B), G, ())
        await asyncio.sleep(6.0)
        cluster.migrations.migrate(migrate(C, B), G, ())
        await asyncio.sleep(30.0)

    run_virtual(main())
    moved = [e for e in events if isinstance(e, MigrationFinished)]
    assert [(e.time_s, e.source, e.ok) for e in moved] == [
        (102.0, A, False),
        (116.0 if answers == "first" else 107.0, C, True),
    ]
    assert [e.engine for e in events if isinstance(e, EngineFailed)] == [A]


# -- the order of transfers: 1 s, and a second for each byte ---------------------------------------


class Link:
    """Migrations between engines that export a given number of bytes."""

    def __init__(self) -> None:
        self.clock = RunClock(asyncio.get_running_loop())
        self.clock.thaw()
        self.ends_by_name: dict[str, tuple[float, bool]] = {}
        self.sizes: dict[str, int] = {}
        names = [EngineId(f"e{i}") for i in range(4)]
        self.engines: dict[EngineId, Any] = {name: End(name, self) for name in names}
        self.migrations = Migrations(self.clock, self.engines, self.finished)

    def move(self, name: str, source: str, target: str, size: int) -> None:
        self.sizes[name] = size
        ends = {"source": EngineId(source), "target": EngineId(target)}
        self.migrations.migrate(Migrate(trajectory=TrajectoryId(name), **ends), G, ())

    def lose(self, name: str) -> None:
        del self.engines[EngineId(name)]
        self.migrations.engine_gone(EngineId(name))

    def finished(self, event: MigrationFinished) -> None:
        self.ends_by_name[event.trajectory] = event.time_s, event.ok


class End:
    """An engine at an end of the link."""

    def __init__(self, name: EngineId, link: Link) -> None:
        self.name, self.link = name, link
        self.capabilities = EngineCapabilities()

    def export_kv(self, trajectory: TrajectoryId, ids: Sequence[int], *, move: int = 0) -> bool:
        size = self.link.sizes[trajectory]
        kv = KvHandle(
            source=self.name, trajectory=trajectory, kv_tokens=size, kv_bytes=size, expires_s=1e9
        )
        self.link.clock.call_after(0.0, self.link.migrations.exported, trajectory, kv, move)
        return True

    def import_kv(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        ids: Sequence[int],
        kv: KvHandle | None,
        *,
        move: int = 0,
    ) -> KvPlaced | None:
        assert kv is not None
        placed = KvPlaced("kv", kv.kv_tokens)
        self.link.clock.call_after(
            1.0 + kv.kv_bytes, self.link.migrations.placed, trajectory, placed, move
        )
        return None

    def forget(self, trajectory: TrajectoryId) -> None:
        pass


def linked(play: Callable[[Link], Coroutine[Any, Any, None]]) -> dict[str, tuple[float, bool]]:
    """Let `play` move KV; return when each move ended, and whether it succeeded."""

    async def main() -> dict[str, tuple[float, bool]]:
        link = Link()
        await play(link)
        await asyncio.sleep(1000.0)
        return link.ends_by_name

    return run_virtual(main())


def test_a_transfer_takes_its_fixed_time_and_its_bytes() -> None:
    async def play(link: Link) -> None:
        link.move("a", "e0", "e1", 9)

    assert linked(play) == {"a": (10.0, True)}


def test_of_transfers_that_meet_at_an_engine_the_longest_goes_first() -> None:
    async def play(link: Link) -> None:
        link.move("short", "e0", "e1", 1)
        link.move("long", "e0", "e2", 9)
        link.move("apart", "e3", "e1", 3)

    # `long` holds e0 until 10; `apart` uses e3 and e1 meanwhile; then `short`.
    assert linked(play) == {"apart": (4.0, True), "long": (10.0, True), "short": (12.0, True)}


def test_a_transfer_needs_both_of_its_engines() -> None:
    async def play(link: Link) -> None:
        link.move("first", "e0", "e1", 4)
        link.move("second", "e1", "e2", 3)
        link.move("third", "e2", "e3", 2)

    assert linked(play) == {"third": (3.0, True), "first": (5.0, True), "second": (9.0, True)}


def test_transfers_of_a_dead_engine_end_at_once_and_free_the_other() -> None:
    async def play(link: Link) -> None:
        link.move("moving", "e0", "e1", 9)
        await asyncio.sleep(2.0)
        link.move("queued", "e1", "e0", 5)
        link.move("other", "e1", "e2", 1)
        link.lose("e0")
        assert link.ends_by_name == {}

    assert linked(play) == {"moving": (2.0, False), "queued": (2.0, False), "other": (4.0, True)}


def test_a_move_that_has_not_begun_when_its_tool_returns_is_given_up() -> None:
    async def play(link: Link) -> None:
        link.move("long", "e0", "e1", 9)
        link.move("short", "e1", "e2", 1)
        await asyncio.sleep(2.0)
        link.migrations.tool_returned(TrajectoryId("short"))
        link.migrations.tool_returned(TrajectoryId("long"))
        link.move("exporting", "e2", "e3", 1)
        link.migrations.tool_returned(TrajectoryId("exporting"))

    assert linked(play) == {"short": (2.0, False), "exporting": (2.0, False), "long": (10.0, True)}


def test_an_engine_that_exports_none_or_imports_none_needs_no_turn() -> None:
    """The target prefills at once, beside transfers on the link."""
    asked: list[tuple[str, bool]] = []

    class Prefills(End):
        def import_kv(
            self,
            trajectory: TrajectoryId,
            group: GroupId,
            ids: Sequence[int],
            kv: KvHandle | None,
            *,
            move: int = 0,
        ) -> KvPlaced | None:
            asked.append((trajectory, kv is not None))
            return KvPlaced("prefill", 7)

    async def play(link: Link) -> None:
        link.engines[EngineId("e0")].capabilities = EngineCapabilities(export_kv=False)
        for name in ("e1", "e3"):
            link.engines[EngineId(name)] = Prefills(EngineId(name), link)
        link.engines[EngineId("e3")].capabilities = EngineCapabilities(import_kv=False)
        link.move("no export", "e0", "e1", 9)
        link.move("no import", "e2", "e3", 9)

    assert linked(play) == {"no export": (0.0, True), "no import": (0.0, True)}
    assert asked == [("no export", False), ("no import", True)]


def test_a_transfer_that_cannot_be_is_refused() -> None:
    config = dataclasses.asdict(CONFIG)
    with pytest.raises(ValueError, match="bytes_per_s > 0"):
        SimulationConfig(**config | {"transfer_bytes_per_s": 0.0})
    with pytest.raises(ValueError, match="cannot move"):
        TransferQueue[None]().request(A, A, 1.0, None)
