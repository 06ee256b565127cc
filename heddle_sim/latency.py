"""The simulated ground truth: the time of one iteration of one engine.

An iteration that decodes `b` sequences holding `c` tokens of context together, and prefills chunks
of `p` tokens in total with `q` (query, key) pairs, takes

    base_s[b] + per_context_s[b] * c + prefill_s(p, q) + host_per_prefill_s * (prefilling sequences)

With a prefill, base_s[0] stands in the place of a smaller base_s[b]: a prompt makes the step read
all experts of a model, of which a small decode batch reads few. The time is affine in `c` for a
fixed `b`, which lets an engine leap over runs of decode iterations.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from heddle_sim.drafts import Drafting


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decode iterations of batches of 1, 2, ... sequences."""

    base_s: Sequence[float]
    per_context_s: Sequence[float]
    drafts: int = 0
    tokens: float = 1.0
    """That a sequence advances in one, in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTable:
    """Iteration times of one model on one GPU class at one TP degree, host time included."""

    model: str
    gpu: str
    tp: int
    dp: int = 1
    """Attention data-parallel ranks; the other numbers are of all of them together."""
    base_s: Sequence[float]
    """Indexed by the number of decoding sequences, 0 to the largest batch of the table; 0: the
    least of an iteration that prefills."""
    per_context_s: Sequence[float]
    """Seconds per token of context, same index."""
    prefill_tokens: Sequence[float]
    """Knots of the piecewise linear prefill cost, ascending, the first 0."""
    prefill_knots_s: Sequence[float]
    """Seconds at each knot; beyond the last, the last slope goes on."""
    prefill_pair_s: float
    """Seconds per (query token, earlier context token) pair of attention in a prefill chunk."""
    host_per_prefill_s: float
    """Host seconds for each sequence in prefill, on top of the step."""
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    """Over all GPUs of the engine."""
    drafting: Drafting | None = None
    """None: an engine without speculative decoding."""

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    def token_s(self, max_running: int) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of a token of each sequence in batches of 1 to `max_running`: without context,
        and for each token of context. With the drafts of each batch size."""
        sizes = slice(1, max_running + 1)
        base_s, per_context_s, drafting = (
            self.base_s[sizes],
            self.per_context_s[sizes],
            self.drafting,
        )
        if drafting is None:
            return base_s, per_context_s
        drafts = drafting.drafts[sizes]
        tokens = [drafting.mean_tokens(k) for k in drafts]
        own_s = [drafting.base_s[k][batch] for batch, k in enumerate(drafts, 1)]
        return (
            [seconds / n for seconds, n in zip(own_s, tokens, strict=True)],
            [seconds / n for seconds, n in zip(per_context_s, tokens, strict=True)],
        )

    def decoding(self, max_running: int) -> "list[Decoding]":
        """Decode iterations of 1 to `max_running` sequences, for each number of drafts there is."""
        sizes = slice(1, max_running + 1)
        per_context_s, drafting = self.per_context_s[sizes], self.drafting
        if drafting is None:
            return [Decoding(self.base_s[sizes], per_context_s)]
        return [
            Decoding(drafting.base_s[k][sizes], per_context_s, k, drafting.mean_tokens(k))
            for k in sorted(set(drafting.drafts[sizes]))
        ]

    def any_prefill_s(self, batch: int) -> float:
        """Seconds that a prefill of any size adds beside `batch` decoding sequences."""
        added_s = self.base_s[0] - self.base_s[batch]
        return added_s if added_s > 0.0 else 0.0

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """Seconds that prefilling adds to an iteration.

        `tokens` is the sum over chunks, `pairs` the sum of ``n * (start + n / 2)`` over chunks of
        `n` tokens that begin at context position `start`.
        """
        if tokens <= 0:
            return 0.0
        x, y = self.prefill_tokens, self.prefill_knots_s
        i = min(max(bisect_right(x, tokens) - 1, 0), len(x) - 2)
        slope = (y[i + 1] - y[i]) / (x[i + 1] - x[i])
        return y[i] + slope * (tokens - x[i]) + self.prefill_pair_s * pairs
