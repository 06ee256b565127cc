"""Named regimes, with the parameters of the systems that they come from.

A regime is one function below and one line in `REGIMES`; its keyword arguments are its parameters.
`docs/loop.md` states what of each system is modelled and what is not.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from heddle_core.loop.hybrid import RatioPool, WaitLending
from heddle_core.loop.regime import (
    Batching,
    BatchShape,
    Late,
    Regime,
    RegimeError,
    Sampling,
    Split,
    Staleness,
    Update,
)
from heddle_core.loop.split_plan import SplitPlan


def sync(shape: BatchShape) -> Regime:
    """On-policy: generate a batch, train, update, generate the next."""
    return Regime(shape.groups, shape.samples, split=_split(shape))


def one_step_off(shape: BatchShape) -> Regime:
    """One-step-off-policy (verl), train_async (slime): the next batch while one is trained."""
    staleness = Staleness(bound=1.0, counted_by="batch")
    return Regime(shape.groups, shape.samples, staleness=staleness)


def verl_fully_async(
    shape: BatchShape,
    *,
    staleness_threshold: float = 0.1,
    trigger_parameter_sync_step: int = 4,
    partial_rollout: bool = True,
) -> Regime:
    """verl's fully asynchronous trainer.

    `staleness_threshold` is the number of samples from older weights, as a share of those between
    two updates, `trigger_parameter_sync_step` that of batches between two updates. With
    `partial_rollout` an update interrupts running trajectories; else it waits for them. Each engine
    has 16 prompts at once, and complete groups are trained in their order (verl's Rollouter and
    message queue, September 2026).
    """
    if not partial_rollout and staleness_threshold > 0.0:
        raise RegimeError(
            "staleness_threshold above 0 needs partial_rollout=true: an "
            "update that waits for running trajectories leaves none for the next batch"
        )
    return Regime(
        shape.groups,
        shape.samples,
        staleness=Staleness(
            bound=staleness_threshold,
            late="train",
            max_concurrent=16 * shape.engines * shape.samples,
            admits="groups" if partial_rollout else "slots",
        ),
        batching=Batching(order="first_finished"),
        update=Update(
            mode="interrupt" if partial_rollout else "drain", every=trigger_parameter_sync_step
        ),
    )


def areal(
    shape: BatchShape,
    *,
    max_head_offpolicyness: float = 4.0,
    max_concurrent_rollouts: int = 0,
    enforce: bool = False,
) -> Regime:
    """AReaL: bounded staleness at admission, generation interrupted at an update.

    `max_head_offpolicyness` is the bound, eta in the paper, which uses 4 to 8; the code's default
    is 0. At most `max_concurrent_rollouts` trajectories are in flight; 0: twice the engines' slots.
    With `enforce` the trainer waits for trajectories that would exceed the bound; AReaL trains
    them.
    """
    return Regime(
        shape.groups,
        shape.samples,
        staleness=Staleness(
            bound=max_head_offpolicyness,
            late="wait" if enforce else "train",
            max_concurrent=max_concurrent_rollouts or shape.most_concurrent,
        ),
        update=Update(mode="interrupt"),
    )


def pipelinerl(
    shape: BatchShape,
    *,
    attempts_in_flight: int = 0,
    ring_buffer_size: int = 128,
    max_ready_samples_per_lead: int = 64,
) -> Regime:
    """PipelineRL: weights change in flight, with the KV kept; the newest samples are trained.

    `attempts_in_flight` counts trajectories; 0: as many as the engines have slots. Of complete
    samples `ring_buffer_size`, and `max_ready_samples_per_lead` for each GPU of the trainer, wait
    for it, a batch at least; new ones replace the oldest.
    """
    waiting = ring_buffer_size + max_ready_samples_per_lead * shape.train_gpus
    return Regime(
        shape.groups,
        shape.samples,
        staleness=Staleness(
            counted_by="nothing",
            late="train",
            max_concurrent=attempts_in_flight or max(shape.slots, shape.samples),
        ),
        batching=Batching(
            order="first_finished",
            most_complete=max(shape.groups, waiting // shape.samples),
        ),
        update=Update(mode="in_flight", keep_kv=True),
    )


def roll(
    shape: BatchShape, *, async_generation_ratio: float = 1.0, group_size_redundancy: int = 0
) -> Regime:
    """ROLL: groups of later batches start early, redundant samples, too old groups are dropped.

    `async_generation_ratio` is the number of batches in generation beside the current one; ROLL's
    default is 0, synchronous. `group_size_redundancy` is that of samples of a group beside those
    that it needs. The oldest groups go first.
    """
    return Regime(
        shape.groups,
        shape.samples,
        sampling=Sampling(extra_samples=group_size_redundancy),
        staleness=_dropping(async_generation_ratio),
        update=Update(mode="interrupt"),
    )


def rollart(shape: BatchShape, *, alpha: float = 1.0, redundant_environments: int = 0) -> Regime:
    """RollArt: staleness bounded for each trajectory, redundant environments.

    `alpha` is the number of versions between the start of a trajectory and its training,
    `redundant_environments` that of samples of a group beside those that it needs; the first to
    finish count. Trajectories start as engines have room; those that grow too old are cancelled.
    """
    return Regime(
        shape.groups,
        shape.samples,
        sampling=Sampling(extra_samples=redundant_environments),
        staleness=_dropping(alpha),
        batching=Batching(order="first_finished"),
        update=Update(mode="interrupt"),
    )


def april(shape: BatchShape, *, over_sampling: float = 2.0) -> Regime:
    """APRIL: more prompts than a batch needs; the rest goes on in the next step.

    `over_sampling` is the number of prompts in flight over that of a batch (slime's
    over-sampling-batch-size). Trajectories that were stopped keep their tokens.
    """
    return Regime(
        shape.groups,
        shape.samples,
        sampling=Sampling(extra_groups=_extra("over_sampling", over_sampling, shape.groups)),
        staleness=Staleness(late="train"),
        batching=Batching(order="first_finished"),
        update=Update(mode="interrupt"),
        split=_split(shape),
    )


def rollpacker(
    shape: BatchShape, *, eta_prompts: float = 1.25, eta_responses: float = 1.25
) -> Regime:
    """RollPacker: tail batching. Short rounds take the first finishers, long rounds the rest.

    `eta_prompts` is the number of prompts that start over that of a batch, `eta_responses` that of
    samples of a prompt that start over those that are trained. On-policy: what is put off starts
    again, under newer weights.
    """
    return Regime(
        shape.groups,
        shape.samples,
        sampling=Sampling(
            extra_groups=_extra("eta_prompts", eta_prompts, shape.groups),
            extra_samples=_extra("eta_responses", eta_responses, shape.samples),
        ),
        batching=Batching(order="first_finished", rest="defer"),
        split=_split(shape),
    )


def verl_colocate_async(shape: BatchShape, *, num_warmup_batches: int = 1) -> Regime:
    """verl's V1 trainer, colocate_async: unfinished trajectories go on in the next step.

    `num_warmup_batches` batches of prompts start beside the first; later steps start one each.
    """
    return april(shape, over_sampling=1.0 + num_warmup_batches)


def verl_separate_async(
    shape: BatchShape,
    *,
    num_warmup_batches: int = 1,
    parameter_sync_step: int = 4,
    enable_switch: bool = True,
    switch_ratio: float = 0.4,
) -> Regime:
    """verl's V1 trainer, separate_async: its GPUs generate too while it waits.

    `num_warmup_batches`, of all that are trained between two updates, start ahead;
    `parameter_sync_step` batches are between two updates. `enable_switch` lends the trainer's GPUs
    to the rollout (hybrid_rollout.enable_switch), and `switch_ratio` is the share of the groups
    until the next update that ends a loan, at first.
    """
    return Regime(
        shape.groups,
        shape.samples,
        staleness=Staleness(bound=num_warmup_batches, late="train"),
        batching=Batching(order="first_finished"),
        update=Update(mode="interrupt", every=parameter_sync_step),
        split=Split(hybrid=WaitLending(ratio=switch_ratio) if enable_switch else None),
    )


def libra(
    shape: BatchShape,
    *,
    max_head_offpolicyness: float = 4.0,
    pool_gpus: int = 8,
    borrow: float = 1.15,
    release: float = 0.90,
    max_pressure: float = 0.80,
    plan_interval: int = 10,
    min_gain: float = 0.05,
) -> Regime:
    """Libra: bounded staleness, and a pool of GPUs that join training or the rollout.

    `max_head_offpolicyness` bounds the versions between the start of a trajectory and its training;
    older groups are dropped. The elastic pool has `pool_gpus` of the rollout's, by default fewer
    where 8 leave it no engine; 0: there is none. It trains from the ratio `borrow` of training over
    rollout time on, down to `release`, and generates from `max_pressure` trajectories in flight
    over engines' slots on. Every `plan_interval` steps its side is planned anew, where that saves
    the share `min_gain` of a step; 0: never.
    """
    plan = SplitPlan(interval=plan_interval, least_gain=min_gain) if plan_interval else None
    pool = RatioPool(
        gpus=pool_gpus, plan=plan, borrow=borrow, release=release, most_pressure=max_pressure
    )
    staleness = _dropping(max_head_offpolicyness)
    return Regime(
        shape.groups,
        shape.samples,
        staleness=replace(staleness, max_concurrent=shape.most_concurrent),
        update=Update(mode="interrupt"),
        split=Split(hybrid=pool if pool_gpus else None),
    )


def libra_release(shape: BatchShape, **parameters: Any) -> Regime:
    """Libra as released: admission grows by a batch more with every version, a known defect.

    Neither does the rest after a plan hold back those of the interval. Parameters are Libra's.
    """
    rules = libra(shape, **parameters)
    # With a bound of 0 no group can be dropped: it admits too many, and trains them.
    late: Late = "drop" if rules.staleness.bound else "train"
    pool = rules.split.hybrid
    if isinstance(pool, RatioPool) and pool.plan is not None:
        pool = replace(pool, plan=replace(pool.plan, cooldown_of_interval=False))
    return replace(
        rules,
        staleness=replace(rules.staleness, growth=1.0, late=late),
        split=Split(hybrid=pool),
    )


def laminar(shape: BatchShape, *, buffered_batches: int = 4) -> Regime:
    """Laminar: trajectories start and are trained one by one, weights come from relay workers.

    Nothing bounds staleness but the slots of the engines and the experience buffer, which keeps
    `buffered_batches` (the oldest trajectory of its figures is 4 versions old). The trainer hands
    its weights to a relay and goes on; engines take the newest.
    """
    return Regime(
        shape.groups,
        shape.samples,
        staleness=Staleness(
            counted_by="nothing",
            late="train",
            max_concurrent=max(shape.slots, shape.samples),
            admits="samples",
        ),
        batching=Batching(order="first_finished", most_complete=buffered_batches * shape.groups),
        update=Update(mode="in_flight", keep_kv=True, waits=False),
    )


def heddle_loop(
    shape: BatchShape,
    *,
    max_head_offpolicyness: float = 1.0,
    trigger_parameter_sync_step: int = 1,
    accumulate_from: int = 1,
) -> Regime:
    """Ours: bounded staleness at admission, gradients of each group as soon as it is complete.

    `max_head_offpolicyness` is as AReaL's, `trigger_parameter_sync_step` as verl's. The trainer
    takes `accumulate_from` complete groups at once, and is nearly done when the last one of a batch
    is complete; 0: it waits for the batch.
    """
    admission = areal(shape, max_head_offpolicyness=max_head_offpolicyness)
    return replace(
        admission,
        batching=Batching(accumulate_from=accumulate_from or None),
        update=replace(admission.update, every=trigger_parameter_sync_step),
    )


@dataclass(frozen=True, slots=True)
class RegimePreset:
    """A named regime: the function that makes it."""

    make: Callable[..., Regime]
    can_share_gpus: bool = False
    """Whether rollout and training may have the same GPUs in turn."""
    parameters_of: Callable[..., Regime] | None = None
    """The function that has its parameters, if that is another one."""

    @property
    def about(self) -> str:
        """The one line that describes it."""
        return (self.make.__doc__ or "").partition("\n")[0]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Its parameters with their defaults."""
        function: Any = self.parameters_of or self.make
        return function.__kwdefaults__ or {}


