"""Which prompts of an epoch share a batch, from what their samples took in earlier rollouts.

Batches of prompts of like length wait less for their longest trajectories. Every prompt still runs
once an epoch; only its neighbours change. RollPacker's tail batching (arXiv 2509.21009) is related.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from statistics import fmean
from typing import Final

import numpy as np

from heddle_core.ids import GroupId
from heddle_core.loop.groups import Prompt

EPOCH: Final = "#"
"""Between a prompt's name and its epoch, from the second epoch on."""
OLDER: Final = 0.5
"""Weight of an epoch over that of the epoch after it; assumed."""
LEAST_KNOWN: Final = 0.5
"""Share of a data set's prompts with lengths below which they may be another data set's."""

Totals = Mapping[GroupId, Sequence[int]]
"""Output tokens of the samples of an epoch, by prompt."""


def lengths_by_age(epochs: Sequence[Totals]) -> dict[GroupId, float]:
    """Mean output tokens of a sample by prompt, from epochs, the newest last, which weighs most.

    While a model learns all lengths drift, and an epoch may lack prompts. So lengths count relative
    to what its prompts took before, in the mean; the result has the scale of the newest.
    """
    sums: dict[GroupId, list[float]] = {}
    scale = 0.0
    for epoch in epochs:
        means = {name: fmean(tokens) for name, tokens in epoch.items() if tokens}
        if not means:
            continue
        before = [sums[name][0] / sums[name][1] if name in sums else 1.0 for name in means]
        scale = max(fmean(means.values()), 1.0) / max(fmean(before), 1e-9)
        for found in sums.values():
            found[:] = [OLDER * each for each in found]
        for name, mean in means.items():
            found = sums.setdefault(name, [0.0, 0.0])
            found[:] = found[0] + mean / scale, found[1] + 1.0
    return {name: scale * length / weight for name, (length, weight) in sums.items()}


def epoch_of(group: GroupId) -> tuple[GroupId, int]:
    """The prompt of a group of an `EpochOrder`, and its epoch."""
    name, mark, epoch = group.rpartition(EPOCH)
    return (GroupId(name), int(epoch)) if mark and epoch.isdecimal() else (group, 0)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Order of the prompts of an epoch."""

    packed: float
    """Share of the prompts, the longest, that are in batches of like length."""

    @staticmethod
    def of(text: str) -> "EpochPlan":
        """Read ``random``, ``sorted`` or ``tail:SHARE``.

        Raises:
            ValueError: it is none of these.
        """
        rule, _, share = text.partition(":")
        if text in ("random", "sorted"):
            return EpochPlan(float(text == "sorted"))
        try:
            packed = float(share)
        except ValueError:
            packed = 0.0
        if rule != "tail" or not 0.0 < packed < 1.0:
            raise ValueError(f"{text!r} is no epoch plan: take random, sorted, or tail:.25")
        return EpochPlan(packed)

    def order(
        self,
        prompts: Sequence[GroupId],
        lengths: Mapping[GroupId, float],
        *,
        batch: int,
        seed: tuple[int, int],
    ) -> list[GroupId]:
        """The prompts in batches of so many, each prompt once; batches follow by chance.

        `lengths` are mean output tokens of a sample; a prompt without takes the mean of all. What
        does not fill a batch comes last. `seed` is that of the loop, and the epoch.

        Raises:
            ValueError: a prompt is there twice.
        """
        twice = [name for name, times in Counter(prompts).items() if times > 1]
        if twice:
            raise ValueError(
                f"prompt {twice[0]!r} is {prompts.count(twice[0])} times in an epoch: give each "
                "prompt a name of its own"
            )
        rng = np.random.default_rng(seed)
        shuffled = [prompts[int(at)] for at in rng.permutation(len(prompts))]
        mean = fmean(lengths.values()) if lengths else 0.0
        by_length = sorted(shuffled, key=lambda each: -lengths.get(each, mean))
        # A share that is less than a batch is one: `tail` without it would be `random`.
        packed = max(round(self.packed * len(prompts) / batch), self.packed > 0.0)
        longest = by_length[: packed * batch]
        apart = set(longest)
        order = longest + [each for each in shuffled if each not in apart]
        whole = len(order) // batch * batch
        batches = [order[first : first + batch] for first in range(0, whole, batch)]
        mixed = [batches[int(at)] for at in rng.permutation(len(batches))]
        return [*chain.from_iterable(mixed), *order[whole:]]


class EpochOrder:
    """The prompts of an epoch, and again without end, in batches by what their samples took."""

    def __init__(
        self,
        plan: EpochPlan,
        prompts: Sequence[Prompt],
        *,
        batch: int,
        seed: int,
        past: Sequence[Totals] = (),
        repeats_after: int | None = None,
        first: int = 0,
    ) -> None:
        """`past` are epochs before the first, the newest last; without any it is in random order.
        `first` is the number of the epoch to begin with, of those before samples may have `ended`.

        In a replay of recorded samples these are the same again after so many epochs: such an epoch
        is not learned from.
        """
        self._plan, self._prompts = plan, {prompt.group: prompt for prompt in prompts}
        self._batch, self._seed = batch, seed
        self._past, self._repeats_after = past, repeats_after
        self._first = first
        self._seen: dict[int, dict[GroupId, list[int]]] = {}

    def ended(self, group: GroupId, tokens: int) -> None:
        """A sample of a group has ended with so many output tokens."""
        name, epoch = epoch_of(group)
        self._seen.setdefault(epoch, {}).setdefault(name, []).append(tokens)

    def lengths(self, epoch: int) -> dict[GroupId, float]:
        """What is known of prompts before an epoch."""
        cycle = self._repeats_after
        others = [
            self._seen[each]
            for each in sorted(self._seen)
            if each < epoch and (cycle is None or (epoch - each) % cycle)
        ]
        return lengths_by_age([*self._past, *others])

    def __iter__(self) -> Iterator[Prompt]:
        names = list(self._prompts)
        for epoch in count(self._first):
            suffix = f"{EPOCH}{epoch}" if epoch else ""
            seed = (self._seed, epoch)
            for name in self._plan.order(names, self.lengths(epoch), batch=self._batch, seed=seed):
                yield replace(self._prompts[name], group=GroupId(name + suffix))
