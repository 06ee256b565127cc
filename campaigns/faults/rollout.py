"""One rollout of any policy in any world, disturbed: nothing is lost, twice or stuck."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Literal

import msgspec

from campaigns.faults.any_mix import any_policy, any_scenario, any_scripts
from campaigns.faults.drawing import any_disturbances, smaller_disturbances, with_less
from campaigns.faults.engines import Disturbances, DisturbedLauncher
from campaigns.faults.scenario import (
    HandledCore,
    Played,
    Scenario,
    controller_of,
    scripts_of,
    world_of,
)
from campaigns.faults.tokens import TokenLedger
from heddle_core import collecting, first_divergence, recorded
from heddle_core.commands import Command
from heddle_core.events import Event
from heddle_core.ids import TrajectoryId
from heddle_core.journal import Handle
from heddle_core.presets import PRESETS
from heddle_rollout.driver import ROLLOUT
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation

MOST_EVENTS = 30_000
"""More than any rollout of a case needs many times over."""

LATEST_S = 50_000.0
"""Simulated time by which any of them has ended; samples of idle engines are no events."""
WHOLE_KV = 48_000
"""KV tokens of a GPU that hold every context as it is."""


class EndlessError(AssertionError):
    """A run goes on without an end."""


class RolloutCase(msgspec.Struct, frozen=True, kw_only=True, tag="rollout"):
    """A policy, a world, and what disturbs it."""

    policy: str
    workload: str
    trajectories: int
    scripts_seed: int
    longest_steps: int
    rewrites: int | None
    """Seed by which contexts are compacted, and cut to the KV; None: scripts as they are."""
    tool_capacity: int | None
    prediction_s: float
    with_history: bool
    slots: int
    kv_per_gpu_tokens: int
    transfer_fixed_s: float
    host_kv: Literal["none", "engine", "cluster"]
    prefill_gpus: int
    threshold_tokens: int
    disturbances: Disturbances

    @property
    def scenario(self) -> Scenario:
        """The world, without the disturbances."""
        skipped = ("policy", "scripts_seed", "longest_steps", "rewrites", "disturbances")
        fields = {k: getattr(self, k) for k in self.__struct_fields__ if k not in skipped}
        return Scenario(seed=self.scripts_seed, faults=(), **fields)


def draw(rng: Random) -> RolloutCase:
    """Draw a case: presets as they are and mixes of parts alike often."""
    policy = rng.choice(list(PRESETS)) if rng.random() < 0.5 else any_policy(rng)
    world = any_scenario(rng)
    return RolloutCase(
        policy=policy,
        workload=world.workload,
        trajectories=rng.choice((1, 2, 4, 9, 16)),
        scripts_seed=world.seed,
        longest_steps=rng.choice((1, 2, 3, 5)),
        rewrites=rng.randrange(1000) if world.kv_per_gpu_tokens < WHOLE_KV else None,
        tool_capacity=world.tool_capacity,
        prediction_s=world.prediction_s,
        with_history=world.with_history,
        slots=world.slots,
        kv_per_gpu_tokens=world.kv_per_gpu_tokens,
        transfer_fixed_s=world.transfer_fixed_s,
        host_kv=rng.choice(("none", "none", "engine", "cluster")),
        prefill_gpus=rng.choice((0, 0, 0, 1, 2)),
        threshold_tokens=rng.choice((0, 100, 500)),
        disturbances=any_disturbances(rng, span_s=rng.choice((15.0, 60.0, 200.0))),
    )


def smaller(case: RolloutCase) -> Iterator[RolloutCase]:
    """Cases with less of everything."""
    yield from with_less(case, trajectories=1, longest_steps=1)
    yield from smaller_disturbances(case)
    yield from with_less(
        case,
        prefill_gpus=0,
        host_kv="none",
        with_history=False,
        tool_capacity=None,
        prediction_s=0.0,
        transfer_fixed_s=0.0,
    )
    preset, *parts = case.policy.split("+")
    for i in range(len(parts)):
        name = "+".join([preset, *parts[:i], *parts[i + 1 :]])
        yield msgspec.structs.replace(case, policy=name)


def endless() -> None:
    """Raise an `EndlessError`."""
    raise EndlessError(f"no end after {LATEST_S:,.0f} s")


def counted(handle: Handle) -> Handle:
    """Raise an `EndlessError` at the first event above `MOST_EVENTS`."""
    events = 0

    def checked(event: Event) -> Sequence[Command]:
        nonlocal events
        events += 1
        if events > MOST_EVENTS:
            raise EndlessError(f"{MOST_EVENTS} events, and no end")
        return handle(event)

    return checked


def run(case: RolloutCase) -> int:
    """Run a case, and return the number of events.

    Raises:
        AssertionError: a ledger disagrees, or the journal replays to other commands.
        Exception: whatever the driver, its engines or the core raise.
    """
    scenario = case.scenario
    rng = Random(case.rewrites)
    scripts = any_scripts(rng, scenario) if case.rewrites is not None else _plain(scenario)
    scripts = [replace(s, steps=s.steps[: case.longest_steps]) for s in scripts]
    by_name = {script.id: script for script in scripts}
    tokens = TokenLedger(lambda name: by_name[name])
    played, controller = Played(scripts), controller_of(case.policy, scenario)
    handle = recorded(counted(played.books.watched(controller)), collecting(played.entries))
    make: Any = partial(DisturbedLauncher, disturbances=case.disturbances, tokens=tokens)
    simulation = Simulation(HandledCore(handle, controller), world_of(scenario), launcher=make)
    simulation.driver.open_rollout(ROLLOUT, trajectories=len(scripts))
    simulation.launcher.schedule_faults()
    for script in scripts:
        simulation.driver.admit(ScriptedAgent(script, simulation.clock))
    simulation.clock.call_at(LATEST_S, endless)
    simulation.run()
    _judge(played, tokens)
    fresh = controller_of(case.policy, scenario)
    assert first_divergence(played.entries, fresh.handle) is None, "replay diverges"
    return len(played.entries)


def _plain(scenario: Scenario) -> Sequence[Any]:
    return scripts_of(scenario.workload, scenario.trajectories, scenario.seed)


def _judge(played: Played, tokens: TokenLedger) -> None:
    """Every trajectory has ended once, with the tokens of its script, each reported once."""
    books = played.books
    books.closed()
    assert sorted(books.finished) == sorted(s.id for s in played.scripts), "a trajectory is lost"
    for script in played.scripts:
        if script.id in books.cancelled:
            continue
        name = TrajectoryId(script.id)
        made, whole = books.made[name], sum(s.output_tokens for s in script.steps)
        assert made == whole, f"tokens lost or twice: {made} of {whole}"
        assert tokens.complete(name), "tokens that no engine reported"
    assert tokens.tokens == sum(books.made.values()), "journal and engines differ in tokens"
