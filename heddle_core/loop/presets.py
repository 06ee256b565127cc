"""Named regimes, with the parameters of the systems that they come from.

A regime is one class below and one line in `REGIMES`. `docs/loop.md` states what of each system
is modelled and what is not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from heddle_core.loop.hybrid import RatioPool, WaitLending
from heddle_core.loop.regime import (
    Batching,
    BatchShape,
    Regime,
    RegimeError,
    Sampling,
    Split,
    Staleness,
    Update,
)
from heddle_core.loop.split_plan import SplitPlan


class RegimePreset(Protocol):
    """Parameters of a system."""

    can_share_gpus: ClassVar[bool]
    """Whether rollout and training may have the same GPUs in turn."""

    def regime(self, shape: BatchShape) -> Regime:
        """The rules for such batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """On-policy: generate a batch, train, update, generate the next."""

    can_share_gpus: ClassVar[bool] = True

    def regime(self, shape: BatchShape) -> Regime:
        """Strictly one after the other."""
        return Regime(groups=shape.groups, samples=shape.samples, split=_split(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStepOff:
    """One-step-off-policy (verl), train_async (slime): the next batch while one is trained."""

    can_share_gpus: ClassVar[bool] = False

    def regime(self, shape: BatchShape) -> Regime:
        """The update waits for the batch in generation."""
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            staleness=Staleness(bound=1.0, counted_by="batch"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlFullyAsync:
    """verl's fully asynchronous trainer."""

    can_share_gpus: ClassVar[bool] = False
    staleness_threshold: float = 0.1
    """Samples from older weights, as a share of those between two updates."""
    trigger_parameter_sync_step: int = 4
    """Batches between two updates."""
    partial_rollout: bool = True
    """Interrupt running trajectories at an update; else it waits for them."""

    def regime(self, shape: BatchShape) -> Regime:
        """Admission by the number of samples since the last update."""
        if not self.partial_rollout and self.staleness_threshold > 0.0:
            raise RegimeError(
                "staleness_threshold above 0 needs partial_rollout=true: an "
                "update that waits for running trajectories leaves none for the next batch"
            )
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            staleness=Staleness(bound=self.staleness_threshold, late="train"),
            update=Update(
                mode="interrupt" if self.partial_rollout else "drain",
                every=self.trigger_parameter_sync_step,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Areal:
    """AReaL: bounded staleness at admission, generation interrupted at an update."""

    can_share_gpus: ClassVar[bool] = False
    max_head_offpolicyness: float = 4.0
    """Bound on the staleness, eta in the paper, which uses 4 to 8; the code's default is 0."""
    max_concurrent_rollouts: int = 0
    """Trajectories in flight at most; 0: twice the engines' slots."""
    enforce: bool = False
    """Wait for trajectories that would exceed the bound; AReaL trains them."""

    def regime(self, shape: BatchShape) -> Regime:
        """Its admission rule, with interruptible generation."""
        most = self.max_concurrent_rollouts or shape.most_concurrent
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            staleness=Staleness(
                bound=self.max_head_offpolicyness,
                late="wait" if self.enforce else "train",
                max_concurrent=most,
            ),
            update=Update(mode="interrupt"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRl:
    """PipelineRL: weights change in flight, with the KV kept; no bound on the staleness."""

    can_share_gpus: ClassVar[bool] = False
    attempts_in_flight: int = 0
    """Trajectories in flight; 0: the engines' slots."""

    def regime(self, shape: BatchShape) -> Regime:
        """As many trajectories as the engines run, the first finished groups first."""
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            staleness=Staleness(
                counted_by="nothing",
                late="train",
                max_concurrent=self.attempts_in_flight or max(shape.slots, shape.samples),
            ),
            batching=Batching(order="first_finished"),
            update=Update(mode="in_flight", keep_kv=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roll:
    """ROLL: groups of later batches start early, redundant samples, too old groups are dropped."""

    can_share_gpus: ClassVar[bool] = False
    async_generation_ratio: float = 1.0
    """Batches in generation beside the current one; ROLL's default is 0, synchronous."""
    group_size_redundancy: int = 0
    """Samples of a group beside those that it needs."""

    def regime(self, shape: BatchShape) -> Regime:
        """The oldest groups first; those over the ratio are dropped."""
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            sampling=Sampling(extra_samples=self.group_size_redundancy),
            staleness=_dropping(self.async_generation_ratio),
            update=Update(mode="interrupt"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollArt:
    """RollArt: staleness bounded for each trajectory, redundant environments."""

    can_share_gpus: ClassVar[bool] = False
    alpha: float = 1.0
    """Versions between the start of a trajectory and its training."""
    redundant_environments: int = 0
    """Samples of a group beside those that it needs; the first to finish count."""

    def regime(self, shape: BatchShape) -> Regime:
        """Trajectories start as engines have room; those that grow too old are cancelled."""
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            sampling=Sampling(extra_samples=self.redundant_environments),
            staleness=_dropping(self.alpha),
            batching=Batching(order="first_finished"),
            update=Update(mode="interrupt"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class April:
    """APRIL: more prompts than a batch needs; the rest goes on in the next step."""

    can_share_gpus: ClassVar[bool] = True
    over_sampling: float = 2.0
    """Prompts in flight over those of a batch (slime's over-sampling-batch-size)."""

    def regime(self, shape: BatchShape) -> Regime:
        """Partial rollout: trajectories that were stopped keep their tokens."""
        _at_least("over_sampling", self.over_sampling, 1.0)
        extra = math.ceil((self.over_sampling - 1.0) * shape.groups - 1e-9)
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            sampling=Sampling(extra_groups=extra),
            staleness=Staleness(late="train"),
            batching=Batching(order="first_finished"),
            update=Update(mode="interrupt"),
            split=_split(shape),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RollPacker:
    """RollPacker: tail batching. Short rounds take the first finishers, long rounds the rest."""

    can_share_gpus: ClassVar[bool] = True
    eta_prompts: float = 1.25
    """Prompts that start, over those of a batch."""
    eta_responses: float = 1.25
    """Samples of a prompt that start, over those that are trained."""

    def regime(self, shape: BatchShape) -> Regime:
        """On-policy: what is put off starts again, under newer weights."""
        _at_least("eta_prompts", self.eta_prompts, 1.0)
        _at_least("eta_responses", self.eta_responses, 1.0)
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            sampling=Sampling(
                extra_groups=math.ceil((self.eta_prompts - 1.0) * shape.groups - 1e-9),
                extra_samples=math.ceil((self.eta_responses - 1.0) * shape.samples - 1e-9),
            ),
            batching=Batching(order="first_finished", rest="defer"),
            split=_split(shape),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlColocateAsync:
    """verl's V1 trainer, colocate_async: unfinished trajectories go on in the next step."""

    can_share_gpus: ClassVar[bool] = True
    num_warmup_batches: int = 1
    """Batches of prompts that start beside the first; later steps start one each."""

    def regime(self, shape: BatchShape) -> Regime:
        """APRIL's rules, with whole batches beside the first."""
        return April(over_sampling=1.0 + self.num_warmup_batches).regime(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlSeparateAsync:
    """verl's V1 trainer, separate_async: its GPUs generate too while it waits."""

    can_share_gpus: ClassVar[bool] = False
    num_warmup_batches: int = 1
    """Batches, of all that are trained between two updates, that start ahead."""
    parameter_sync_step: int = 4
    """Batches between two updates."""
    enable_switch: bool = True
    """Lend the trainer's GPUs to the rollout (hybrid_rollout.enable_switch)."""
    switch_ratio: float = 0.4
    """Share of the groups until the next update that ends a loan, at first."""

    def regime(self, shape: BatchShape) -> Regime:
        """Partial rollout, on GPUs of its own."""
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            staleness=Staleness(bound=self.num_warmup_batches, late="train"),
            batching=Batching(order="first_finished"),
            update=Update(mode="interrupt", every=self.parameter_sync_step),
            split=Split(
                hybrid=WaitLending(ratio=self.switch_ratio) if self.enable_switch else None
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Libra:
    """Libra: bounded staleness, and a pool of GPUs that join training or the rollout."""

    can_share_gpus: ClassVar[bool] = False
    max_head_offpolicyness: float = 4.0
    """Versions between the start of a trajectory and its training."""
    pool_gpus: int = 8
    """Of the elastic pool, out of the rollout's; 0: no pool."""
    borrow: float = 1.15
    """Training over rollout time from which the pool trains."""
    release: float = 0.90
    """The ratio down to which it generates again."""
    max_pressure: float = 0.80
    """Trajectories in flight over engines' slots from which it generates."""
    plan_interval: int = 10
    """Steps between two plans of the pool's side; 0: none."""
    min_gain: float = 0.05
    """Share of a step that a plan must save."""

    growth: ClassVar[float] = 0.0
    cooldown_of_interval: ClassVar[bool] = True

    def regime(self, shape: BatchShape) -> Regime:
        """Admission as AReaL's; too old groups are dropped."""
        # With a bound of 0 none can be; the release admits too many, and trains them.
        staleness = Staleness(late="train" if self.growth else "wait")
        if self.max_head_offpolicyness:
            staleness = _dropping(self.max_head_offpolicyness)
        plan = None
        if self.plan_interval:
            plan = SplitPlan(
                interval=self.plan_interval,
                least_gain=self.min_gain,
                cooldown_of_interval=self.cooldown_of_interval,
            )
        pool = RatioPool(
            gpus=self.pool_gpus,
            plan=plan,
            borrow=self.borrow,
            release=self.release,
            most_pressure=self.max_pressure,
        )
        return Regime(
            groups=shape.groups,
            samples=shape.samples,
            staleness=replace(
                staleness,
                growth=self.growth,
                max_concurrent=shape.most_concurrent,
            ),
            update=Update(mode="interrupt"),
            split=Split(hybrid=pool if self.pool_gpus else None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraRelease(Libra):
    """Libra as released: admission grows by a batch more with every version, a known defect.

    Neither does the rest after a plan hold back those of the interval.
    """

    growth: ClassVar[float] = 1.0
    cooldown_of_interval: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeddleLoop:
    """Ours: bounded staleness at admission, gradients of each group as soon as it is complete."""

    can_share_gpus: ClassVar[bool] = False
    max_head_offpolicyness: float = 1.0
    """Bound on the staleness at admission, as AReaL's."""
    accumulate_from: int = 1
    """Complete groups that the trainer takes at once; 0: it waits for the batch."""

    def regime(self, shape: BatchShape) -> Regime:
        """The trainer is nearly done when the last group of a batch is complete."""
        admission = Areal(max_head_offpolicyness=self.max_head_offpolicyness).regime(shape)
        batching = Batching(accumulate_from=self.accumulate_from or None)
        return replace(admission, batching=batching)


REGIMES: Mapping[str, type[RegimePreset]] = {
    "sync": Sync,
    "one-step-off": OneStepOff,
    "verl-fully-async": VerlFullyAsync,
    "areal": Areal,
    "pipelinerl": PipelineRl,
    "roll": Roll,
    "rollart": RollArt,
    "april": April,
    "rollpacker": RollPacker,
    "verl-colocate-async": VerlColocateAsync,
    "verl-separate-async": VerlSeparateAsync,
    "libra": Libra,
    "libra-release": LibraRelease,
    "heddle-loop": HeddleLoop,
}


def _at_least(what: str, value: float, least: float) -> None:
    if value < least:
        raise RegimeError(f"{what} must be {least:g} or more, not {value:g}")


def _dropping(bound: float) -> Staleness:
    """Groups over the bound are dropped; with a bound of 0 none can be."""
    return Staleness(bound=bound, late="drop" if bound > 0.0 else "wait")


def _split(shape: BatchShape) -> Split:
    return Split(colocated=shape.colocated)
