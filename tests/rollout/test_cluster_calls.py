"""Which calls the cluster makes of which engine, and what it makes of their answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from heddle_core.commands import Dispatch, Migrate, StartEngine
from heddle_core.events import EngineFailed, Event, MigrationFinished
from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_rollout.cluster import Cluster
from heddle_rollout.engines import (
    EngineListener,
    EngineSample,
    KvHandle,
    KvPlaced,
    StepRequest,
    StepResult,
)
from heddle_runtime.clock import RunClock
from heddle_runtime.virtual_time import run_virtual
from tests.rollout.contract import request
from tests.rollout.test_migrations import Puppet

T, G = TrajectoryId("t"), GroupId("t")
A, B, C, D = (EngineId(name) for name in "abcd")


class Recorded(Puppet):
    """An engine that keeps all of its calls."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self.spec, self.kv_capacity_tokens = spec, 1000
        self.calls: list[str] = []

    def start(self, request: StepRequest) -> None:
        self.calls.append("start")

    def abort(self, trajectory: TrajectoryId) -> None:
        self.calls.append("abort")

    def forget(self, trajectory: TrajectoryId) -> None:
        self.calls.append("forget")

    def update_weights(self, version: int, path: str, *, keep_kv: bool = False) -> None:
        self.calls.append(f"update {version}")

    def sample(self) -> EngineSample:
        return EngineSample(0, 0, 0, 0)

    def stop(self) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        self.calls.append("kill")


class Cast:
    """A cluster of three such engines, all ready; implements `Launcher`."""

    def __init__(self) -> None:
        self.engines: dict[EngineId, Recorded] = {}
        self.events: list[Event] = []
        clock = RunClock(asyncio.get_running_loop())
        self.cluster = Cluster(
            clock,
            self,
            deliver=self.events.append,
            on_end=lambda engine, result: None,
            on_salvage=lambda trajectory, result: True,
        )
        for name in (A, B, C):
            self.add(name)

    def add(self, name: EngineId) -> None:
        self.cluster.start(StartEngine(engine=name, shape=EngineShape("g", 1), max_running=4))
        self.cluster.engine_ready(name, 1000)

    def start(self, spec: EngineSpec, listener: EngineListener) -> Recorded:
        self.engines[spec.engine] = Recorded(spec)
        return self.engines[spec.engine]

    async def close(self) -> None:
        pass

    def dispatch(self, at: EngineId, *, rewritten: bool = False) -> None:
        step = msgspec.structs.replace(request(T, [1] * 10, 5), rewritten=rewritten)
        self.cluster.dispatch(Dispatch(trajectory=T, step=0, engine=at, priority=0.0), step)

    def calls(self, kind: str) -> list[EngineId]:
        """Engines that got a call of this kind, as often as they got it."""
        return [name for name, each in self.engines.items() for c in each.calls if c == kind]

    def move(self, *, copy: bool = False, kv: bool = True, placed: KvPlaced) -> MigrationFinished:
        """Move T from A to B, with the target's answer; return what came of it."""
        command = Migrate(trajectory=T, source=A, target=B, copy=copy)
        self.cluster.migrations.migrate(command, G, [1] * 10)
        handle = KvHandle(source=A, trajectory=T, kv_tokens=64, kv_bytes=64, expires_s=1e9)
        self.cluster.kv_exported(A, T, handle if kv else None, 1)
        return self._moved(placed)

    def _moved(self, placed: KvPlaced) -> MigrationFinished:
        # The transfer waits for its turn, which comes with a call of the clock.
        migrations: Any = self.cluster.migrations
        if not self.engines[B].imports:
            migrations._begin_transfers()
        _, move = self.engines[B].imports[-1]
        self.cluster.kv_placed(B, T, placed, move)
        [event] = [e for e in self.events if isinstance(e, MigrationFinished)]
        return event


def playing(play: Callable[[Cast], None]) -> None:
    async def main() -> None:
        play(Cast())

    run_virtual(main())


# -- engines that come and go ----------------------------------------------------------------------


def test_an_engine_that_becomes_ready_later_loads_the_weights_that_others_have():
    def play(cast: Cast) -> None:
        updated: list[str] = []
        cast.cluster.update_engine(A, 3, "w3", keep_kv=False, then=lambda: updated.append("a"))
        assert cast.calls("update 3") == [A]
        cast.cluster.weights_updated(A, 3)
        assert updated == ["a"]
        cast.add(D)
        assert cast.calls("update 3") == [A, D]

    playing(play)


@pytest.mark.parametrize("goes_on", [False, True])
def test_the_clock_waits_for_first_engines_unless_it_is_to_go_on(goes_on: bool):
    def play(cast: Cast) -> None:
        if goes_on:
            cast.cluster.go_on()
        cast.cluster.start(StartEngine(engine=D, shape=EngineShape("g", 1), max_running=4))
        assert cast.cluster._clock.frozen is not goes_on
        cast.cluster.engine_ready(D, 1000)
        assert not cast.cluster._clock.frozen

    playing(play)


