"""Decoding with drafts: an engine that verifies `K` drafts of each sequence in an iteration.

Where each of `b` sequences has `K` drafts, an iteration verifies ``n = b * (K + 1)`` tokens, reads
each sequence's KV once, and takes

    base_s[K][b] + per_context_s[b] * context,
    base_s[K][b] = base(n) without the host's time of those that are no sequences
                   + K passes of the drafter + rejection sampling of n tokens

`K` follows from the number of sequences that the iteration before computed, as in vLLM: drafts are
proposed at its end. A loaded drafter costs one pass where `K` is 0, since its KV has to follow.

A step advances by one rate while `K` stays, so that its number of iterations has the mean and the
spread that it has where every draft is drawn. It is drawn once a step, from the trajectory and its
context, so that it is the same under every policy. Rates are
whole numbers of 2^-20 tokens, so that leaps and single iterations agree to the token.

Blocks hold the context and the `K` drafts that are verified; those that it has stay with a step.
They are counted over the batch once for each leap; all else is a sum that is kept.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist
from typing import Final
from zlib import crc32

from heddle_sim.leap import NEVER, DecodeBatch
from heddle_sim.request import Request

SHIFT: Final = 20
"""Progress is counted in tokens times two to the power of this."""
ONE: Final = 1 << SHIFT
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How the engines of a latency table draft, and what that takes."""

    drafts: Sequence[int]
    """By the sequences of an iteration, 0 to the largest batch."""
    accepted: Sequence[float]
    """The chance that the first 1, 2, ... drafts are all accepted; as many as there are drafts."""
    base_s: Mapping[int, Sequence[float]]
    """By drafts of each sequence, then by sequences: seconds of an iteration without context."""
    decay: float = 0.0
    """Share of the acceptance that is lost with each version of the weights."""
    by_samples: Sequence[Sequence[float]] = ()
    """Where drafts are from other samples of the prompt: `accepted` with 0, 1, ... of them, the
    last the highest, which is `accepted`. Empty: from elsewhere."""

    def after(self, version: int) -> "Drafting":
        """Return the same with the acceptance at a version of the weights; the first is 0."""
        kept = (1.0 - self.decay) ** version
        return replace(
            self,
            accepted=[kept * chance for chance in self.accepted],
            by_samples=[[kept * chance for chance in each] for each in self.by_samples],
        )

    def with_samples(self, samples: int) -> "Drafting":
        """Return the same with the acceptance after so many other samples."""
        if not self.by_samples:
            return self
        known = min(samples, len(self.by_samples) - 1)
        return replace(self, accepted=self.by_samples[known], by_samples=())

    @property
    def most_drafts(self) -> int:
        return len(self.accepted)

    def mean_tokens(self, drafts: int) -> float:
        """Tokens by which a sequence advances in an iteration, in the mean."""
        return 1.0 + sum(self.accepted[:drafts])

    def variance(self, drafts: int) -> float:
        """Variance of the same, from one iteration to another."""
        mean = self.mean_tokens(drafts) - 1.0
        square = sum((2 * i + 1) * chance for i, chance in enumerate(self.accepted[:drafts]))
        return max(0.0, square - mean * mean)

    def rate(self, drafts: int, output_tokens: int, draw: float) -> int:
        """Tokens an iteration, times `ONE`, of a step of `output_tokens` with a normal `draw`.

        Its iterations have the mean and the deviation of a renewal process; the last one makes
        more tokens than are left. Half an iteration is what rounding up adds.
        """
        mean, variance = self.mean_tokens(drafts), self.variance(drafts)
        surplus = ((variance + mean * mean) / mean - 1.0) / 2.0
        iterations = (output_tokens + surplus) / mean - 0.5
        iterations -= draw * sqrt(output_tokens * variance / mean**3)
        most = drafts + 1.0
        if iterations * most <= output_tokens:
            return round(ONE * most)
        return round(ONE * max(output_tokens / iterations, 1.0))


class Samples:
    """Which samples of each prompt have ended a step, on any engine of a cluster."""

    def __init__(self) -> None:
        self._ended: dict[str, set[str]] = {}

    def end(self, group: str, trajectory: str) -> None:
        """Note that a trajectory has ended a step."""
        self._ended.setdefault(group, set()).add(trajectory)

    def others(self, group: str, trajectory: str) -> int:
        """Trajectories of a group, without this one, that have."""
        ended = self._ended.get(group)
        if ended is None:
            return 0
        return len(ended) - (trajectory in ended)


