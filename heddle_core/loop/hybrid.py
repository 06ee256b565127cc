"""GPUs that work for the rollout or for training, whichever needs them: when they change sides.

Two published rules decide: verl's trainer lends its GPUs while it waits for a batch, and Libra's
pool follows the ratio of training to rollout time. `HybridPool` is where the GPUs are.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal, Protocol, TypeAlias

from heddle_core.commands import AssignGpus, CommandList
from heddle_core.events import GpusAssigned
from heddle_core.ids import EngineId
from heddle_core.ledger import LedgerError
from heddle_core.loop.split_plan import GpuCounts, SplitPlan, SplitPlanner, StepEnd
from heddle_core.plans import EngineSpec

PoolState: TypeAlias = Literal[
    "training", "to_rollout", "starting", "rollout", "stopping", "to_training"
]
"""The GPUs train, move to the rollout, start engines there, generate, stop them, move back."""

HYBRID: Final = "hybrid"
"""Begin of the names of engines on such GPUs."""

NEXT: Final[Mapping[PoolState, tuple[PoolState, ...]]] = {
    "training": ("to_rollout",),
    "to_rollout": ("starting", "training"),
    "starting": ("rollout", "to_training"),
    "rollout": ("stopping", "to_training"),
    "stopping": ("to_training",),
    "to_training": ("training", "starting"),
}
"""From each state, those that may follow. A switch that fails leads back; so do engines that all
fail."""


class HybridRule(Protocol):
    """Decides when the GPUs change sides."""

    def waited(self, seconds: float, groups: int) -> None:
        """Learn that the trainer waited for so many groups, and kept the GPUs meanwhile."""

    def switched(self, role: Literal["rollout", "training"], seconds: float) -> None:
        """Learn how long a switch took."""

    def lends(self, step: StepEnd) -> bool:
        """Whether the trainer's GPUs go to the rollout, at the end of a step."""
        ...

    def takes_back(self, ready: int, step: StepEnd | None) -> bool:
        """Whether lent GPUs go to training; `step` at the end of one, else None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitLending:
    """verl's V1 trainer with hybrid rollout: lend while the batch is far from complete.

    After an update it lends if the wait that more engines save is longer than both switches, and
    takes the GPUs back when `ratio` of the groups until the next update are complete. The ratio
    rises while the trainer waits all the same, and falls while it does not
    (docs/advance/v1_async_trainer.md, September 2026).
    """

    ratio: float = 0.4
    rise: float = 0.05
    fall: float = 0.03
    idle_s: float = 2.0
    """A longer wait counts as one."""
    steps: int = 2
    """With or without waits, one after the other, before the ratio changes."""

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"switch_ratio must be above 0 and at most 1, not {self.ratio:g}")

    @property
    def own_gpus(self) -> int:
        """None: all GPUs of the trainer are lent."""
        return 0

    def rule(self, *, groups: int, every: int, gpus: GpuCounts) -> "WaitLendingRule":
        """The rule for such batches."""
        scale = (gpus.rollout + gpus.hybrid) / gpus.rollout
        return WaitLendingRule(self, groups=groups, every=every, scale=scale)


class WaitLendingRule:
    def __init__(self, parameters: WaitLending, *, groups: int, every: int, scale: float) -> None:
        """`scale`: the GPUs that generate during a loan, over the rollout's own."""
        self._parameters, self._groups, self._every = parameters, groups, every
        self._scale = scale
        self.ratio = parameters.ratio
        self._wait_s, self._waited_groups = 0.0, 0
        self._step_wait_s = 0.0
        self._idle = self._calm = 0
        self._to_rollout: deque[float] = deque(maxlen=3)
        self._to_training: deque[float] = deque(maxlen=3)

    @property
    def threshold(self) -> int:
        """Complete groups that end a loan: a batch at least, those of an update period at most."""
        period = self._groups * self._every
        return min(max(round(self.ratio * period), self._groups), period)

    def waited(self, seconds: float, groups: int) -> None:
        self._wait_s += seconds
        self._waited_groups += groups
        self._step_wait_s += seconds

    def switched(self, role: Literal["rollout", "training"], seconds: float) -> None:
        (self._to_rollout if role == "rollout" else self._to_training).append(seconds)

    def lends(self, step: StepEnd) -> bool:
        """Adapt the ratio, then compare what is saved with what it costs."""
        self._adapt()
        missing = self.threshold - step.ready
        if missing <= 0:
            return False
        if not (self._waited_groups and self._to_rollout and self._to_training):
            return True
        saved_s = missing * self._wait_s / self._waited_groups * (1.0 - 1.0 / self._scale)
        return saved_s > fmean(self._to_rollout) + fmean(self._to_training)

    def takes_back(self, ready: int, step: StepEnd | None) -> bool:
        """Whether enough groups are complete."""
        return ready >= self.threshold

    def _adapt(self) -> None:
        p = self._parameters
        waited = self._step_wait_s > p.idle_s
        self._step_wait_s = 0.0
        self._idle, self._calm = (self._idle + 1, 0) if waited else (0, self._calm + 1)
        if self._idle >= p.steps:
            self.ratio = min(1.0, self.ratio + p.rise)
        elif self._calm >= p.steps:
            self.ratio = min(self.ratio, max(1.0 / self._every, self.ratio - p.fall))


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioPool:
    """Libra's elastic pool: replicas join training while that is the slower side.

    In this order: pressure on the engines returns them to the rollout, and so do `most_steps` steps
    of training; a plan that has them in training lets them train; so does a ratio of training to
    rollout time of `borrow` or more; one of `release` or less returns them; between the two they
    stay (arXiv 2606.03077 and its release, August 2026).
    """

    gpus: int = 8
    """Of the pool, beside the GPUs that only generate or only train."""
    borrow: float = 1.15
    release: float = 0.90
    most_pressure: float = 0.80
    most_steps: int = 20
    plan: SplitPlan | None = None
    """When and how their side is planned; None: never."""

    def __post_init__(self) -> None:
        if self.borrow <= self.release:
            raise ValueError(
                f"borrow must be above release, {self.release:g}, so that the pool can stay where "
                f"it is between the two; not {self.borrow:g}"
            )

    @property
    def own_gpus(self) -> int:
        """GPUs that belong to neither side."""
        return self.gpus

    def within(self, gpus: int, each: int) -> "RatioPool":
        """As many GPUs, or fewer, as leave an engine of `each` to the rollout's `gpus`."""
        sizes = [n for n in (self.gpus, 4, 2, 1, each) if n % each == 0 and n < gpus]
        return replace(self, gpus=[*sizes, self.gpus][0])

    def rule(self, *, groups: int, every: int, gpus: GpuCounts) -> "RatioRule":
        """The rule; batches do not matter to it."""
        return RatioRule(self, None if self.plan is None else SplitPlanner(self.plan, gpus))


