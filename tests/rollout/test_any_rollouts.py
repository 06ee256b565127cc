"""Overlapping rollouts drawn at random, under every preset: nothing is lost, nothing is twice."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.faults.books import Books
from campaigns.faults.scenario import GPUS, HandledCore, Scenario, policy_of, scripts_of, world_of
from heddle_core import Controller, Entry, collecting, first_divergence, recorded
from heddle_core.events import RolloutStarted, TrajectoryArrived
from heddle_core.ids import EngineId, RolloutId
from heddle_core.presets import PRESETS
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation
from heddle_trace import TrajectoryScript

SCRIPTS = [replace(s, steps=s.steps[:3]) for s in scripts_of("coding", 16, 3)]
times = st.sampled_from([0.0, 0.0, 9.0, 20.0, 20.5, 31.0])
"""Few values, so that many things happen at one instant."""


@dataclass(frozen=True)
class Admission:
    script: int
    at_s: float
    """When it is admitted, after its rollout was opened."""
    arrival_s: float


@dataclass(frozen=True)
class Plan:
    """One rollout: when it is opened and closed, and what it has."""

    open_s: float
    version: int
    announced: bool
    close_after_s: float
    """After its last admission; without an announced size."""
    admissions: list[Admission]


plans = st.builds(
    Plan,
    open_s=times,
    version=st.integers(0, 3),
    announced=st.booleans(),
    close_after_s=times,
    admissions=st.lists(
        st.builds(Admission, script=st.integers(0, 15), at_s=times, arrival_s=times), max_size=8
    ),
)
faults = st.lists(
    st.tuples(times, st.builds(EngineId, st.sampled_from(["e0", "e1", "e7"]), st.integers(0, 2))),
    max_size=5,
)


class Overlapping:
    """A simulation of rollouts that open, fill and close on schedule."""

    def __init__(self, policy: str, scenario: Scenario) -> None:
        self.books, self.entries = Books(GPUS), list[Entry]()
        self.controller = Controller(policy_of(policy, scenario))
        handle = recorded(self.books.watched(self.controller), collecting(self.entries))
        self.simulation = Simulation(HandledCore(handle, self.controller), world_of(scenario))
        self.simulation.launcher.schedule_faults()
        self.scripts: dict[str, TrajectoryScript] = {}

    def schedule(self, number: int, plan: Plan) -> None:
        name = RolloutId(f"r{number}")
        clock, driver = self.simulation.clock, self.simulation.driver
        size = len(plan.admissions)
        last_s = plan.open_s + max((a.at_s for a in plan.admissions), default=0.0)
        clock.call_at(plan.open_s, self.open, name, size if plan.announced else None, plan.version)
        for i, admission in enumerate(plan.admissions):
            script = SCRIPTS[admission.script]
            script = replace(script, id=f"{name}/{i}", arrival_s=admission.arrival_s)
            self.scripts[script.id] = script
            clock.call_at(plan.open_s + admission.at_s, self.admit, script, name)
        if not plan.announced:
            clock.call_at(last_s + plan.close_after_s, driver.close_rollout, name)

    def open(self, name: RolloutId, size: int | None, version: int) -> None:
        self.simulation.driver.open_rollout(name, trajectories=size, weights_version=version)

    def admit(self, script: TrajectoryScript, rollout: RolloutId) -> None:
        self.simulation.driver.admit(ScriptedAgent(script, self.simulation.clock), rollout)

    def run(self) -> None:
        """Run to the end of the last rollout: nothing may be open in between."""
        keeper = RolloutId("keeper")
        self.simulation.driver.open_rollout(keeper)
        self.simulation.clock.call_at(200.0, self.simulation.driver.close_rollout, keeper)
        self.simulation.run()


@settings(max_examples=12)
@pytest.mark.parametrize("policy", [*PRESETS, "heddle+exact+served", "slime+consolidate"])
@given(
    st.lists(plans, min_size=1, max_size=4),
    faults,
    st.sampled_from([None, 1, 5]),
    st.lists(st.tuples(times, st.integers(1, 3)), max_size=2),
    st.sampled_from([0.0, 0.6, 30.0]),
)
def test_overlapping_rollouts_lose_nothing_and_make_no_token_twice(
    policy, rollouts, deaths, tool_capacity, pushes, prediction_s
):
    scenario = Scenario(
        faults=tuple(deaths), tool_capacity=tool_capacity, prediction_s=prediction_s
    )
    world = Overlapping(policy, scenario)
    for number, plan in enumerate(rollouts):
        world.schedule(number, plan)
    for at_s, version in pushes:
        world.simulation.clock.call_at(at_s, world.simulation.driver.update_weights, version, "")
    world.run()

    books, controller = world.books, world.controller
    assert set(books.finished) == set(world.scripts)
    assert set(books.finished.values()) <= {"completed", "truncated"}
    for name, script in world.scripts.items():
        assert books.made[name] == sum(step.output_tokens for step in script.steps)
    assert not books.running
    assert not books.in_tool
    ledger = controller.ledger
    assert not (ledger.trajectories)
    assert not (ledger.held)
    assert not controller.rollouts.open
    assert all(not (e.in_flight or e.sessions) for e in ledger.known_engines.values())
    assert controller.rollouts.closed >= {RolloutId(f"r{n}") for n in range(len(rollouts))}
    events = [entry.event for entry in world.entries]
    began = {e.rollout: e.time_s for e in events if isinstance(e, RolloutStarted)}
    for e in events:
        if isinstance(e, TrajectoryArrived):
            assert e.time_s >= began[e.rollout] + world.scripts[e.trajectory].arrival_s - 1e-9
    fresh = Controller(policy_of(policy, scenario))
    assert first_divergence(world.entries, fresh.handle) is None
