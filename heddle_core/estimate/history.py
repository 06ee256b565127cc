"""Statistics of earlier rollouts of a workload: distributions, nothing about one trajectory."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from heddle_core.ids import GroupId

if TYPE_CHECKING:  # every policy imports this module, and few compute lengths
    import numpy as np
    from numpy.typing import NDArray

_HEDGING = 0.7
"""Predictions whose log spread is below this share of history's count as hedged means: their order
is used, their sizes are not. An exact predictor spreads as much as history did. Predictions from an
uninformative prompt do not spread. 0.7 lies between the values measured for the two."""

_ERRING = 1.1
"""Predictions whose log spread is above this multiple of history's have errors beside the lengths:
a log-normal error of 0.5 makes it 1.15 to 1.25 on the synthetic workloads."""


_SAMPLES = 200
"""Lengths of each prompt that stand for the distribution of its next sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Typical sizes of a task: arithmetic means, in tokens."""

    total_tokens: float
    """Output of a trajectory."""
    step_tokens: float
    """Output of a step."""
    payload_tokens: float
    """Tokens that a tool's result appends."""
    prompt_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Figures of earlier rollouts that planning needs; per trajectory, tokens and seconds."""

    output_quantiles: tuple[float, ...]
    """Total output tokens at evenly spaced probabilities ``(i + 0.5) / len``, ascending."""
    appended_per_output: float
    """Tokens that tools append to the context, per output token."""
    tool_s_per_output: float
    """Seconds in tools, per output token."""
    step_output_tokens: float
    """Mean output tokens of a step."""
    longest_output_tokens: float = 0.0
    """Output of the longest trajectory; 0 where it is not known."""
    trajectories: int = 0
    """Of which that is the longest; 0 where it is not known."""
    tool_s_beyond: tuple[float, ...] = ()
    """Seconds in tools, per output token, of trajectories that are as long as each of
    `output_quantiles` or longer; empty: as of all."""
    appended_beyond: tuple[float, ...] = ()
    """Tokens that tools append to the context of the same, per output token."""
    group_totals: Mapping[GroupId, Sequence[int]] = field(default_factory=dict)
    """Total output tokens of earlier samples, by prompt; empty where prompts do not recur."""
    tasks: Mapping[str, Levels] = field(default_factory=dict)
    """Levels of each task; empty where they are not known by task."""

    def predictions_vary(self, predicted: Sequence[float], *, share: float = _HEDGING) -> bool:
        """Whether predictions spread at least the `share` of what outputs did, in their logs.

        Otherwise they are one hedged mean for all.
        """
        return len(predicted) < 2 or _spread(predicted) >= share * _spread(self.output_quantiles)

    def lengths_known(self, predicted: Sequence[float]) -> bool:
        """Whether predictions spread as outputs did, no less and no more, in their logs."""
        if not self.predictions_vary(predicted):
            return False
        return len(predicted) < 2 or _spread(predicted) <= _ERRING * _spread(self.output_quantiles)

    def mean_output_tokens(self) -> float:
        """Mean output of a trajectory."""
        return sum(self.output_quantiles) / len(self.output_quantiles)

    def rates_beyond(
        self, lengths: "NDArray[np.float64]"
    ) -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
        """What tools take in seconds, and append in tokens, per output token of trajectories that
        are longer than each of some lengths."""
        import numpy as np

        def rates(beyond: Sequence[float], mean: float) -> "NDArray[np.float64]":
            known = self.output_quantiles
            return np.interp(lengths, known, beyond or (mean,) * len(known), left=mean)

        return (
            rates(self.tool_s_beyond, self.tool_s_per_output),
            rates(self.appended_beyond, self.appended_per_output),
        )

    def of_prompts(self, prompts: Collection[GroupId]) -> "History":
        """The same with the lengths of these prompts alone, where it has all of them.

        Scores of lengths differ by prompt and by sample, as `LengthPosterior` has them. The mean of
        a prompt is nearer to that of all than its few samples are: prompts that stand together
        because all were short have longer samples to come.
        """
        if not prompts or not all(each in self.group_totals for each in prompts):
            return self
        import numpy as np

        from heddle_core.estimate.posterior import LengthScores, between_share, normal_scores

        by_length = LengthScores(self.output_quantiles)
        scores = {
            name: by_length.scores(np.maximum(np.asarray(own, np.float64), 1.0))
            for name, own in self.group_totals.items()
        }
        share = between_share(list(scores.values()))
        counts = np.array([len(scores[each]) for each in prompts])
        sums = np.array([scores[each].sum() for each in prompts])
        known = share / (share * counts + 1.0 - share)
        spread = np.sqrt((1.0 - share) * (1.0 + known))
        unseen = normal_scores(_SAMPLES)
        outputs = by_length.tokens((known * sums)[:, None] + spread[:, None] * unseen).ravel()
        outputs = np.minimum(outputs, self.longest_output_tokens or np.inf)
        at = (np.arange(len(self.output_quantiles)) + 0.5) / len(self.output_quantiles)
        quantiles = np.quantile(outputs, at)
        tool_s, appended = self.rates_beyond(quantiles)
        return replace(
            self,
            output_quantiles=tuple(quantiles.tolist()),
            tool_s_beyond=tuple(tool_s.tolist()),
            appended_beyond=tuple(appended.tolist()),
            longest_output_tokens=float(outputs.max()),
            trajectories=len(outputs),
        )

    def lengths(self, predicted: Sequence[float]) -> "NDArray[np.float64]":
        """Estimated output tokens, one per prediction and in its order.

        A predictor that hardly distinguishes trajectories returns means, and a plan from means has
        no long trajectory. Where predictions spread less than history did, only their ranks are
        kept: the r-th longest of n gets history's r-th of n quantile.
        """
        import numpy as np

        values = np.maximum(np.asarray(predicted, dtype=np.float64), 1.0)
        if self.predictions_vary(predicted):
            return values
        quantiles = np.maximum(np.asarray(self.output_quantiles), 1.0)
        order = np.argsort(values, kind="stable")
        at = (np.arange(len(values)) + 0.5) / len(values)
        known = (np.arange(len(quantiles)) + 0.5) / len(quantiles)
        lengths = np.empty_like(values)
        lengths[order] = np.interp(at, known, quantiles)
        return lengths


def _spread(lengths: Sequence[float]) -> float:
    """Standard deviation of the logarithms of `lengths`, each taken as a token at least."""
    import numpy as np

    return float(np.log(np.maximum(np.asarray(lengths, dtype=np.float64), 1.0)).std())