def draw_of(trajectory: str, end_tokens: int) -> float:
    """The draw of a step: of the normal distribution, and the same in every run."""
    number = crc32(f"{trajectory} {end_tokens}".encode())
    return _NORMAL.inv_cdf((number + 0.5) / 2**32)


class DraftedBatch(DecodeBatch):
    """Sequences that decode together with drafts.

    The context of one, its next token included, is ``offset_tokens + rate * iterations``, in
    tokens times `ONE`.
    """

    __slots__ = (
        "_after",
        "_base_of",
        "_context",
        "_due_blocks",
        "_due_of",
        "_fresh",
        "_most_rate",
        "_rate",
        "_samples",
        "_total_held",
        "drafting",
    )

    def __init__(
        self,
        drafting: Drafting,
        base_s: Mapping[int, Sequence[float]],
        per_context_s: Sequence[float],
        block_size: int,
        samples: Samples,
    ) -> None:
        """`base_s` are those of `drafting` at the engine's speed."""
        super().__init__(base_s[0], per_context_s, block_size)
        self.drafting = drafting
        self.most_blocks = 1 + 2 * drafting.most_drafts
        self._fresh = drafting
        self._samples = samples
        self._after = [drafting.with_samples(n) for n in range(max(1, len(drafting.by_samples)))]
        """What is accepted after 0, 1, ... other samples; the last holds for more."""
        self._base_of = base_s
        self._context = 0
        """Context of all at the next iteration, times `ONE`."""
        self._rate = 0
        """Sum of the rates."""
        self._total_held = 0
        """Blocks of all, after the iterations that are over."""
        self._most_rate = (drafting.most_drafts + 1) * ONE
        self._due_of = (-1, 0)
        self._due_blocks = 0
        """Blocks that are due for `_due_of`: iterations over, and iterations to come."""

    def propose(self, sequences: int) -> None:
        """The iteration before computed so many sequences: draft as many tokens as follow."""
        drafts = self.drafting.drafts[sequences]
        if drafts != self.drafts:
            self._keep_blocks()
            self.drafts = drafts
            self._base_s = self._base_of[drafts]
            self._set_rates()

    def take_weights(self, version: int) -> None:
        """Accept what a drafter does that was made for the weights of version 0."""
        if self._fresh.decay:
            self._keep_blocks()
            self.drafting = self._fresh.after(version)
            self._after = [self.drafting.with_samples(n) for n in range(len(self._after))]
            self._set_rates()

    def _keep_blocks(self) -> None:
        """Note the blocks of each, which they keep when others are needed."""
        for request in self._requests:
            request.held, request.held_at = self.held(request), self.iterations
        self._due_of = (-1, 0)

    def _set_rates(self) -> None:
        """Let every request go on at the rate that it has now."""
        requests = self._requests
        done, self._rate = self.iterations, 0
        for request in requests:
            self._set_rate(request, request.offset_tokens + request.rate * done)
        requests.sort(key=lambda request: (-request.finish, -request.order))
        self._ends[:] = [-request.finish for request in requests]
        self.first_end = -self._ends[-1] if requests else NEVER

    def _set_rate(self, request: Request, context: int) -> None:
        """Let a request with `context` (times `ONE`) go on with the present drafts."""
        drafting = self._after[min(request.samples, len(self._after) - 1)]
        rate = drafting.rate(self.drafts, request.output_tokens, request.draw)
        left = ((request.prompt_tokens + request.output_tokens) << SHIFT) - context
        request.rate = rate
        self._rate += rate
        request.offset_tokens = context - rate * self.iterations
        request.finish = self.iterations - (-left // rate)

    def join(self, request: Request) -> None:
        """Add a request whose prefill is done and whose last token has no KV yet."""
        tokens = request.prompt_tokens + request.made_tokens
        request.samples = self._samples.others(request.group, request.context.trajectory)
        request.joined_tokens, request.held_at = request.made_tokens, self.iterations
        request.draw = draw_of(
            request.context.trajectory, request.prompt_tokens + request.output_tokens
        )
        self._set_rate(request, tokens << SHIFT)
        self._due_of = (-1, 0)
        request.held = -(-(tokens - 1) // self._block_size)
        place = bisect_left(self._ends, -request.finish)
        self._ends.insert(place, -request.finish)
        self._requests.insert(place, request)
        self.first_end = -self._ends[-1]
        self.size += 1
        self._total_held += request.held
        self._context += tokens << SHIFT

    def leave(self, request: Request) -> int:
        """Take a request out, its token count brought up to date; returns its tokens of KV."""
        place = self._requests.index(request, bisect_left(self._ends, -request.finish))
        del self._requests[place], self._ends[place]
        request.held = self.held(request)
        self._total_held -= request.held
        self._due_of = (-1, 0)
        self.first_end = -self._ends[-1] if self._ends else NEVER
        request.made_tokens = self.made(request, self.iterations)
        self._context -= request.offset_tokens + request.rate * self.iterations
        self._rate -= request.rate
        request.finish = -1
        self.size -= 1
        return request.prompt_tokens + request.made_tokens - 1

    def made(self, request: Request, iterations: int) -> int:
        """Tokens that a request has made when so many iterations of the engine are over."""
        context = (request.offset_tokens + request.rate * iterations) >> SHIFT
        return min(context - request.prompt_tokens, request.output_tokens)

    def held(self, request: Request) -> int:
        if request.held_at == self.iterations:
            return request.held
        return max(request.held, self._needs(request, self.iterations - 1))

    def _needs(self, request: Request, iterations: int) -> int:
        """Blocks that a request needs in the iteration after so many of the engine.

        Drafts beyond its last token take none.
        """
        tokens = ((request.offset_tokens + request.rate * iterations) >> SHIFT) + self.drafts
        return -(-min(tokens, request.prompt_tokens + request.output_tokens) // self._block_size)

    def blocks_needed(self, request: Request) -> int:
        """Blocks that the request takes in the next iteration."""
        return max(0, self._needs(request, self.iterations) - self.held(request))

    def blocks_due(self, iterations: int) -> int:
        """KV blocks that the next `iterations` take."""
        if self._due_of != (self.iterations, iterations):
            self._due_of = (self.iterations, iterations)
            self._due_blocks = self._blocks(self.iterations + iterations - 1) - self._total_held
        return self._due_blocks

    def _blocks(self, last: int) -> int:
        """Blocks of all in the iteration after `last` of the engine."""
        drafts, block_size, blocks = self.drafts, self._block_size, 0
        for request in self._requests:
            tokens = ((request.offset_tokens + request.rate * last) >> SHIFT) + drafts
            end = request.prompt_tokens + request.output_tokens
            if tokens > end:
                tokens = end
            needed = -(-tokens // block_size)
            blocks += needed if needed > request.held else request.held
        return blocks

    def advance(self, iterations: int) -> int:
        """Account for iterations that are over. Returns no tokens: `leave` counts them."""
        self._total_held += self.blocks_due(iterations)
        self.iterations += iterations
        self._context += self._rate * iterations
        return 0

    def unreported(self) -> int:
        """Tokens made by those that decode, which `advance` has not returned."""
        done = self.iterations
        return sum(self.made(request, done) - request.joined_tokens for request in self._requests)

    def iteration_s(self) -> float:
        """Seconds of the next iteration, its decode part."""
        size = self.size
        return self._base_s[size] + self._per_context_s[size] * (self._context / ONE)

    def leap(self, free_blocks: int) -> tuple[int, float]:
        """Begin a leap, as `DecodeBatch.leap`; of one iteration where the next has other drafts."""
        size = self.size
        iterations = self.first_end - self.iterations
        if self.drafting.drafts[size] != self.drafts:  # those of the next iteration alone
            iterations = 1
        # More than each can need, so that few leaps have to count.
        most = (iterations * self._most_rate // self._block_size >> SHIFT) + 2
        if size * most > free_blocks and self.blocks_due(iterations) > free_blocks:
            iterations = self._within(iterations, free_blocks)
        per_context_s = self._per_context_s[size]
        self._growth_s = growth_s = 0.5 * per_context_s * (self._rate / ONE)
        self._linear_s = linear_s = (
            self._base_s[size] + per_context_s * (self._context / ONE) - growth_s
        )
        return iterations, iterations * (linear_s + growth_s * iterations)

    def _within(self, iterations: int, blocks: int) -> int:
        """The most of the next `iterations` that can be run with `blocks` new blocks."""
        return bisect_left(range(1, iterations), blocks + 1, key=self.blocks_due)
