"""Estimated cost of a step, for policies. Never the ground truth: fitted separately, coarser.

The estimate for one engine shape is the affine form that decode steps were found to follow,
``iteration = t0 + t1 * batch + t2 * (tokens of context in the batch)``, plus a prefill rate. Steps
of a model with experts follow it less well, so they have a second form, where the batch is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from heddle_core.ids import EngineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FillingCost:
    """Decode time of a model with experts: each sequence makes an iteration read more of them,
    until `knee` sequences read all.

    ``iteration = t0 + fill * min(batch, knee) + t1 * batch + t2 * (tokens of context)``
    """

    t0_s: float
    fill_s: float
    """Seconds that each of the first `knee` sequences adds, beside `t1_s`."""
    knee: int
    t1_s: float
    t2_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Estimated cost of one engine of one shape; seconds, tokens.

    The plane `t0_s`, `t1_s`, `t2_s` is the least wrong over all batches. Sums of work over a time
    in which the batch varies need it.
    """

    t0_s: float
    """Seconds of an iteration whatever its batch: weights, launches."""
    t1_s: float
    """Seconds that each sequence in the batch adds."""
    t2_s: float
    """Seconds that each token of context in the batch adds."""
    prefill_s: float
    """Seconds that each prompt token to prefill adds."""
    per_prefill_s: float = 0.0
    """Seconds of the host that each prefill adds, however few its tokens."""
    kv_capacity_tokens: int
    """Tokens of KV that the engine holds at once."""
    load_s: float | None = None
    """Seconds that each token of a context takes to load from a store of KV that all engines share;
    None without one."""
    filling: FillingCost | None = None
    """Of a model with experts: better than the plane where the batch is known."""

    @property
    def restore_s(self) -> float:
        """Seconds for each token of a context that is not on the engine yet."""
        return self.prefill_s if self.load_s is None else min(self.load_s, self.prefill_s)

    def iteration_s(self, batch: float, context_tokens: float) -> float:
        """Seconds of one decode iteration of `batch` sequences holding `context_tokens` in all."""
        f = self.filling
        if f is None:
            return self.t0_s + self.t1_s * batch + self.t2_s * context_tokens
        filling = batch if batch < f.knee else f.knee
        return f.t0_s + f.fill_s * filling + f.t1_s * batch + f.t2_s * context_tokens

    @property
    def below_knee(self) -> "StepCost":
        """The plane of batches up to the knee; with that beyond it, the lesser is `iteration_s`."""
        f = self.filling
        if f is None:
            return self
        return replace(self, t0_s=f.t0_s, t1_s=f.t1_s + f.fill_s, t2_s=f.t2_s, filling=None)

    @property
    def beyond_knee(self) -> "StepCost":
        """The plane of batches from the knee on."""
        f = self.filling
        if f is None:
            return self
        return replace(
            self, t0_s=f.t0_s + f.fill_s * f.knee, t1_s=f.t1_s, t2_s=f.t2_s, filling=None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Estimate for every engine shape the model fits on, and for moving KV between engines."""

    by_shape: Mapping[EngineShape, StepCost]
    """Costs of an engine, by its shape."""
    transfer_fixed_s: float
    """Seconds of a move of KV, however much it is."""
    transfer_s_per_token: float
    """Seconds that each token of KV adds to a move."""

    def transfer_s(self, kv_tokens: int) -> float:
        """Seconds to move a KV prefix of `kv_tokens` between two engines."""
        return self.transfer_fixed_s + self.transfer_s_per_token * kv_tokens
