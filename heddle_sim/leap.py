"""The decoding batch of an engine, and the closed form that leaps over runs of its iterations.

A batch of `B` sequences with `S` tokens of context in the next iteration adds one token to each of
them per iteration. With iteration time ``a + p * context`` (affine for a fixed `B`), `k` iterations
take

    T(k) = k * a + p * (S * k + B * k * (k - 1) / 2) = k * (linear + growth * k),
    growth = p * B / 2,  linear = a + p * S - growth

and the number of iterations done after `e` seconds is the positive root of T(k) = e.

A sequence needs a new KV block in the iterations in which its context is 1 modulo the block size,
so the blocks that `k` iterations take follow from how many sequences are in each residue class.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import sqrt
from typing import Final

from heddle_sim.request import Request

NEVER: Final = 1 << 62
"""`DecodeBatch.first_end` of an empty batch."""


class DecodeBatch:
    """Sequences that decode together, in the order in which they end; `k` iterations cost O(1)."""

    __slots__ = (
        "_base_s",
        "_block_size",
        "_due",
        "_ends",
        "_growth_s",
        "_linear_s",
        "_per_context_s",
        "_requests",
        "context_tokens",
        "drafts",
        "first_end",
        "iterations",
        "most_blocks",
        "size",
    )

    def __init__(
        self, base_s: Sequence[float], per_context_s: Sequence[float], block_size: int
    ) -> None:
        self._base_s = base_s
        self._per_context_s = per_context_s
        self._block_size = block_size
        self._due = [0] * (2 * block_size)
        """Sequences that need a block when ``iterations % block_size`` is the index; held twice
        over, so that a run of iterations is one slice."""
        self._requests: list[Request] = []
        """The next to finish last; of those that finish together, the one that joined first."""
        self._ends: list[int] = []
        """Minus the iterations at the finish of each, so that they ascend."""
        self._linear_s = 0.0
        self._growth_s = 0.0
        self.iterations = 0
        """Iterations completed since the engine began, mixed ones included."""
        self.first_end = NEVER
        """Iterations at the next finish."""
        self.size = 0
        self.drafts = 0
        """Drafts of each sequence that the next iteration verifies."""
        self.most_blocks = 1
        """That a sequence takes in an iteration; counting them decides."""
        self.context_tokens = 0
        """Tokens of context that the next iteration attends to, each new token included."""

    def join(self, request: Request) -> None:
        """Add a request whose prefill is done and whose last token has no KV yet."""
        done, block_size = self.iterations, self._block_size
        context = request.prompt_tokens + request.made_tokens
        request.offset_tokens = context - done
        request.finish = done + request.output_tokens - request.made_tokens
        place = bisect_left(self._ends, -request.finish)
        self._ends.insert(place, -request.finish)
        self._requests.insert(place, request)
        self.first_end = -self._ends[-1]
        self.size += 1
        self.context_tokens += context
        residue = (1 - context + done) % block_size
        self._due[residue] += 1
        self._due[residue + block_size] += 1

    def leave(self, request: Request) -> int:
        """Take a request out, its token count brought up to date; returns its tokens of KV."""
        context = request.offset_tokens + self.iterations
        block_size = self._block_size
        place = self._requests.index(request, bisect_left(self._ends, -request.finish))
        del self._requests[place], self._ends[place]
        self.first_end = -self._ends[-1] if self._ends else NEVER
        request.made_tokens = context - request.prompt_tokens
        request.finish = -1
        self.size -= 1
        self.context_tokens -= context
        residue = (1 - request.offset_tokens) % block_size
        self._due[residue] -= 1
        self._due[residue + block_size] -= 1
        return context - 1

    def members(self) -> Sequence[Request]:
        """The requests that decode, in no particular order."""
        return self._requests

    def first(self) -> Request:
        """The request that ends first; of those that end together, the one that joined first."""
        return self._requests[-1]

    def made(self, request: Request, iterations: int) -> int:
        """Tokens that a request has made when so many iterations of the engine are over."""
        return request.offset_tokens + iterations - request.prompt_tokens

    def blocks_needed(self, request: Request) -> int:
        """Blocks that the request takes in the next iteration."""
        new = (request.offset_tokens + self.iterations - 1) % self._block_size == 0
        return 1 if new else 0

    def blocks_due(self, iterations: int) -> int:
        """KV blocks that the next `iterations` take."""
        block_size = self._block_size
        first = self.iterations % block_size
        if iterations == 1:
            return self._due[first]
        cycles, rest = divmod(iterations, block_size)
        return cycles * self.size + sum(self._due[first : first + rest])

    def advance(self, iterations: int) -> int:
        """Account for iterations that are over; returns the tokens that they made."""
        made = self.size * iterations
        self.iterations += iterations
        self.context_tokens += made
        return made

    def unreported(self) -> int:
        """Tokens that were made and that `advance` has not returned."""
        return 0

    def iteration_s(self) -> float:
        """Seconds of the next iteration, its decode part."""
        size = self.size
        return self._base_s[size] + self._per_context_s[size] * self.context_tokens

    def leap(self, free_blocks: int) -> tuple[int, float]:
        """Begin a leap: to the first finish, or to the iteration that `free_blocks` cannot serve.

        Returns its iterations and its seconds, and fixes the closed form for `elapsed_s` and
        `begun`. The batch is not empty, and the next iteration's blocks are free.
        """
        size = self.size
        iterations = self.first_end - self.iterations
        if size * (iterations // self._block_size + 1) > free_blocks:
            iterations = self._within(iterations, free_blocks)
        per_context_s = self._per_context_s[size]
        self._growth_s = growth_s = 0.5 * per_context_s * size
        self._linear_s = linear_s = (
            self._base_s[size] + per_context_s * self.context_tokens - growth_s
        )
        return iterations, iterations * (linear_s + growth_s * iterations)

    def _within(self, iterations: int, blocks: int) -> int:
        """The most of the next `iterations` that can be run with `blocks` new blocks."""
        block_size = self._block_size
        cycles, blocks = divmod(blocks, self.size)
        first = self.iterations % block_size
        runs = cycles * block_size
        for due in self._due[first : first + block_size]:
            blocks -= due
            if blocks < 0:
                break
            runs += 1
        return min(runs, iterations)

    def elapsed_s(self, iterations: int) -> float:
        """Seconds from the begin of the leap to the end of its first `iterations`."""
        return iterations * (self._linear_s + self._growth_s * iterations)

    def begun(self, elapsed_s: float) -> int:
        """Iterations of the leap begun `elapsed_s` after its start, the one that runs included.

        The root of T(k) = e rounded up: an instant at which an iteration ends belongs to that one.
        """
        linear_s, growth_s = self._linear_s, self._growth_s
        root = 2.0 * elapsed_s / (linear_s + sqrt(linear_s * linear_s + 4.0 * growth_s * elapsed_s))
        iterations = int(root) or 1
        # The root is rounded; the closed form, which also sets the clock, has the last word.
        while iterations * (linear_s + growth_s * iterations) < elapsed_s:
            iterations += 1
        return iterations
