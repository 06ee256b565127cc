"""The fleet: stops before starts, names once, plans matched by shape, a limit to restarts."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from heddle_core.commands import Command, CommandList, StartEngine, StopEngine
from heddle_core.fleet import Fleet
from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec, PlanError, ResourcePlan, RestartLimit

MAX_RESTARTS = RestartLimit().restarts


def plan_of(*shapes: int | tuple[int, int]) -> ResourcePlan:
    """Engines e0, e1, ... of these TP degrees, or (TP degree, slots)."""
    pairs = [(s, 8) if isinstance(s, int) else s for s in shapes]
    return ResourcePlan(
        engines=tuple(
            EngineSpec(engine=EngineId(f"e{i}"), shape=EngineShape("h100", tp), max_running=slots)
            for i, (tp, slots) in enumerate(pairs)
        )
    )


def no_commands() -> CommandList:
    out = CommandList()
    out.cause = 0
    return out


class Harness:
    """A fleet, and the driver's books: engines that start, run and stop."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.now_s = 0.0
        self.starting: dict[EngineId, StartEngine] = {}
        self.alive: dict[EngineId, StartEngine] = {}
        self.stopping: list[EngineId] = []
        self.ever: list[EngineId] = []

    def execute(self, out: list[Command]) -> list[Command]:
        for command in out:
            match command:
                case StartEngine():
                    assert command.engine not in self.ever, "a name is used twice"
                    self.ever.append(command.engine)
                    self.starting[command.engine] = command
                case StopEngine():
                    assert command.engine in self.alive
                    if command.drain:
                        assert command.engine not in self.stopping
                    if command.engine not in self.stopping:
                        self.stopping.append(command.engine)
        return out

    def plan(self, plan: ResourcePlan) -> tuple[list[EngineId], dict[EngineId, EngineId]]:
        out = no_commands()
        answer = self.fleet.change_to(plan, out)
        self.execute(out)
        return answer

    def ready(self, name: str) -> bool:
        out = no_commands()
        engine = EngineId(name)
        self.alive[engine] = self.starting.pop(engine)
        wanted = self.fleet.ready(engine, out)
        self.execute(out)
        return wanted

    def stopped(self, name: str) -> list[Command]:
        out = no_commands()
        self.stopping.remove(EngineId(name))
        del self.alive[EngineId(name)]
        self.fleet.stopped(EngineId(name), out)
        return self.execute(out)

    def failed(self, name: str) -> list[Command]:
        out = no_commands()
        engine = EngineId(name)
        self.starting.pop(engine, None)
        self.alive.pop(engine, None)
        if engine in self.stopping:
            self.stopping.remove(engine)
        self.fleet.failed(engine, self.now_s, out)
        return self.execute(out)

    def join(self, name: str, tp: int = 1) -> list[Command]:
        out = no_commands()
        shape = EngineShape("h100", tp)
        self.fleet.join(EngineSpec(engine=EngineId(name), shape=shape, max_running=8), out)
        return self.execute(out)

    def recall(self, name: str, *, drain: bool = True) -> tuple[str | None, list[Command]]:
        out = no_commands()
        engine = self.fleet.recall(name, out, drain=drain)
        return engine, self.execute(out)


def running(*shapes: int | tuple[int, int]) -> Harness:
    harness = Harness()
    harness.plan(plan_of(*shapes))
    for name in list(harness.starting):
        assert harness.ready(name)
    return harness


def started(commands: list[Command]) -> list[tuple[str, int]]:
    return [(c.engine, c.shape.tp) for c in commands if isinstance(c, StartEngine)]


def test_a_first_plan_starts_everything_and_settles_when_all_is_ready():
    harness = Harness()
    assert harness.plan(plan_of(2, 1)) == ([], {"e0": "e0", "e1": "e1"})
    assert not harness.fleet.settled
    assert harness.ready("e1")
    assert not harness.fleet.settled
    assert harness.ready("e0")
    assert harness.fleet.settled