class RatioRule:
    def __init__(self, parameters: RatioPool, planner: SplitPlanner | None) -> None:
        self._parameters, self._planner = parameters, planner
        self._steps = 0
        """That the GPUs have trained."""

    def waited(self, seconds: float, groups: int) -> None:
        """Nothing: the rule compares times of whole steps."""

    def switched(self, role: Literal["rollout", "training"], seconds: float) -> None:
        """Count the steps from here."""
        self._steps = 0

    def lends(self, step: StepEnd) -> bool:
        """Whether training gives the GPUs up."""
        p = self._parameters
        self._steps += 1
        wanted = self._planner is not None and self._planner.wants_training("training", step)
        if step.pressure >= p.most_pressure or self._steps >= p.most_steps:
            return True
        if wanted:
            return False
        return step.train_s <= p.release * step.rollout_s

    def takes_back(self, ready: int, step: StepEnd | None) -> bool:
        """Whether training is the slower side, and the engines can do without."""
        p = self._parameters
        if step is None:
            return False
        wanted = self._planner is not None and self._planner.wants_training("rollout", step)
        if step.pressure >= p.most_pressure:
            return False
        return wanted or step.train_s >= p.borrow * step.rollout_s


Hybrid: TypeAlias = WaitLending | RatioPool


class Borrower(Protocol):
    """Runs engines on GPUs that are not its own; implemented by the rollouts' `Controller`."""

    def borrow_engines(self, engines: Sequence[EngineSpec], out: CommandList) -> list[EngineId]:
        """Start engines; return their ids."""
        ...

    def give_back_engines(self, engines: Sequence[EngineId], out: CommandList) -> None:
        """Stop engines that are ready."""
        ...


