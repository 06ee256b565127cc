"""Estimated cost of a step, for policies. Never the ground truth: fitted separately, coarser.

The estimate for one engine shape is the affine form that decode steps were found to follow,
``iteration = t0 + t1 * batch + t2 * (tokens of context in the batch)``, plus a prefill rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from heddle_core.ids import EngineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Estimated cost of one engine of one shape; seconds, tokens."""

    t0_s: float
    """Seconds of an iteration whatever its batch: weights, launches."""
    t1_s: float
    """Seconds that each sequence in the batch adds."""
    t2_s: float
    """Seconds that each token of context in the batch adds."""
    prefill_s: float
    """Seconds that each prompt token to prefill adds."""
    kv_capacity_tokens: int
    load_s: float | None = None
    """Seconds that each token of a context takes to load from a store of KV that all engines share;
    None without one."""

    @property
    def restore_s(self) -> float:
        """Seconds for each token of a context that is not on the engine yet."""
        return self.prefill_s if self.load_s is None else min(self.load_s, self.prefill_s)

    def iteration_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one decode iteration of `batch` sequences holding `context_tokens` in all."""
        return self.t0_s + self.t1_s * batch + self.t2_s * context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Estimate for every engine shape the model fits on, and for moving KV between engines."""

    by_shape: Mapping[EngineShape, StepCost]
    transfer_fixed_s: float
    transfer_s_per_token: float

    def transfer_s(self, kv_tokens: int) -> float:
        """Seconds to move a KV prefix of `kv_tokens` between two engines."""
        return self.transfer_fixed_s + self.transfer_s_per_token * kv_tokens
