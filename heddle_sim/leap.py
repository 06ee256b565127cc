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

from collections.abc import Sequence
from heapq import heappop, heappush
from math import sqrt

from heddle_sim.request import Request


class DecodeBatch:
    """Sequences that decode together. Joining and leaving cost O(log B), `k` iterations O(1)."""

    __slots__ = (
        "_base_s",
        "_block_size",
        "_due",
        "_growth_s",
        "_heap",
        "_linear_s",
        "_per_context_s",
        "context_tokens",
        "iterations",
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
        self._heap: list[tuple[int, int, Request]] = []
        """(iterations at the finish, order of admission, request), with leftovers of requests that
        left early: those no longer carry that finish."""
        self._linear_s = 0.0
        self._growth_s = 0.0
        self.iterations = 0
        """Iterations completed since the engine began, mixed ones included."""
        self.size = 0
        self.context_tokens = 0
        """Tokens of context that the next iteration attends to, each new token included."""

    def join(self, request: Request) -> None:
        """Add a request whose prefill is done and whose last token has no KV yet."""
        done, block_size = self.iterations, self._block_size
        context = request.prompt_tokens + request.made_tokens
        request.offset_tokens = context - done
        request.finish = finish = done + request.output_tokens - request.made_tokens
        self.size += 1
        self.context_tokens += context
        residue = (1 - context + done) % block_size
        self._due[residue] += 1
        self._due[residue + block_size] += 1
        heappush(self._heap, (finish, request.order, request))

    def leave(self, request: Request) -> int:
        """Take a request out, its token count brought up to date; returns its tokens of KV."""
        context = request.offset_tokens + self.iterations
        block_size = self._block_size
        request.made_tokens = context - request.prompt_tokens
        request.finish = -1
        self.size -= 1
        self.context_tokens -= context
        residue = (1 - request.offset_tokens) % block_size
        self._due[residue] -= 1
        self._due[residue + block_size] -= 1
        return context - 1

    def members(self) -> list[Request]:
        """The requests that decode, in no particular order."""
        # A request that left and came back may have the same finish, not the same admission.
        return [r for finish, order, r in self._heap if (r.finish, r.order) == (finish, order)]

    def pop_finished(self) -> Request | None:
        """The next request, in order of admission, with its last token made; still to leave."""
        heap, done = self._heap, self.iterations
        while heap and heap[0][0] <= done:
            finish, _, request = heappop(heap)
            if request.finish == finish:
                return request
        return None

    def needs_block(self, request: Request) -> bool:
        """Whether the next iteration puts the request's token into a new block."""
        return (request.offset_tokens + self.iterations - 1) % self._block_size == 0

    def blocks_due(self, iterations: int) -> int:
        """KV blocks that the next `iterations` take."""
        block_size = self._block_size
        first = self.iterations % block_size
        if iterations == 1:
            return self._due[first]
        cycles, rest = divmod(iterations, block_size)
        return cycles * self.size + sum(self._due[first : first + rest])

    def advance(self, iterations: int) -> None:
        """Account for iterations that are over."""
        self.iterations += iterations
        self.context_tokens += self.size * iterations

    def iteration_s(self) -> float:
        """Seconds of the next iteration, its decode part."""
        size = self.size
        return self._base_s[size] + self._per_context_s[size] * self.context_tokens

    def leap(self, free_blocks: int) -> tuple[int, float]:
        """Begin a leap: to the first finish, or to the iteration that `free_blocks` cannot serve.

        Returns its iterations and its seconds, and fixes the closed form for `elapsed_s` and
        `begun`. The batch is not empty, and the next iteration's blocks are free.
        """
        heap, size = self._heap, self.size
        while heap[0][2].finish != heap[0][0]:
            heappop(heap)
        iterations = heap[0][0] - self.iterations
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
