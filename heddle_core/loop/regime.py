"""A regime: the rules of an RL loop, in five parts that combine freely.

RL step: one batch trained. Version: number of weight updates so far. Staleness of a trajectory: the
version when its batch is trained, minus the version when it started.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

from heddle_core.commands import UpdateMode
from heddle_core.loop.hybrid import Hybrid, WaitLending

Late: TypeAlias = Literal["wait", "drop", "train"]
"""What is done about a group that would exceed the staleness bound: the trainer waits for it, it is
discarded, or it is trained all the same, because the bound holds for admission only."""

Rest: TypeAlias = Literal["keep", "cancel", "defer"]
"""What becomes of groups that run when a batch is complete: they go on, they are discarded, or they
are discarded and their prompts come back later in a round of their own."""


class RegimeError(ValueError):
    """A regime that contradicts itself or its batch; the message names the parameter."""


class SharedGpusError(RegimeError):
    """A regime whose rollout and training cannot have the same GPUs in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """What a regime is made for."""

    groups: int
    """Prompts of a batch."""
    samples: int
    """Trained samples of a prompt."""
    slots: int
    """Steps that the rollout engines run at once, all together."""
    colocated: bool
    train_gpus: int = 1
    engines: int = 1
    """That generate."""

    @property
    def most_concurrent(self) -> int:
        """Trajectories in flight by which the engines are surely full: twice their slots."""
        return 2 * max(self.slots, self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How much is started for each batch beyond what it needs."""

    extra_groups: int = 0
    """Groups that run beside those of a batch."""
    extra_samples: int = 0
    """Samples of a group beside those that it needs; the first to finish count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How many groups may start.

    By version, `(bound + version + 1)` batches in all, those discarded not counted: AReaL's rule
    (arXiv 2505.24298, section 5.1). By batch, one more than the trainer has begun: the next batch
    is generated while one is trained.
    """

    bound: float = 0.0
    counted_by: Literal["version", "batch", "nothing"] = "version"
    """`nothing`: only `max_concurrent` limits the starts."""
    late: Late = "wait"
    max_concurrent: int | None = None
    """Trajectories in flight; None: any number."""
    growth: float = 0.0
    """Batches more that may start for every version; above 0 the rule bounds nothing."""
    admits: Literal["slots", "groups", "samples"] = "slots"
    """When `max_concurrent` has room: for a whole group as its samples find places; for a group as
    all of another are scored; for each sample as one ends, its group's others later (AReaL pull
    request 1722, Megatron-LM 5306)."""

    @property
    def most(self) -> int:
        """Largest staleness of a trajectory that may be trained."""
        return math.ceil(self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Which complete groups make a batch."""

    order: Literal["oldest", "first_finished", "started"] = "oldest"
    """Of complete groups; `started`: exactly those that started first, which are waited for
    (Megatron-LM pull request 5306)."""
    rest: Rest = "keep"
    accumulate_from: int | None = None
    """Complete groups from which on the trainer computes gradients before a batch is complete;
    None: it waits for the batch. One optimizer step sums them, so the batch stays the same."""
    equal_rewards: Literal["train", "drop"] = "train"
    """What is done with a group whose rewards are equal, which has no gradient under GRPO; others
    take the place of those that are dropped (dynamic sampling of DAPO, arXiv 2503.14476)."""
    overlong: Literal["train", "mask"] = "train"
    """Whether the loss counts trajectories that a limit of tokens cut off; those that are masked
    fill places of the batch and take the trainer's time (DAPO's over-long filter)."""
    most_complete: int | None = None
    """Complete groups that wait for training; the first of them is discarded where one more
    completes. None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How weights reach the engines."""

    mode: UpdateMode = "drain"
    keep_kv: bool = False
    every: int = 1
    """Batches between two updates."""
    waits: bool = True
    """Whether the trainer waits until all engines have them. Else relay workers keep the newest,
    and engines take them from there (Laminar, arXiv 2510.12633)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who has the GPUs: rollout and training in turn, or each its own, with some for both."""

    colocated: bool = False
    hybrid: Hybrid | None = None
    """When GPUs change sides."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Rules of an RL loop.

    Raises:
        RegimeError: a number out of range, or parts that cannot work together.
    """

    groups: int
    """Prompts of a batch."""
    samples: int
    """Trained samples of a prompt."""
    _: KW_ONLY
    sampling: Sampling = Sampling()
    staleness: Staleness = Staleness()
    batching: Batching = Batching()
    update: Update = Update()
    split: Split = Split()

    def __post_init__(self) -> None:
        self._check_gpus()
        sampling, staleness, update = self.sampling, self.staleness, self.update
        _require(self.groups >= 1, f"groups must be 1 or more, not {self.groups}")
        _require(self.samples >= 1, f"samples must be 1 or more, not {self.samples}")
        _require(sampling.extra_groups >= 0, "extra_groups must be 0 or more")
        _require(sampling.extra_samples >= 0, "extra_samples must be 0 or more")
        _require(
            math.isfinite(staleness.bound) and staleness.bound >= 0.0,
            f"the staleness bound must be 0 or more, not {staleness.bound}",
        )
        _require(update.every >= 1, f"update every 1 or more batches, not {update.every}")
        _require(
            update.waits or (update.mode != "drain" and not self.split.colocated),
            "weights from relay workers reach engines that generate: use update interrupt or "
            "in_flight, on GPUs of their own",
        )
        _require(
            update.waits or staleness.late == "train",
            "relay workers bring weights after the trainer has gone on, so late groups are found "
            "too late: use late train, or updates that the trainer waits for",
        )
        _require(
            math.isfinite(staleness.growth) and staleness.growth >= 0.0,
            f"growth must be 0 or more, not {staleness.growth}",
        )
        _require(
            staleness.growth == 0.0 or staleness.late != "wait",
            "admission that grows with every version bounds nothing, so the trainer cannot wait "
            "for late groups: use late drop or train",
        )
        most = staleness.max_concurrent
        _require(
            most is None or most >= self.started_samples,
            f"max_concurrent must be {self.started_samples} or more, so that a group can start, "
            f"not {most}",
        )
        _require(
            staleness.counted_by != "nothing" or most is not None,
            "without a limit by version or batch, max_concurrent must be given",
        )
        self._check_updates()
        self._check_data()

    def _check_updates(self) -> None:
        """Refuse what runs across weight updates and may not."""
        sampling, staleness, update = self.sampling, self.staleness, self.update
        carries = self.batching.rest == "keep"
        overlapping = (
            staleness.counted_by != "batch"
            and (staleness.bound > 0.0 or staleness.counted_by == "nothing")
        ) or (carries and sampling.extra_groups > 0)
        _require(
            update.mode != "drain" or not overlapping,
            "trajectories run across weight updates here: use update interrupt or in_flight, or "
            "staleness bound 0 and rest cancel",
        )
        _require(
            staleness.counted_by != "batch" or update.mode == "drain",
            "a regime that starts the next batch with the training of one updates by drain",
        )
        _require(
            staleness.counted_by != "batch" or staleness.bound >= 1.0,
            "a batch that is generated while one is trained is one version old: take a staleness "
            "bound of 1 or more",
        )
        _require(
            staleness.late != "wait"
            or (
                staleness.counted_by != "nothing"
                and (sampling.extra_groups == 0 or update.mode == "drain")
            ),
            "more groups run than a batch and the bound allow, so the trainer cannot wait for "
            "each: use late drop or train",
        )
        _require(
            not (staleness.counted_by == "version" and staleness.bound == 0.0)
            or staleness.late != "drop"
            or not carries,
            "staleness bound 0 with late drop would discard what rest keep carries over",
        )

    def _check_gpus(self) -> None:
        """Refuse what GPUs that rollout and training have in turn cannot do."""
        colocated, part = self.split.colocated, self.batching.accumulate_from
        _require(
            not (colocated and self.split.hybrid),
            "GPUs that rollout and training have in turn leave none for a hybrid pool",
        )
        _require(
            not (colocated and self.staleness.counted_by == "batch"),
            "GPUs that rollout and training have in turn cannot generate while they train",
        )
        _require(part is None or part >= 1, f"accumulate from 1 or more groups, not {part}")
        _require(
            part is None or not colocated,
            "GPUs that rollout and training have in turn cannot compute gradients while they "
            "generate: accumulate on GPUs of their own",
        )
        self._check_loans()

    def _check_loans(self) -> None:
        """Refuse loans that would not end, because too few groups may be complete."""
        if not isinstance(self.split.hybrid, WaitLending):
            return
        period = self.groups * self.update.every
        _require(
            self.staleness.counted_by != "batch" or self.update.every == 1,
            f"lent GPUs come back when groups of {self.update.every} batches are complete, and "
            "counted_by batch lets one be under way: use counted_by version, or update every batch",
        )
        _require(
            (self.batching.most_complete or period) >= period,
            f"lent GPUs come back when up to {period} groups are complete: most_complete must be "
            f"{period} or more, not {self.batching.most_complete}",
        )

    def _check_data(self) -> None:
        """Refuse rules for samples and groups that no batch could come of."""
        staleness, batching, most = self.staleness, self.batching, self.staleness.max_concurrent
        _require(
            staleness.admits == "slots" or (most is not None and self.update.mode != "drain"),
            f"admits {staleness.admits} is of max_concurrent, with update interrupt or in_flight",
        )
        _require(
            batching.equal_rewards == "train" or self.samples > 1,
            "equal_rewards drop needs samples of 2 or more: one reward equals itself",
        )
        waiting = batching.most_complete
        _require(
            waiting is None or waiting >= self.groups,
            f"most_complete must be {self.groups} or more, so that a batch can wait, not {waiting}",
        )
        _require(
            waiting is None or batching.order != "started",
            "order started waits for the groups that started first, and most_complete discards "
            "them: leave one of the two out",
        )

    @property
    def started_samples(self) -> int:
        """Samples of a group that start."""
        return self.samples + self.sampling.extra_samples

    @property
    def alternates(self) -> bool:
        """Whether nothing is generated while the trainer trains, and nothing trained meanwhile."""
        staleness = self.staleness
        on_policy = staleness.counted_by == "version" and staleness.bound + staleness.growth == 0.0
        apart = self.split.hybrid is None and self.batching.accumulate_from is None
        return on_policy and apart and not self.carries and self.update.every == 1

    @property
    def carries(self) -> bool:
        """Whether groups that start beside those of a batch are trained in a later one."""
        return self.batching.rest == "keep" and self.sampling.extra_groups > 0

    @property
    def bounds_staleness(self) -> bool:
        """Whether nothing older than `Staleness.most` is trained."""
        staleness = self.staleness
        counted = staleness.counted_by != "nothing" and staleness.growth == 0.0
        return counted and staleness.late != "train"

    @property
    def warm_up_batches(self) -> int:
        """Batches until as many trajectories are under way as will be, one at least."""
        staleness = self.staleness
        batches = (staleness.bound + 1.0) * self.update.every
        if staleness.counted_by == "nothing" and staleness.max_concurrent is not None:
            batches = staleness.max_concurrent / (self.groups * self.samples)
        return max(1, math.ceil(batches + self.sampling.extra_groups / self.groups))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RegimeError(message)