def test_engines_of_the_shape_of_a_plan_stay_and_carry_its_names():
    harness = running(1, 2)
    leaving, carriers = harness.plan(plan_of(2, 1))
    assert leaving == []
    assert carriers == {"e0": "e1", "e1": "e0"}
    assert harness.fleet.settled


def test_the_engine_of_a_plans_own_name_is_preferred():
    harness = running(1, 1)
    assert harness.plan(plan_of(1, 1))[1] == {"e0": "e0", "e1": "e1"}


def test_other_slots_are_another_shape():
    harness = running((1, 8))
    leaving, carriers = harness.plan(plan_of((1, 16)))
    assert leaving == ["e0"]
    assert carriers == {"e0": "e0+1"}


def test_starts_wait_until_every_stop_has_freed_its_gpus():
    harness = running(1, 1, 1, 1)
    leaving, carriers = harness.plan(plan_of(2, 2))
    assert leaving == ["e0", "e1", "e2", "e3"]
    assert [harness.stopped(e) for e in ("e0", "e1", "e2")] == [[], [], []]
    assert not harness.fleet.settled
    assert started(harness.stopped("e3")) == [("e0+1", 2), ("e1+1", 2)]
    assert list(carriers.values()) == ["e0+1", "e1+1"]


def test_an_engine_that_dies_while_draining_frees_its_gpus_and_is_not_restarted():
    harness = running(1, 1)
    harness.plan(plan_of(2))
    harness.stopped("e0")
    assert started(harness.failed("e1")) == [("e0+1", 2)]


def test_a_start_that_a_newer_plan_does_not_need_is_stopped_once_ready():
    harness = Harness()
    harness.plan(plan_of(1))
    leaving, carriers = harness.plan(plan_of(2))
    assert leaving == []
    assert carriers == {"e0": "e0+1"}
    assert list(harness.starting) == ["e0"], "its GPUs are not free yet"
    assert not harness.ready("e0")
    assert harness.stopping == ["e0"]
    assert started(harness.stopped("e0")) == [("e0+1", 2)]


def test_a_start_that_is_not_needed_and_fails_frees_its_gpus():
    harness = Harness()
    harness.plan(plan_of(1))
    harness.plan(plan_of(2))
    assert started(harness.failed("e0")) == [("e0+1", 2)]


def test_a_restart_that_a_newer_plan_does_not_need_is_stopped_once_ready():
    harness = running(1)
    assert started(harness.failed("e0")) == [("e0+1", 1)]
    assert harness.fleet.settled, "a restart does not hold the rest up"
    harness.plan(plan_of(2))
    assert not harness.ready("e0+1")


def test_a_restart_serves_a_plan_of_its_shape():
    harness = running(1)
    harness.failed("e0")
    assert harness.plan(plan_of(1)) == ([], {"e0": "e0+1"})
    assert harness.ready("e0+1")


def test_starts_that_wait_for_stops_are_forgotten_for_a_newer_plan():
    harness = running(1, 1)
    harness.plan(plan_of(2))
    harness.plan(plan_of(1))
    harness.stopped("e0")
    assert started(harness.stopped("e1")) == [("e0+2", 1)]


def test_a_card_that_fails_again_and_again_is_given_up():
    harness = running(1, 1)
    name = "e0"
    for life in range(1, MAX_RESTARTS + 1):
        assert started(harness.failed(name)) == [(f"e0+{life}", 1)]
        name = f"e0+{life}"
        if life % 2:
            assert harness.ready(name)
    assert harness.failed(name) == []
    assert started(harness.failed("e1")) == [("e1+1", 1)], "others have tries of their own"


def test_restarts_of_long_ago_do_not_count():
    harness = running(1)
    harness.fleet = Fleet(RestartLimit(restarts=2, window_s=100.0))
    harness.ever.clear()
    harness.starting.clear()
    harness.plan(plan_of(1))
    name = "e0"
    for life, now_s in enumerate((0.0, 99.0, 100.5, 199.5, 201.0), 1):
        harness.now_s = now_s
        assert started(harness.failed(name)) == [(f"e0+{life}", 1)]
        name = f"e0+{life}"
    harness.now_s = 202.0
    assert harness.failed(name) == []


