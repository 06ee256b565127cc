"""Hand-set trajectories, engines and views: a policy part is tested without a ledger."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.ids import EngineId, EngineShape, GroupId, TrajectoryId
from heddle_core.policy import PolicyContext
from heddle_core.trajectory import Phase
from tests.core.shapes import h100

SOME_GROUP = GroupId("g")
ONE_H100 = EngineShape("h100", 1)


@dataclass(kw_only=True)
class FakeTrajectory:
    id: TrajectoryId
    group: GroupId = SOME_GROUP
    task: str = "coding"
    weights_version: int = 0
    prompt_tokens: int = 100
    phase: Phase = "held"
    step: int = 0
    home: EngineId | None = None
    context_tokens: int = 100
    output_tokens: int = 0
    tool_s: float = 0.0
    dispatched_s: float = 0.0
    arrived_s: float = 0.0
    runnable_s: float = 0.0


@dataclass(kw_only=True)
class FakeEngine:
    id: EngineId
    in_flight: int = 0
    running_steps: int = 0
    sessions: int = 0
    accepting: bool = True
    shape: EngineShape = ONE_H100
    max_running: int = 100
    kv_capacity_tokens: int = 250_000
    reported_kv_used_tokens: int = 0
    reported_preemptions: int = 0
    reported_s: float = 0.0


@dataclass(kw_only=True)
class FakeView:
    known: list[FakeEngine]
    now_s: float = 0.0
    trajectories: Mapping[TrajectoryId, FakeTrajectory] = field(default_factory=dict)

    @property
    def engines(self) -> Sequence[FakeEngine]:
        return [e for e in self.known if e.accepting]

    @property
    def unfinished(self) -> int:
        return sum(t.phase != "finished" for t in self.trajectories.values())

    def engine(self, engine: EngineId) -> FakeEngine:
        return next(e for e in self.known if e.id == engine)

    def fewest_in_flight(self) -> FakeEngine:
        return min(self.engines, key=lambda e: e.in_flight)


def view_of(*in_flight: int, sessions: Sequence[int] = ()) -> FakeView:
    """Engines e0, e1, ... with these loads."""
    return FakeView(
        known=[
            FakeEngine(
                id=EngineId(f"e{i}"), in_flight=load, sessions=sessions[i] if sessions else 0
            )
            for i, load in enumerate(in_flight)
        ]
    )


def trajectory(name: str, **fields: object) -> FakeTrajectory:
    return FakeTrajectory(id=TrajectoryId(name), **fields)  # type: ignore[arg-type]


def policy_context(*, gpus: int = 8, tp: int = 1) -> PolicyContext:
    cost = StepCost(t0_s=0.01, t1_s=1e-4, t2_s=1e-8, prefill_s=1e-4, kv_capacity_tokens=250_000)
    return PolicyContext(
        pools={"h100": gpus},
        shape=h100(tp),
        shape_choices=(h100(1), h100(2), h100(4), h100(8)),
        max_running=100,
        cost=CostModel(
            by_shape={h100(1): cost, h100(2): cost},
            transfer_fixed_s=0.1,
            transfer_s_per_token=1e-6,
        ),
    )
