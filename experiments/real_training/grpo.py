"""GRPO: advantages within groups, and the clipped policy loss.

Shao and others, "DeepSeekMath" (arXiv 2402.03300), without the KL term; the loss is the mean over
all tokens of an optimizer step, as in DAPO (arXiv 2503.14476).
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

EPSILON = 1e-6
"""Beside a standard deviation, so that equal rewards give advantage 0."""


def group_advantages(rewards: Sequence[float], groups: Sequence[str]) -> list[float]:
    """Return each reward minus its group's mean, over the group's standard deviation.

    The deviation is that of a sample (n - 1). A group of one has advantage 0.
    """
    by_group: dict[str, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        by_group.setdefault(group, []).append(reward)
    mean = {group: statistics.fmean(each) for group, each in by_group.items()}
    deviation = {
        group: statistics.stdev(each) if len(each) > 1 else 0.0 for group, each in by_group.items()
    }
    return [
        (reward - mean[group]) / (deviation[group] + EPSILON)
        for reward, group in zip(rewards, groups, strict=True)
    ]


class PolicyLoss(NamedTuple):
    """Sums over the tokens of a micro-batch, as tensors; the first has a gradient."""

    loss: Any
    clipped: Any
    """Tokens at which the clip holds the gradient back."""
    gap: Any
    """Of new and old log-probs, without sign."""


def policy_loss(new: Any, old: Any, advantages: Any, mask: Any, clip: float) -> PolicyLoss:
    """Sum the clipped loss over the tokens of `mask`.

    `new` and `old` are log-probs by trajectory and token; `advantages` has one for each trajectory.
    """
    ratio = (new - old).exp()
    gain = ratio * advantages[:, None]
    limited = ratio.clamp(1.0 - clip, 1.0 + clip) * advantages[:, None]
    least = gain.minimum(limited)
    return PolicyLoss(
        loss=-(least * mask).sum(),
        clipped=((limited < gain) * mask).sum().detach(),
        gap=((new - old).abs() * mask).sum().detach(),
    )