@pytest.mark.parametrize("values", [{"restarts": -1}, {"window_s": 0.0}])
def test_a_limit_of_restarts_that_cannot_be_is_refused(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        RestartLimit(**values)


def test_an_engine_that_joins_is_kept_by_every_plan_and_started_again_when_it_fails():
    harness = running(1)
    assert started(harness.join("j0", 2)) == [("j0", 2)]
    assert harness.fleet.settled, "no rollout waits for it"
    assert harness.ready("j0")
    assert not harness.fleet.plans(EngineId("j0"))
    leaving, carriers = harness.plan(plan_of(2))
    assert (leaving, carriers) == (["e0"], {"e0": "e0+1"})
    assert started(harness.failed("j0")) == [("j0+1", 2)]
    assert harness.ready("j0+1")
    with pytest.raises(PlanError, match="had this name before"):
        harness.join("j0")


def test_a_recalled_engine_stops_once_and_is_not_started_again():
    harness = running(1)
    harness.join("j0")
    harness.ready("j0")
    assert harness.recall("e0") == (None, []), "it is the plan's"
    engine, [stop] = harness.recall("j0")
    assert (engine, stop.engine, stop.drain) == ("j0", "j0", True)
    assert harness.recall("j0") == (None, [])
    engine, [stop] = harness.recall("j0", drain=False)
    assert (engine, stop.engine, stop.drain) == ("j0", "j0", False)
    assert harness.stopped("j0") == []
    assert harness.recall("j0", drain=False) == (None, [])
    harness.join("j1")
    assert harness.recall("j1") == (None, [])
    assert not harness.ready("j1"), "it was recalled before it was ready"
    assert harness.failed("j1") == []
    assert harness.fleet.steady


def test_narrower_engines_come_back_for_a_wide_one_that_cannot_be_started():
    harness = running(1, 1, 1)
    harness.plan(plan_of(2, 1))
    harness.stopped("e0")
    assert started(harness.stopped("e2")) == [("e0+1", 2)]
    for life in range(1, MAX_RESTARTS + 1):
        assert started(harness.failed(f"e0+{life}")) == [(f"e0+{life + 1}", 2)]
        assert not harness.fleet.gave_up
    last = f"e0+{MAX_RESTARTS + 1}"
    assert started(harness.failed(last)) == [("e0+5", 1), ("e2+1", 1)]
    assert harness.fleet.gave_up
    assert harness.ready("e0+5")
    assert started(harness.failed("e2+1")) == [("e2+2", 1)], "these have tries of their own"


@settings(max_examples=150)
@given(
    plans=st.lists(st.lists(st.sampled_from([1, 2, 4]), max_size=4), min_size=1, max_size=4),
    choices=st.lists(st.integers(0, 1_000), max_size=40),
)
def test_whatever_happens_names_are_new_and_a_plan_is_carried_out(plans, choices):
    harness = Harness()
    plans = [plan_of(*shapes) for shapes in plans]
    harness.plan(plans.pop(0))
    for choice in choices:
        moves = [
            *(("ready", e) for e in harness.starting),
            *(("stopped", e) for e in harness.stopping),
            *(("failed", e) for e in (*harness.starting, *harness.alive)),
            *((("plan", ""),) if plans else ()),
        ]
        if not moves:
            break
        what, engine = moves[choice % len(moves)]
        if what == "plan":
            harness.plan(plans.pop(0))
        else:
            getattr(harness, what)(engine)
    last = plan_of(8, 8)
    _, carriers = harness.plan(last)
    for _ in range(100):
        for engine in list(harness.starting):
            harness.ready(engine)
        for engine in list(harness.stopping):
            harness.stopped(engine)
    assert harness.fleet.settled
    assert sorted(harness.alive) == sorted(carriers.values())
    assert [harness.alive[e].shape.tp for e in carriers.values()] == [8, 8]