def test_an_idle_engine_is_sampled_once_and_again_when_its_name_comes_back():
    def play(cast: Cast) -> None:
        assert [name for name, _ in cast.cluster.sample()] == [A, B, C]
        assert cast.cluster.sample() == []
        cast.cluster.engine_failed(A, "died", ())
        cast.add(A)
        assert [name for name, _ in cast.cluster.sample()] == [A]

    playing(play)


def test_an_engine_that_was_seen_busy_is_sampled_again_when_idle():
    def play(cast: Cast) -> None:
        cast.cluster.sample()
        cast.dispatch(B)
        assert [name for name, _ in cast.cluster.sample()] == [B]
        # Aborted before it began: nothing else would tell that the engine is idle again.
        cast.cluster.step_ended(B, StepResult(trajectory=T, tokens=0, finished=False))
        assert [name for name, _ in cast.cluster.sample()] == [B]
        assert cast.cluster.sample() == []

    playing(play)


def test_a_step_is_aborted_where_it_runs():
    def play(cast: Cast) -> None:
        cast.dispatch(B)
        cast.cluster.abort(T)
        assert cast.calls("abort") == [B]

    playing(play)


# -- contexts that are forgotten -------------------------------------------------------------------


def test_a_rewritten_context_is_forgotten_on_all_engines_but_its_own():
    def play(cast: Cast) -> None:
        cast.dispatch(B, rewritten=True)
        assert cast.calls("start") == [B]
        assert cast.calls("forget") == [A, C]

    playing(play)


def test_a_context_that_only_grows_is_forgotten_nowhere():
    def play(cast: Cast) -> None:
        cast.dispatch(B)
        assert cast.calls("forget") == []

    playing(play)


def test_kv_kept_for_another_engine_is_forgotten_where_it_was_kept_and_once():
    def play(cast: Cast) -> None:
        cast.cluster.keep(T, A)
        cast.dispatch(B)
        assert cast.calls("forget") == [A]
        cast.cluster.let_go(T)
        assert cast.calls("forget") == [A]

    playing(play)


# -- moves -----------------------------------------------------------------------------------------


def test_what_has_moved_is_forgotten_at_its_source_alone():
    def play(cast: Cast) -> None:
        finished = cast.move(placed=KvPlaced("kv", 64))
        assert (finished.ok, finished.way, finished.kv_tokens) == (True, "kv", 64)
        assert cast.calls("forget") == [A]

    playing(play)


def test_what_was_copied_is_forgotten_nowhere():
    def play(cast: Cast) -> None:
        assert cast.move(copy=True, placed=KvPlaced("kv", 64)).ok
        assert cast.calls("forget") == []

    playing(play)


def test_a_pull_that_brought_nothing_is_no_move_and_its_source_keeps_the_kv():
    def play(cast: Cast) -> None:
        finished = cast.move(placed=KvPlaced("none", 0))
        assert (finished.ok, finished.way, finished.kv_tokens) == (False, "none", 0)
        assert cast.calls("forget") == []

    playing(play)


def test_a_target_without_space_for_a_block_takes_the_home_and_no_kv():
    def play(cast: Cast) -> None:
        finished = cast.move(placed=KvPlaced("kv", 0))
        assert (finished.way, finished.kv_tokens) == ("none", 0)

    playing(play)


def test_a_home_without_kv_moves_although_nothing_is_brought():
    def play(cast: Cast) -> None:
        finished = cast.move(kv=False, placed=KvPlaced("none", 0))
        assert (finished.ok, finished.way, finished.kv_tokens) == (True, "none", 0)

    playing(play)


# -- weights ---------------------------------------------------------------------------------------


def test_an_engine_that_dies_while_it_loads_weights_is_not_waited_for():
    def play(cast: Cast) -> None:
        updated: list[EngineId] = []
        for name in (A, B):
            cast.cluster.update_engine(
                name, 7, "w", keep_kv=False, then=lambda name=name: updated.append(name)
            )
        cast.cluster.weights_updated(B, 7)
        assert cast.cluster.busy
        cast.cluster.engine_failed(A, "killed", [])
        assert not cast.cluster.busy
        cast.cluster.weights_updated(A, 7)  # its last message, which came too late
        assert updated == [B]
        assert [e.engine for e in cast.events if isinstance(e, EngineFailed)] == [A]

    playing(play)


def test_the_engine_in_place_of_one_that_died_while_it_loaded_weights_loads_them():
    def play(cast: Cast) -> None:
        cast.cluster.update_weights(7, "w")
        for name in (B, C):
            cast.cluster.weights_updated(name, 7)
        cast.cluster.engine_failed(A, "killed", [])
        again = EngineId("a+1")
        cast.add(again)
        assert cast.calls("update 7") == [A, B, C, again]
        assert cast.cluster.busy
        cast.cluster.weights_updated(again, 7)
        assert not cast.cluster.busy

    playing(play)