class HybridPool:
    """Where GPUs are that both sides may have, and the engines on them."""

    def __init__(
        self, engines: Sequence[EngineSpec], hybrid: Hybrid, rule: HybridRule, rollouts: Borrower
    ) -> None:
        """They train at first; `engines` run on them while they are the rollout's."""
        self.rule = rule
        self.state: PoolState = "training"
        self._specs, self._rollouts = tuple(engines), rollouts
        self._trainer_needs_them = not hybrid.own_gpus
        self._engines: dict[EngineId, bool] = {}
        """Engines on them, and whether each is ready."""
        self._since_s = 0.0
        """When the last switch began."""

    @property
    def trainer_ready(self) -> bool:
        """Whether the trainer has the GPUs that it cannot do without."""
        return self.state == "training" or not self._trainer_needs_them

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._engines

    def lend(self, now_s: float, cause: int) -> AssignGpus:
        """Let training give the GPUs up."""
        self._move("to_rollout", now_s)
        return AssignGpus(role="rollout", pool="hybrid", cause=cause)

    def take_back(self, now_s: float, cause: int) -> CommandList:
        """Stop the engines, whose steps end early and go on elsewhere."""
        self._move("stopping", now_s)
        out = _commands(cause)
        self._rollouts.give_back_engines(list(self._engines), out)
        return out

    def assigned(self, event: GpusAssigned, cause: int) -> CommandList:
        """The GPUs have changed sides, or could not: then they go back to where they were."""
        out = _commands(cause)
        expected: PoolState = "to_rollout" if event.role == "rollout" else "to_training"
        if self.state != expected:
            raise LedgerError(f"GPUs were assigned to {event.role} while they are {self.state}")
        if (event.role == "rollout") == event.ok:
            self._move("starting", event.time_s)
            self._engines = dict.fromkeys(self._rollouts.borrow_engines(self._specs, out), False)
        else:
            self._move("training", event.time_s)
        return out

    def ready(self, engine: EngineId, now_s: float) -> None:
        self._engines[engine] = True
        self._started(now_s)

    def gone(self, engine: EngineId, now_s: float, cause: int) -> list[AssignGpus]:
        """One of its engines has stopped or failed; without any, the GPUs go to training."""
        del self._engines[engine]
        if self._engines:
            self._started(now_s)
            return []
        self._move("to_training", now_s)
        return [AssignGpus(role="training", pool="hybrid", cause=cause)]

    def _started(self, now_s: float) -> None:
        if self.state == "starting" and all(self._engines.values()):
            self._move("rollout", now_s)

    def _move(self, state: PoolState, now_s: float) -> None:
        """Change the state; its only writer."""
        if state not in NEXT[self.state]:
            raise LedgerError(f"hybrid GPUs are {self.state}, so not {state}")
        if state == "rollout":
            self.rule.switched("rollout", now_s - self._since_s)
        elif state == "training":
            self.rule.switched("training", now_s - self._since_s)
        elif self.state in ("training", "rollout"):
            self._since_s = now_s
        self.state = state


def _commands(cause: int) -> CommandList:
    out = CommandList()
    out.cause = cause
    return out
