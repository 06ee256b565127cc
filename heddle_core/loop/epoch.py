"""Which prompts of an epoch share a batch, from what their samples took in earlier rollouts.

Batches of prompts of like length wait less for their longest trajectories. Every prompt still runs
once an epoch; only its neighbours change. RollPacker's tail batching (arXiv 2509.21009) is related.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Final

import numpy as np

from heddle_core.ids import GroupId

KEPT: Final = 0.5
"""Weight of an epoch's samples over those of the next epoch; assumed."""


def recent_lengths(epochs: Sequence[Mapping[GroupId, Sequence[int]]]) -> dict[GroupId, float]:
    """Mean output tokens of a sample by prompt, from samples by epoch, the newest last."""
    sums: dict[GroupId, tuple[float, float]] = {}
    for age, samples in enumerate(reversed(epochs)):
        weight = KEPT**age
        for name, tokens in samples.items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * sum(tokens), weights + weight * len(tokens)
    return {name: total / weights for name, (total, weights) in sums.items() if weights}


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
        """
        rng = np.random.default_rng(seed)
        shuffled = [prompts[int(at)] for at in rng.permutation(len(prompts))]
        mean = fmean(lengths.values()) if lengths else 0.0
        by_length = sorted(shuffled, key=lambda each: -lengths.get(each, mean))
        longest = by_length[: round(self.packed * len(prompts) / batch) * batch]
        apart = set(longest)
        order = longest + [each for each in shuffled if each not in apart]
        whole = len(order) // batch * batch
        batches = [order[first : first + batch] for first in range(0, whole, batch)]
        mixed = [batches[int(at)] for at in rng.permutation(len(batches))]
        return [*chain.from_iterable(mixed), *order[whole:]]
