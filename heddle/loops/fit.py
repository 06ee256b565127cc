"""What `[loop]` leaves open, chosen so that trace and regimes can do with it."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from heddle.loops.config import LoopConfig
from heddle.loops.data import DataSet, least_batches, within_twice
from heddle.loops.layout import ever_fits, fits
from heddle.loops.setup import regime_of
from heddle.setup import Workspace
from heddle.workload import CapacityError
from heddle_core.loop.regime import Regime, RegimeError, SharedGpusError
from heddle_sim.profile_parts import ProfileError
from heddle_trace.table import Scripts


def with_trainer(config: LoopConfig, workspace: Workspace) -> tuple[LoopConfig, tuple[str, ...]]:
    """The loop with the fewest GPUs of its trainer, from a quarter on, that hold a step; and that
    number in words, where it is another.

    `config.run.cluster.gpus` are all GPUs. A number that is given stays, and so does a quarter
    where none fits.

    Raises:
        ValueError: one of the packages' errors for a bad trace, model or GPU class.
    """
    cluster = config.run.cluster
    if config.run.loop.train_gpus is not None or config.colocated or cluster.roles:
        return config, ()
    sizes = np.unique(_held(config, workspace).largest_context())
    longest, drops = int(sizes[-1]), cluster.over_capacity == "drop"
    if not (drops or ever_fits(config, longest)):
        return config, ()
    each = cluster.tp * cluster.attention_dp
    gpus = cluster.gpus - config.reward_gpus
    if config.train_gpu:
        whole = list(range(config.train_gpus, 8 * gpus))
    else:
        whole = [n for n in range(config.train_gpus, gpus) if (gpus - n) % each == 0]
    found = next((n for n in whole if fits(config, n, longest)), config.train_gpus)
    if drops and whole:
        found = max(whole, key=partial(_most_tokens, config, sizes))
    if found == config.train_gpus:
        return config, ()
    return replace(config, train_gpus=found), (f"loop.train_gpus = {found}, to hold a step",)


def _most_tokens(config: LoopConfig, sizes: NDArray[np.int64], gpus: int) -> int:
    """The largest of some sizes of a sample that a trainer holds; 0: none."""
    count = bisect_left(sizes, True, key=lambda size: not fits(config, gpus, int(size)))
    return int(sizes[count - 1]) if count else 0


def without_dropped(
    configs: Sequence[LoopConfig], workspace: Workspace, fitting_only: bool
) -> tuple[list[LoopConfig], tuple[str, ...]]:
    """The loops without trajectories that engines or trainers do not hold, where these are dropped;
    and their number in words.

    All have the same data: what the least trainer holds; with `fitting_only`, which leaves settings
    out, what the largest does.
    """
    if configs[0].run.cluster.over_capacity != "drop":
        return list(configs), ()
    sizes = np.unique(_held(configs[0], workspace).largest_context())
    most = {n: _most_tokens(each, sizes, n) for each in configs for n in [each.trainer_gpus]}
    kept = max(most.values()) if fitting_only else min(most.values())
    made = [replace(each, most_tokens=kept or None) for each in configs]
    of = len(workspace.completed(made[0].run)[0])
    left, why = of - len(_held(made[0], workspace)), "longer than engine or trainer holds"
    return made, (f"{left:,} of {of:,} trajectories left out, {why}",) if left else ()


def fitted(
    configs: Sequence[LoopConfig], workspace: Workspace
) -> tuple[list[LoopConfig], tuple[str, ...]]:
    """The loops, which differ in their GPUs, with batches that the trace has for all regimes.

    What `[loop]` gives stays. Prompts of which a recorded trace has too few samples are left out
    where the others have more to train; of those that lack the samples that are given, half of all
    at most. The second are the values that are not the usual ones, in words.

    Raises:
        ValueError: one of the packages' errors for a bad trace or regime.
    """
    first = configs[0]
    given = first.run.loop
    scripts = _held(first, workspace)
    sizes = [len(samples) for samples in DataSet.kept(workspace, scripts).groups.values()]

    def rules(groups: int, samples: int) -> Iterator[Regime]:
        for config in configs:
            for name in config.regimes:
                with suppress(SharedGpusError):
                    yield regime_of(replace(config, groups=groups, samples=samples), name)

    if given.samples:
        samples = given.samples
        least = samples if 2 * sum(size >= samples for size in sizes) >= len(sizes) else 1
    else:
        samples, least = _samples(min(first.samples, max(sizes)), sizes, rules)
    taken = [size for size in sizes if size >= least]
    prompts = len(taken)
    groups, batches = _batches(first, prompts, lambda groups: list(rules(groups, samples)))
    notes = []
    if samples != first.samples:
        beside = f" and regimes start {least}" if least > samples else ""
        notes.append(f"loop.samples = {samples}, as prompts have {min(taken)}{beside}")
    if prompts < len(sizes):
        notes.append(
            f"{len(sizes) - prompts:,} of {len(sizes):,} prompts left out, with fewer than {least} "
            "samples"
        )
    if groups != first.groups:
        notes.append(f"loop.groups = {groups}, as there are {prompts:,} prompts")
    if batches != first.batches:
        why = "the warm-up of these regimes" + (" and whole epochs" if first.packing() else "")
        notes.append(f"loop.batches = {batches}, for {why}")
    made = [
        replace(each, samples=samples, groups=groups, batches=batches, least_samples=least)
        for each in configs
    ]
    return made, tuple(notes)


def _held(config: LoopConfig, workspace: Workspace) -> Scripts:
    """The trajectories, without those that engines cannot hold where these are dropped."""
    if config.run.cluster.over_capacity == "drop":
        with suppress(CapacityError, ProfileError):
            return workspace.workload(config.run, config.most_tokens).scripts
    return workspace.completed(config.run)[0]


def _samples(
    most: int, sizes: Sequence[int], rules: Callable[[int, int], Iterator[Regime]]
) -> tuple[int, int]:
    """Trained samples of a prompt, and the least of a prompt of the trace that takes part.

    Up to `most`, the number that trains most trajectories in an epoch of the prompts that have what
    every regime starts.
    """

    def trained(samples: int) -> tuple[int, int, int]:
        try:
            least = max((rule.started_samples for rule in rules(1, samples)), default=samples)
        except RegimeError:  # Of one sample where rewards must differ, for example.
            return 0, samples, samples
        return samples * sum(size >= least for size in sizes), samples, least

    found, samples, least = max(map(trained, range(1, most + 1)))
    return (samples, least) if found else (most, 1)


def _batches(
    config: LoopConfig, prompts: int, rules: Callable[[int], Sequence[Regime]]
) -> tuple[int, int]:
    """Groups of a batch, and batches."""
    given, plan = config.run.loop, config.packing()
    usual = [given.groups] if given.groups else range(min(config.groups, prompts), 0, -1)
    if not given.groups and plan is not None and plan.packed:
        usual = [groups for groups in usual if prompts % groups == 0]
    for groups in usual:
        # As many are measured as are not: those right after a long warm-up are shorter.
        enough = max(
            (max(least_batches(r), 2 * r.warm_up_batches) for r in rules(groups)), default=0
        )
        if plan is not None and prompts % groups == 0:
            epoch = prompts // groups
            enough = within_twice(config.batches, enough, epoch, rules(groups), enough)
        batches = given.batches or max(config.batches, enough)
        if config.repeat is not False or groups * batches <= prompts:
            return groups, batches
    least = max(map(least_batches, rules(groups)), default=0)
    batches = given.batches or max(least, min(config.batches, prompts // groups))
    return groups, batches
