"""A policy is seven small parts. They read a `View` and decide; the controller acts.

A part takes its parameters in its constructor. Mixing parts is an ablation:
``replace(heddle(context), migration=Never())``. `heddle_core.hooks` has what parts may do besides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from heddle_core.defaults import ENGINE_START_S
from heddle_core.estimate.cost import CostModel
from heddle_core.estimate.history import History
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.plans import Disaggregation, PlanProblem, ResourcePlan
from heddle_core.trajectory import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContext:
    """Inputs of a policy before the rollout: the requested cluster and cost estimates."""

    pools: Mapping[str, int]
    """GPUs of each class."""
    shape: EngineShape
    """Engines of the uniform plan that baselines use, in the pool of its GPU class."""
    shape_choices: tuple[EngineShape, ...]
    """Shapes that a planner may mix; the model fits on each."""
    max_running: int
    """Slots of each engine: steps in its batch at once."""
    max_context: int | None = None
    """Tokens of the longest context that engines allow; None: not known."""
    mix: tuple[EngineShape, ...] = ()
    """Engines of policies that do not plan, where they do not all have `shape`."""
    other_shapes: tuple[EngineShape, ...] = ()
    """What `shape` is in the pools of the other GPU classes, one for each."""
    cost: CostModel
    """Estimated times of steps, moves and starts, fitted on other samples than the simulator's."""
    history: History | None = None
    """Statistics of earlier rollouts of this workload, if there were any."""
    learned: "PredictorFactory | None" = field(default=None, repr=False, compare=False)
    """Makes the predictor that reads a trained model; None without a model."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """GPU class of a task, as the user has it; of some tasks or none."""
    seed: int = 0
    """Seed of every random number of the policy."""
    engine_start_s: float = ENGINE_START_S
    """Estimated seconds from the start of an engine until it is ready, while a rollout runs."""
    engine_start_s_by_shape: Mapping[EngineShape, float] = field(default_factory=dict)
    """The same for shapes where it is known, such as those of engines that are asleep."""

    @property
    def uniform(self) -> tuple[EngineShape, ...]:
        """Engines of the uniform plan: as many as each pool has GPUs for."""
        return tuple(
            shape
            for shape in (self.shape, *self.other_shapes)
            for _ in range(self.pools.get(shape.gpu, 0) // max(shape.gpus, 1))
        )

    disaggregation: Disaggregation | None = None
    """Prefill engines that the controller keeps beside the policy's engines, on GPUs of their own.

    `pools` and all shapes are then of engines that decode."""

    def start_s(self, shape: EngineShape) -> float:
        """Estimated seconds until an engine of `shape` is ready."""
        return self.engine_start_s_by_shape.get(shape, self.engine_start_s)


class TrajectoryView(Protocol):
    """A trajectory as policies see it: only what has been observed."""

    @property
    def id(self) -> TrajectoryId:
        """Its name, unique over all rollouts."""

    @property
    def rollout(self) -> RolloutId:
        """The rollout that it belongs to."""

    @property
    def group(self) -> GroupId:
        """Its prompt's group: samples of one prompt."""

    @property
    def task(self) -> str:
        """The kind of task, such as ``coding``."""

    @property
    def weights_version(self) -> int:
        """The version under which its rollout started."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its first prompt."""

    @property
    def phase(self) -> Phase:
        """What it does now, such as ``queued``, ``running`` or ``tool``."""

    @property
    def step(self) -> int:
        """The step that runs or will run next, from 0."""

    @property
    def home(self) -> EngineId | None:
        """The engine that holds its KV prefix; None before placement or after that engine died."""

    @property
    def context_tokens(self) -> int:
        """Tokens of its next prompt, those kept from a preempted step included."""

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all steps."""

    @property
    def tool_s(self) -> float:
        """Seconds spent in tools so far."""

    @property
    def remaining_tokens(self) -> float:
        """The last estimate of the output tokens still to come."""

    @property
    def dispatched_s(self) -> float:
        """When its latest step was dispatched."""

    @property
    def arrived_s(self) -> float:
        """When it arrived."""

    @property
    def arrival(self) -> int:
        """Arrivals before its own, over all rollouts: an order where `arrived_s` has ties."""

    @property
    def runnable_s(self) -> float:
        """When its current step became runnable."""

    @property
    def tool_started_s(self) -> float:
        """When its latest tool call began."""

    @property
    def kv_kept(self) -> bool:
        """Whether its KV was kept at home until its latest tool returned (`Admission`)."""


class EngineView(Protocol):
    """An engine as policies see it. `reported_*` are late samples; the rest is exact."""

    @property
    def id(self) -> EngineId:
        """Its name, such as ``e0``."""

    @property
    def shape(self) -> EngineShape:
        """GPU class and degrees of parallelism."""

    @property
    def max_running(self) -> int:
        """Slots: steps in its batch at once."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that it holds at once."""

    @property
    def accepting(self) -> bool:
        """Alive and not stopping."""

    @property
    def in_flight(self) -> int:
        """Steps queued for it or running on it, and those that a prefill engine has for it."""

    @property
    def sessions(self) -> int:
        """Unfinished trajectories whose home it is, those in a tool included."""

    @property
    def running_steps(self) -> int:
        """Steps running on it."""

    @property
    def estimated_kv_tokens(self) -> int:
        """Context of the running steps at their dispatch, without tokens generated since."""

    @property
    def reported_kv_used_tokens(self) -> int:
        """KV in use at the last report."""

    @property
    def reported_preemptions(self) -> int:
        """Preemptions of its own, from its start to the last report."""

    @property
    def reported_s(self) -> float:
        """When it reported last; 0 before the first report."""


