"""A rollout with many faults, delivered to a controller whose books are kept twice.

The world has everything that can go wrong at once: engines die on a schedule, tools have finite
capacity, predictions take time, KV is scarce enough to be taken away, slots are few.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from campaigns.faults.books import Books
from heddle.policies.plugins import load_policy
from heddle.policy_inputs import SHIPPED, load_predictor_model
from heddle_core import Controller, Entry, Policy, PolicyContext, collecting, recorded
from heddle_core.commands import Command
from heddle_core.estimate.cost import CostModel
from heddle_core.events import Event
from heddle_core.ids import EngineId, EngineShape, Role
from heddle_core.journal import Handle
from heddle_core.parts.table import Part
from heddle_core.plans import Disaggregation, EngineSpec
from heddle_predict.learned import LearnedFactory
from heddle_sim.config import HostKvConfig, SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile, load_profile
from heddle_sim.rollout import simulate_rollout
from heddle_sim.services import ToolServices
from heddle_trace import MissingRules, Trace, TrajectoryScript, complete, synth
from heddle_trace.history import history_of

GPUS, TPS = 8, (1, 2, 4)

LONGEST_STEPS = 8

STORM: tuple[tuple[float, EngineId], ...] = (
    (0.0, EngineId("e7")),
    (9.0, EngineId("e1")),
    (9.0, EngineId("e0")),
    (40.0, EngineId("e0+1")),
    (55.0, EngineId("e2")),
)


@dataclass(frozen=True)
class Scenario:
    """A workload, a cluster and its faults."""

    workload: str = "coding"
    trajectories: int = 64
    seed: int = 3
    faults: tuple[tuple[float, EngineId], ...] = STORM
    tool_capacity: int | None = 12
    prediction_s: float = 0.6
    with_history: bool = False
    slots: int = 6
    kv_per_gpu_tokens: int = 48_000
    """Scarce: a few long contexts fill an engine, yet the longest still fits on the smallest."""
    transfer_fixed_s: float = 0.02
    """Cheap, so that migration has something to do in a small rollout."""
    host_kv: Literal["none", "engine", "cluster"] = "none"
    tools: ToolServices | None = None
    prefill_gpus: int = 0
    """Engines of one GPU each that prefill for the others."""
    threshold_tokens: int = 100

    @property
    def role(self) -> Role:
        """Of the engines of policies."""
        return "decode" if self.prefill_gpus else "both"


@dataclass
class Played:
    """What a rollout left behind."""

    scripts: Sequence[TrajectoryScript]
    entries: list[Entry] = field(default_factory=list)
    books: Books = field(default_factory=lambda: Books(GPUS))

    def commands(self, kind: type[Command]) -> list[Command]:
        """Return the commands of a kind."""
        return [c for entry in self.entries for c in entry.commands if isinstance(c, kind)]

    def events(self, kind: type[Event]) -> list[Event]:
        """Return the events of a kind."""
        return [e.event for e in self.entries if isinstance(e.event, kind)]

    def digest(self) -> str:
        """Of every event and command, to the last digit."""
        return hashlib.sha256(repr(self.entries).encode()).hexdigest()


class HandledCore:
    """A controller whose events go through `handle`."""

    def __init__(self, handle: Handle, controller: Controller) -> None:
        self.handle, self._controller = handle, controller

    @property
    def deadline_s(self) -> float | None:
        return self._controller.deadline_s


@lru_cache
def profile() -> Profile:
    """Load the profile that every scenario has."""
    return load_profile("qwen3-14b", "h100")


@lru_cache
def _cost() -> CostModel:
    return profile().cost_estimate(TPS)


@lru_cache
def _learned() -> LearnedFactory:
    return load_predictor_model(SHIPPED).factory


@lru_cache(4096)
def scripts_of(workload: str, trajectories: int, seed: int) -> tuple[TrajectoryScript, ...]:
    """Synthetic trajectories, cut short to keep the tests quick."""
    records = synth(workload, trajectories, seed, samples_per_group=8)
    scripts, _ = complete(Trace("t", records, ""), rules=MissingRules(), seed=seed)
    return tuple(replace(s, steps=s.steps[:LONGEST_STEPS]) for s in scripts)


def context_of(scenario: Scenario, history_from: Sequence[TrajectoryScript] = ()) -> PolicyContext:
    """Return what a policy is made with."""
    cost = _cost()
    kv = scenario.kv_per_gpu_tokens
    by_shape = {
        s.as_role(scenario.role): replace(c, kv_capacity_tokens=s.tp * kv)
        for s, c in cost.by_shape.items()
    }
    return PolicyContext(
        pools={"h100": GPUS - scenario.prefill_gpus},
        shape=EngineShape("h100", 1, scenario.role),
        shape_choices=tuple(by_shape),
        max_running=scenario.slots,
        cost=replace(cost, by_shape=by_shape, transfer_fixed_s=scenario.transfer_fixed_s),
        history=history_of(history_from) if history_from else None,
        seed=5,
        learned=_learned(),
        disaggregation=_disaggregation(scenario),
    )


def _disaggregation(scenario: Scenario) -> Disaggregation | None:
    if not scenario.prefill_gpus:
        return None
    shape = EngineShape("h100", 1, "prefill")
    return Disaggregation(
        engines=tuple(
            EngineSpec(engine=EngineId(f"p{i}"), shape=shape, max_running=scenario.slots)
            for i in range(scenario.prefill_gpus)
        ),
        threshold_tokens=scenario.threshold_tokens,
        prefill_s_by_shape={shape: 3e-5},
    )


def controller_of(
    name: str, scenario: Scenario, *, extra: Mapping[str, Part[Any]] = MappingProxyType({})
) -> Controller:
    """Make the controller of a rollout."""
    return Controller(policy_of(name, scenario, extra=extra), _disaggregation(scenario))


@lru_cache(1024)
def table(tp: int, slots: int, kv_tokens: int) -> LatencyTable:
    """Return iteration times of engines with so many tokens of KV."""
    return replace(profile().table(tp, max_batch=slots), kv_capacity_tokens=kv_tokens)


def world_of(scenario: Scenario) -> SimulationConfig:
    """Return the simulated cluster of a scenario."""
    return SimulationConfig(
        table=lambda shape: table(shape.tp, scenario.slots, shape.tp * scenario.kv_per_gpu_tokens),
        transfer_fixed_s=scenario.transfer_fixed_s,
        transfer_bytes_per_s=2e10,
        tool_capacity=scenario.tool_capacity,
        tools=scenario.tools,
        engine_start_s=15.0,
        prediction_s=scenario.prediction_s,
        host_kv=_host_kv(scenario),
        faults=scenario.faults,
    )


def _host_kv(scenario: Scenario) -> HostKvConfig | None:
    """Host memory for a third of what the GPUs hold, and loads that take a while."""
    if scenario.host_kv == "none":
        return None
    return HostKvConfig(
        scope=scenario.host_kv,
        gpu_bytes=profile().kv_bytes_per_token * scenario.kv_per_gpu_tokens / 3,
        gpus=GPUS,
        gpu_bytes_per_s=4e9,
        fixed_s=0.02,
    )


def policy_of(
    name: str, scenario: Scenario, *, extra: Mapping[str, Part[Any]] = MappingProxyType({})
) -> Policy:
    """Make a policy; history, where there is one, is of another rollout of the workload."""
    earlier: tuple[TrajectoryScript, ...] = ()
    if scenario.with_history:
        earlier = scripts_of(scenario.workload, scenario.trajectories, scenario.seed + 1)
    return load_policy(name, context_of(scenario, earlier), extra=extra)


def play(
    name: str,
    scenario: Scenario,
    *,
    scripts: Sequence[TrajectoryScript] | None = None,
    extra: Mapping[str, Part[Any]] = MappingProxyType({}),
) -> Played:
    """Run one rollout, the invariants checked after every event."""
    if scripts is None:
        scripts = scripts_of(scenario.workload, scenario.trajectories, scenario.seed)
    played = Played(scripts)
    controller = controller_of(name, scenario, extra=extra)
    handle = recorded(played.books.watched(controller), collecting(played.entries))
    simulate_rollout(scripts, HandledCore(handle, controller), world_of(scenario))
    return played
