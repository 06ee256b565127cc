"""A closed-loop serving run on one engine, from a latency table alone.

`concurrency` clients each send a prompt of `input_tokens`, receive `output_tokens`, and at once
send the next, as in serving benchmarks of TTFT and TPOT. The model goes iteration by iteration,
with runs of pure decode iterations summed in closed form. It is independent of the event-driven
engine on purpose: host overhead is fitted with it, and the engine can then be compared with it.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import count

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_sim.calendar import Calendar
from heddle_sim.engine import SimEngine
from heddle_sim.latency import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """One run: fixed lengths, fixed concurrency, no prefix cache.

    `waves` requests per client. `max_batched_tokens` is the token budget of one iteration (vLLM's
    default for an API server on 80 GB Hopper parts), `ramp_s` the time between the starts of two
    clients.
    """

    input_tokens: int
    output_tokens: int
    concurrency: int
    waves: int = 10
    max_batched_tokens: int = 8192
    block_tokens: int = 16
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """Means over all requests of a run, and the number of preemptions."""

    ttft_s: float
    tpot_s: float
    """(end - first token) / (output tokens - 1), as benchmark clients count it."""
    preemptions: int


@dataclass(slots=True)
class _Request:
    sent_s: float
    need: int
    """Tokens to prefill: the prompt, and after a preemption what had been generated."""
    left: int
    """Output tokens still to make."""
    done: int = 0
    first_s: float = -1.0


@dataclass(slots=True)
class _Loop:
    run: ClosedLoop
    table: LatencyTable
    now_s: float = 0.0
    preemptions: int = 0
    unsent: int = 0
    starts: deque[float] = field(default_factory=deque)
    waiting: deque[_Request] = field(default_factory=deque)
    prefilling: list[_Request] = field(default_factory=list)
    decoding: list[_Request] = field(default_factory=list)
    ended: list[tuple[float, float]] = field(default_factory=list)
    """(TTFT, TPOT) of each finished request."""

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.run.block_tokens)

    def send(self, sent_s: float) -> None:
        self.waiting.append(
            _Request(sent_s=sent_s, need=self.run.input_tokens, left=self.run.output_tokens)
        )

    def held_blocks(self, growth: int) -> int:
        """Blocks in use once every decoding request has grown by `growth` tokens."""
        return sum(self.blocks(r.done + growth) for r in self.decoding) + sum(
            self.blocks(r.done) for r in self.prefilling
        )

    def preempt_for_kv(self, capacity_blocks: int) -> None:
        """Take the KV of the latest request until one more token each fits (vLLM's recompute)."""
        while len(self.decoding) > 1 and self.held_blocks(1) > capacity_blocks:
            victim = self.prefilling.pop() if self.prefilling else self.decoding.pop()
            victim.need = self.run.input_tokens + self.run.output_tokens - victim.left
            victim.done = 0
            self.waiting.appendleft(victim)
            self.preemptions += 1

    def chunks(self, capacity_blocks: int) -> list[tuple[_Request, int]]:
        """Choose this iteration's prefill: running chunks first, then the queue while KV and budget
        last."""
        budget = self.run.max_batched_tokens - len(self.decoding)
        chosen: list[tuple[_Request, int]] = []
        free = capacity_blocks - self.held_blocks(1)
        for r in self.prefilling:
            n = min(budget, r.need - r.done)
            if n > 0:
                chosen.append((r, n))
                budget -= n
                free -= self.blocks(r.done + n) - self.blocks(r.done)
        while self.waiting and budget > 0:
            n = min(budget, self.waiting[0].need)
            if self.blocks(n) > free:
                break
            r = self.waiting.popleft()
            self.prefilling.append(r)
            chosen.append((r, n))
            budget -= n
            free -= self.blocks(n)
        return chosen

    def leap(self, capacity_blocks: int) -> int:
        """Pure decode iterations until a request ends; 1 while clients start or KV is tight."""
        n = min(r.left for r in self.decoding)
        if self.starts or self.held_blocks(n) > capacity_blocks:
            return 1
        return n

    def iterate(self, capacity_blocks: int) -> None:
        while self.starts and self.starts[0] <= self.now_s:
            self.send(self.starts.popleft())
        if not (self.waiting or self.prefilling or self.decoding):
            self.now_s = self.starts[0]
            return
        self.preempt_for_kv(capacity_blocks)
        chunks = self.chunks(capacity_blocks)
        batch = len(self.decoding)
        context = sum(r.done for r in self.decoding)
        n = 1 if chunks else self.leap(capacity_blocks)
        grown = n * context + batch * n * (n - 1) / 2
        self.now_s += n * self.table.base_s[batch] + self.table.per_context_s[batch] * grown
        if chunks:
            self.now_s += self.table.any_prefill_s(batch)
            pairs = sum(k * (r.done + k / 2) for r, k in chunks)
            self.now_s += self.table.prefill_s(sum(k for _, k in chunks), pairs)
            self.now_s += self.table.host_per_prefill_s * len(chunks)
        self.advance(n, chunks)

    def advance(self, n: int, chunks: list[tuple[_Request, int]]) -> None:
        still: list[_Request] = []
        for r in self.decoding:
            r.done += n
            r.left -= n
            if r.left:
                still.append(r)
            else:
                self.finish(r)
        self.decoding = still
        for r, k in chunks:
            r.done += k
            if r.done == r.need:
                self.prefilling.remove(r)
                r.first_s = self.now_s if r.first_s < 0 else r.first_s
                r.left -= 1
                if r.left:
                    self.decoding.append(r)
                else:
                    self.finish(r)

    def finish(self, r: _Request) -> None:
        tpot_s = (self.now_s - r.first_s) / max(1, self.run.output_tokens - 1)
        self.ended.append((r.first_s - r.sent_s, tpot_s))
        if self.unsent:
            self.unsent -= 1
            self.send(self.now_s)


def replay(table: LatencyTable, run: ClosedLoop) -> LoopResult:
    """Run the closed loop on the model of this file and average.

    Raises ValueError when not even one request fits in the table's KV capacity.
    """
    capacity = table.kv_capacity_tokens // run.block_tokens
    loop = _Loop(run=run, table=table)
    if loop.blocks(run.input_tokens + run.output_tokens) > capacity:
        raise ValueError(
            f"one request of {run.input_tokens} + {run.output_tokens} tokens does not fit in "
            f"{table.kv_capacity_tokens} tokens of KV ({table.model}, {table.gpu}, TP {table.tp})"
        )
    total = run.concurrency * run.waves
    loop.unsent = total - run.concurrency
    loop.starts.extend(i * run.ramp_s for i in range(run.concurrency))
    while len(loop.ended) < total:
        loop.iterate(capacity)
    return _mean(loop.ended, loop.preemptions)


def replay_on_engine(table: LatencyTable, run: ClosedLoop) -> LoopResult:
    """Run the same closed loop on the simulated engine (`heddle_sim.engine`) and average.

    Raises EngineRefusedError (a ValueError) when not even one request fits in the KV capacity.
    """
    clock = Calendar()
    ended: list[tuple[float, float]] = []
    numbers = count()
    total = run.concurrency * run.waves

    def send() -> None:
        name = f"r{next(numbers)}"
        engine.start(
            TrajectoryId(name),
            GroupId(name),
            prompt_tokens=run.input_tokens,
            shared_tokens=0,
            output_tokens=run.output_tokens,
        )

    def on_end(result: StepResult) -> None:
        tpot_s = result.decode_s / max(1, run.output_tokens - 1)
        ended.append((result.queued_s + result.prefill_s, tpot_s))
        if len(ended) <= total - run.concurrency:
            send()

    engine = SimEngine(
        clock,
        EngineId("e0"),
        table,
        max_running=run.concurrency,
        max_batched_tokens=run.max_batched_tokens,
        block_size=run.block_tokens,
        on_end=on_end,
        prefix_caching=False,
    )
    for i in range(run.concurrency):
        clock.call_after(i * run.ramp_s, send)
    clock.run()
    return _mean(ended, engine.preemptions)


def _mean(ended: list[tuple[float, float]], preemptions: int) -> LoopResult:
    return LoopResult(
        ttft_s=sum(ttft for ttft, _ in ended) / len(ended),
        tpot_s=sum(tpot for _, tpot in ended) / len(ended),
        preemptions=preemptions,
    )