class View(Protocol):
    """The ledger, read-only."""

    @property
    def now_s(self) -> float:
        """Time of the event that is decided on, in seconds of the driver's clock."""

    @property
    def engines(self) -> Sequence[EngineView]:
        """Engines that accept work, in the order in which they became ready; never empty."""

    @property
    def trajectories(self) -> Mapping[TrajectoryId, TrajectoryView]:
        """Every trajectory that arrived and has not ended, of all rollouts, by arrival."""

    @property
    def weights_version(self) -> int:
        """The newest version that was pushed or that a rollout started under."""

    @property
    def unfinished(self) -> int:
        """Trajectories that have arrived and not ended."""

    def engine(self, engine: EngineId) -> EngineView:
        """Return one engine, dead or alive."""

    def fewest_in_flight(self) -> EngineView:
        """Return the accepting engine with the fewest steps in flight, the first of equals.

        Quick among thousands of engines, where a scan at every step is not.
        """


class Predictor(Protocol):
    """Estimates remaining output tokens from what has been observed."""

    @property
    def served(self) -> bool:
        """Whether estimates come from a prediction service and take time after each step."""
        ...

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Learn from a finished generation."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Learn from a tool's result."""

    def observe_finish(self, t: TrajectoryView) -> None:
        """Learn from a trajectory's end."""

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Estimate the output tokens `t` still has to make; at least 0."""
        ...


def predictions_awaited(predictor: Predictor) -> bool:
    """Whether a step waits for the answer of a `served` predictor that its tool did not hide.

    A predictor may have the property `awaited` for this. Without it, a step never waits.
    """
    return predictor.served and bool(getattr(predictor, "awaited", False))


class PredictorFactory(Protocol):
    """Makes a predictor for one run; the caller supplies the model."""

    def __call__(self, context: PolicyContext, /, *, quantile: float = 0.5) -> Predictor:
        """Return a new predictor that estimates by this quantile.

        Raises:
            ValueError: the quantile is unknown.
        """
        ...


class Scheduler(Protocol):
    """Orders one engine's queue: a key function."""

    @property
    def preemptive(self) -> bool:
        """Whether the head of the queue may take the slot of a less urgent running step."""
        ...

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Urgency of `t`'s next step; larger runs first, ties by arrival in the queue."""
        ...


class Admission(Protocol):
    """Chooses how much KV must be free on an engine before a step may run."""

    @property
    def keeps_kv(self) -> bool:
        """Whether the KV of a trajectory in a tool counts as in use at its home."""
        ...

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        """Tokens of output to reserve KV for, beside the prompt; at least 0."""
        ...


class Placement(Protocol):
    """Chooses the home of each runnable step."""

    @property
    def needs_all(self) -> bool:
        """Whether placement waits until every trajectory of the rollout has arrived."""
        ...

    def assign(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float], view: View
    ) -> Sequence[EngineId]:
        """Home for each of `ts` at once, when `needs_all`."""
        ...

    def place(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Home for one runnable step; called whenever a step becomes runnable.

        None: it waits, which only a placement with `release` may say (`heddle_core.hooks.Backlog`).
        """
        ...

    def finished(self, t: TrajectoryView) -> None:
        """Forget a finished trajectory."""


class Migration(Protocol):
    """Decides whether a home moves while a tool runs; called once per tool call."""

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return the engine to move to, or None to stay."""
        ...

    def finished(self, t: TrajectoryView) -> None:
        """Forget a finished trajectory."""


class Planner(Protocol):
    """Chooses which engines exist, at rollout boundaries."""

    @property
    def needs_all(self) -> bool:
        """Whether planning waits until every trajectory of the rollout has arrived."""
        ...

    def plan(
        self, ts: Sequence[TrajectoryView], remaining: Sequence[float]
    ) -> ResourcePlan | PlanProblem:
        """Return a plan at once, or a problem to search."""
        ...


class Consolidation(Protocol):
    """Changes engines and homes while a rollout runs."""

    def consolidate(self, view: View) -> PlanProblem | None:
        """Return a problem whose solution is the new set of engines, or None for no change.

        Called when a trajectory has ended, all have arrived, and no engine is starting or stopping.
        The solution contains homes only of trajectories that move.
        """
        ...


class NoConsolidation:
    """The engines of the plan stay for the whole rollout."""

    def consolidate(self, view: View) -> PlanProblem | None:
        """Return None: no change."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The parts that decide when, where and how trajectories run."""

    predictor: Predictor
    scheduler: Scheduler
    admission: Admission
    placement: Placement
    migration: Migration
    planner: Planner
    consolidation: Consolidation = field(default_factory=NoConsolidation)
