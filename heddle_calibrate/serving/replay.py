"""What a closed-loop serving run consists of: which iterations a request waits for and runs in.

Clients send a prompt, receive the output and send the next. An engine decides by counts of
requests, tokens and blocks, never by the clock, so the iterations of such a run and what is in them
do not depend on how long each takes. TTFT and TPOT are then linear in every time constant, and one
replay serves all of them (`SpanWork`). vLLM computes prompts beside decoding; SGLang computes them
in iterations of their own while decoding waits (`Clients.prefill_first`).

Lengths are drawn as benchmark clients draw them: uniformly from `shortest` of the given length to
all of it. All clients start at once. A client's next request reaches the engine while the next
iteration is running, and enters the one after.
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from heddle_calibrate.roofline.memory import MAX_BATCHED_TOKENS
from heddle_sim.batching import NEW_TOKEN_RATIO
from heddle_sim.latency import LatencyTable

SHORTEST = 0.8
WAVES = 10
"""Requests per client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """A closed loop: lengths in tokens, `concurrency` clients in all."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    shortest: float = SHORTEST
    waves: int = WAVES
    requests: int = 0
    """Of the whole run; 0: `waves` for each client."""
    max_running: int = 0
    """Sequences that a rank runs at once; 0: no limit."""
    batched_tokens: int = MAX_BATCHED_TOKENS
    """Of one iteration of a rank."""
    prefill_first: bool = False
    """SGLang: prompts alone in an iteration; KV is kept free for what requests will make."""
    receive_every: int = 1
    """Iterations of decoding between looks at requests that came; one with prompts, or an idle
    engine, is followed by a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanWork:
    """Iterations in a span, split by what their time depends on."""

    decode_s: float = 0.0
    """Tabled kernel time of decoding."""
    prefill_s: float = 0.0
    """Tabled kernel time of prompts."""
    steps: float = 0.0
    sequences: float = 0.0
    """Decoding sequences of the fullest rank, summed over iterations."""
    prompts: float = 0.0
    """Prompts in prefill on a rank, summed over iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWork:
    """Means over the requests of a run."""

    first_token: SpanWork
    """From sending a request to its first token."""
    per_token: SpanWork
    """From one output token to the next."""
    preemptions: int


_Sums = tuple[float, float, float, float, float]
_NONE: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Request:
    prompt: int
    output: int
    sent: _Sums
    need: int
    """Tokens to prefill: the prompt, and after a preemption what had been generated."""
    left: int
    """Output tokens to make."""
    done: int = 0
    """Tokens prefilled."""
    since: int = 0
    """Iteration in which it began to decode."""
    first: _Sums | None = None


@dataclass(slots=True)
class _Replay:
    table: LatencyTable
    clients: Clients
    random: random.Random
    sums: _Sums = _NONE
    step: int = 0
    """Iterations that decoded."""
    iterations: int = 0
    unseen: int = 0
    """Iterations since the engine looked at requests that came."""
    context: int = 0
    """Tokens whose KV decoding requests hold."""
    unsent: int = 0
    preemptions: int = 0
    coming: deque[tuple[int, _Request]] = field(default_factory=deque)
    """Requests on their way, with the first iteration that may take them."""
    waiting: deque[_Request] = field(default_factory=deque)
    prefilling: list[_Request] = field(default_factory=list)
    decoding: dict[int, _Request] = field(default_factory=dict)
    """By number, in the order of their first tokens."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """A heap: the last iteration of each decoding request, and its number."""
    numbers: int = 0
    first_token: list[_Sums] = field(default_factory=list)
    per_token: list[_Sums] = field(default_factory=list)

    def send(self, at: int) -> None:
        c, draw = self.clients, self.random.randint
        prompt = draw(max(1, round(c.shortest * c.input_tokens)), c.input_tokens)
        output = draw(max(1, round(c.shortest * c.output_tokens)), c.output_tokens)
        request = _Request(prompt=prompt, output=output, sent=self.sums, need=prompt, left=output)
        self.coming.append((at, request))

    def free(self) -> int:
        """Tokens of KV left once every decoding request has one more."""
        held = self.context + len(self.decoding) + sum(r.done for r in self.prefilling)
        return self.table.kv_capacity_tokens - held

    def preempt(self) -> None:
        """Take the KV of the latest requests until the rest fits (vLLM's recompute)."""
        while len(self.decoding) > 1 and self.free() < 0:
            number, victim = self.decoding.popitem()
            self.ends.remove((victim.since + victim.left, number))
            heapq.heapify(self.ends)
            made = self.step - victim.since
            self.context -= victim.need + made
            victim.left -= made
            victim.need, victim.done = victim.need + 1 + made, 0
            self.waiting.appendleft(victim)
            self.preemptions += 1

    def promised(self) -> float:
        """Tokens of KV that SGLang keeps free for what running requests will make."""
        left = sum(r.left + r.since - self.step for r in self.decoding.values())
        return NEW_TOKEN_RATIO * left + sum(r.left for r in self.prefilling)

    def chunks(self) -> list[tuple[_Request, int]]:
        """Tokens that this iteration prefills of each request: running ones first."""
        first = self.clients.prefill_first
        budget = self.clients.batched_tokens * self.table.dp - (0 if first else len(self.decoding))
        most = self.clients.max_running * self.table.dp or self.clients.concurrency
        free = self.free() - (self.promised() if first and self.waiting else 0)
        chosen: list[tuple[_Request, int]] = []
        for request in self.prefilling:
            n = min(budget, request.need - request.done)
            if n > 0:
                chosen.append((request, n))
                budget, free = budget - n, free - n
        while self.waiting and budget > 0 and len(self.decoding) + len(self.prefilling) < most:
            request = self.waiting[0]
            own = request.need + (request.left if first else 0)
            if own > free and (not first or self.decoding or chosen):
                break
            self.waiting.popleft()
            n = min(budget, request.need)
            self.prefilling.append(request)
            chosen.append((request, n))
            budget, free = budget - n, free - own
        return chosen

    def leap(self) -> int:
        """Iterations until a request ends or arrives, or KV runs out."""
        batch = len(self.decoding)
        n = self.ends[0][0] - self.step
        if self.coming:
            due = max(self.coming[0][0] - self.iterations, self.clients.receive_every - self.unseen)
            n = min(n, max(1, due))
        return max(1, min(n, self.free() // batch + 1))

    def add(self, n: int, chunks: list[tuple[_Request, int]]) -> None:
        t, dp = self.table, self.table.dp
        alone = bool(chunks) and self.clients.prefill_first
        batch = 0 if alone else len(self.decoding)
        grown = 0.0 if alone else n * self.context + batch * n * (n - 1) / 2
        decode = n * t.base_s[batch] + t.per_context_s[batch] * grown
        prefill = 0.0
        if chunks:
            decode += t.any_prefill_s(batch)
            pairs = sum(k * (r.done + k / 2) for r, k in chunks)
            prefill = t.prefill_s(sum(k for _, k in chunks), pairs)
        a, b, c, d, e = self.sums
        each = -(-batch // dp)
        self.sums = (a + decode, b + prefill, c + n, d + n * each, e + len(chunks) / dp)
        self.step += 0 if alone else n
        self.iterations += n
        self.unseen = self.clients.receive_every if alone else self.unseen + n
        self.context += n * batch

    def iterate(self) -> None:
        idle = not (self.waiting or self.prefilling or self.decoding)
        if idle or self.unseen >= self.clients.receive_every:
            self.unseen = 0
            while self.coming and (self.coming[0][0] <= self.iterations or idle):
                self.waiting.append(self.coming.popleft()[1])
                idle = False
        self.preempt()
        chunks = self.chunks()
        self.add(1 if chunks else self.leap(), chunks)
        while self.ends and self.ends[0][0] <= self.step:
            _, number = heapq.heappop(self.ends)
            request = self.decoding.pop(number)
            self.context -= request.need + self.step - request.since
            self.finish(request)
        for request, n in chunks:
            request.done += n
            if request.done == request.need:
                self.prefilling.remove(request)
                self.decode(request)

    def decode(self, request: _Request) -> None:
        if request.first is None:
            request.first = self.sums
        request.left -= 1
        request.since = self.step
        if not request.left:
            self.finish(request)
            return
        self.numbers += 1
        self.decoding[self.numbers] = request
        self.context += request.need
        heapq.heappush(self.ends, (self.step + request.left, self.numbers))

    def finish(self, request: _Request) -> None:
        assert request.first is not None
        self.first_token.append(_less(request.first, request.sent, 1.0))
        if request.output > 1:
            self.per_token.append(_less(self.sums, request.first, 1 / (request.output - 1)))
        if self.unsent:
            self.unsent -= 1
            self.send(self.iterations + 1)


def _less(end: _Sums, start: _Sums, scale: float) -> _Sums:
    a, b, c, d, e = (scale * (x - y) for x, y in zip(end, start, strict=True))
    return a, b, c, d, e


def serving_work(table: LatencyTable, clients: Clients) -> ServingWork:
    """Replay a closed loop on kernel times, `table`, and sum up what its requests waited for.

    Raises:
        ValueError: one request does not fit in the KV of the table, or the table has fewer batch
            sizes than there are clients.
    """
    longest = clients.input_tokens + clients.output_tokens
    name = f"{table.model}, {table.gpu}, TP {table.tp}"
    if longest > table.kv_capacity_tokens:
        raise ValueError(
            f"one request of {longest} tokens does not fit in {table.kv_capacity_tokens} tokens of "
            f"KV ({name})"
        )
    if clients.concurrency >= len(table.base_s):
        raise ValueError(
            f"{clients.concurrency} clients, but times of batches up to {len(table.base_s) - 1} "
            f"({name}): expand the profile with a larger max_batch"
        )
    total = clients.requests or clients.concurrency * clients.waves
    first = min(total, clients.concurrency)
    replay = _Replay(table=table, clients=clients, random=random.Random(0), unsent=total - first)
    for _ in range(first):
        replay.send(0)
    while len(replay.first_token) < total:
        replay.iterate()
    return ServingWork(
        first_token=_mean(replay.first_token),
        per_token=_mean(replay.per_token),
        preemptions=replay.preemptions,
    )


def _mean(spans: list[_Sums]) -> SpanWork:
    a, b, c, d, e = (
        (sum(each) / len(spans) for each in zip(*spans, strict=True)) if spans else _NONE
    )
    return SpanWork(decode_s=a, prefill_s=b, steps=c, sequences=d, prompts=e)