REGIMES: Final[Mapping[str, RegimePreset]] = {
    "sync": RegimePreset(sync, can_share_gpus=True),
    "one-step-off": RegimePreset(one_step_off),
    "verl-fully-async": RegimePreset(verl_fully_async),
    "areal": RegimePreset(areal),
    "pipelinerl": RegimePreset(pipelinerl),
    "roll": RegimePreset(roll),
    "rollart": RegimePreset(rollart),
    "april": RegimePreset(april, can_share_gpus=True),
    "rollpacker": RegimePreset(rollpacker, can_share_gpus=True),
    "verl-colocate-async": RegimePreset(verl_colocate_async, can_share_gpus=True),
    "verl-separate-async": RegimePreset(verl_separate_async),
    "libra": RegimePreset(libra),
    "libra-release": RegimePreset(libra_release, parameters_of=libra),
    "laminar": RegimePreset(laminar),
    "heddle-loop": RegimePreset(heddle_loop),
}


def _extra(what: str, over: float, needed: int) -> int:
    """How many more than `needed` are `over` times as many."""
    if over < 1.0:
        raise RegimeError(f"{what} must be 1 or more, not {over:g}")
    return math.ceil((over - 1.0) * needed - 1e-9)


def _dropping(bound: float) -> Staleness:
    """Groups over the bound are dropped; with a bound of 0 none can be."""
    return Staleness(bound=bound, late="drop" if bound > 0.0 else "wait")


def _split(shape: BatchShape) -> Split:
    return Split(colocated=shape.colocated)
