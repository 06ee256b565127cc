"""What trained models and the rows of their inputs have in common."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heddle_core.estimate.history import Levels

Floats: TypeAlias = NDArray[np.float64]

RowQuantile: TypeAlias = Callable[[Sequence[float]], float]
"""From one row to one of the quantiles of `TreesModel.quantiles`, to the last digit."""

LOG_BOUND: Final = 12.0
"""Bound on the logarithm of the correction: a row unlike any in training must not overflow."""

OWN: Final = (
    "steps",
    "made",
    "made_in_step",
    "in_tool",
    "prompt",
    "context",
    "first_output",
    "last_output",
    "mean_output",
    "longest_output",
    "first_payload",
    "last_payload",
    "mean_payload",
    "calls",
    "last_failed",
    "failed_in_row",
    "failed_share",
    "tools_seen",
    "last_tool_s",
    "mean_tool_s",
)
SIBLINGS: Final = (
    "ended",
    "ended_mean_total",
    "ended_longest_total",
    "ended_longer_share",
    "ended_mean_rest",
    "ended_mean_steps",
    "running",
    "running_mean_made",
    "running_mean_steps",
    "group_mean_output",
    "group_mean_payload",
    "group_first_payload",
    "group_failed_share",
)
ROLLOUT: Final = ("rollout_ended", "rollout_mean_total", "rollout_mean_output", "survival")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tasks of a model with their levels, and its most frequent tools."""

    tasks: Mapping[str, Levels]
    anywhere: Levels
    """For tasks that were not in the training data."""
    tools: tuple[str, ...]

    def names(self) -> tuple[str, ...]:
        """Columns of a row, in order."""
        named = [f"{kind}:{tool}" for kind in ("last", "calls_of") for tool in self.tools]
        return (*OWN, *SIBLINGS, *ROLLOUT, *named, *(f"task:{task}" for task in self.tasks))
