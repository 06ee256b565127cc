"""The engine's slow twin: the same model, one iteration at a time, written as plainly as possible.

It shares nothing with the leaping engine but the latency table: blocks are counted afresh whenever
they matter, the prefix cache is a list of single blocks in order of eviction, every iteration is an
event. Only its interface is the same, so that one scenario can drive both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from heddle_sim.drafts import ONE, draw_of
from heddle_sim.latency import LatencyTable


@dataclass(eq=False)
class Sequence:
    trajectory: str
    group: str
    prompt: int
    shared: int
    output: int
    started_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    made: int = 0
    kv: int = 0
    prefilled: bool = False
    cached: int = 0
    recomputes: int = 0
    void_kv: bool = False
    slots: int = 0  # tokens of KV that it has blocks for, drafts among them
    fraction: int = 0  # of a token made, in parts of ONE

    @property
    def length(self) -> int:
        return self.prompt + self.made


@dataclass
class End:
    trajectory: str
    tokens: int
    finished: bool
    queued_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int
    recomputes: int


@dataclass
class ReferenceEngine:
    env: simpy.Environment
    engine: str
    table: LatencyTable
    max_running: int
    on_end: Callable[[End], None]
    max_batched_tokens: int = 8192
    block_size: int = 16
    prefix_caching: bool = True
    speed: float = 1.0
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(
        default_factory=list
    )  # (trajectory, block), next to go first
    prompts: dict[str, int] = field(default_factory=dict)  # group -> tokens of its prompt
    holders: dict[str, str] = field(
        default_factory=dict
    )  # trajectory -> group whose prompt it holds
    aborts: list[Sequence] = field(default_factory=list)
    ended: list[End] = field(default_factory=list)
    preemptions: int = 0
    iterations: int = 0
    scheduled: int = 0  # sequences of the last iteration
    drafts: int = 0  # of each sequence, verified in the next iteration
    drafted: int = 0
    accepted: int = 0
    busy: bool = False
    dead: bool = False

    # ---- what a driver asks for

    def start(
        self,
        trajectory: str,
        group: str,
        *,
        prompt_tokens: int,
        shared_tokens: int,
        output_tokens: int,
    ) -> None:
        keep = shared_tokens // self.block_size
        self.cached = [(t, i) for t, i in self.cached if t != trajectory or i < keep]
        self.waiting.append(
            Sequence(trajectory, group, prompt_tokens, shared_tokens, output_tokens, self.env.now)
        )
        if not self.busy:
            self.busy = True
            self.after(0.0, self.boundary)

    def abort(self, trajectory: str) -> None:
        for sequence in self.running:
            if sequence.trajectory == trajectory:
                self.aborts.append(sequence)
        for sequence in list(self.waiting):
            if sequence.trajectory == trajectory:
                self.waiting.remove(sequence)
                self.end(sequence, finished=False)
                self.after(0.0, self.tell)

    def release(self, trajectory: str) -> None:
        self.cached = [(t, i) for t, i in self.cached if t != trajectory]

    def export_kv(self, trajectory: str) -> int:
        return self.cached_blocks(trajectory) * self.block_size

    def import_kv(self, trajectory: str, group: str, tokens: int) -> int:
        if not self.prefix_caching or any(s.trajectory == trajectory for s in self.running):
            return 0
        blocks = max(self.cached_blocks(trajectory), tokens // self.block_size)
        blocks = min(blocks, self.total_blocks - self.used_blocks())
        self.release(trajectory)
        self.make_free(blocks)
        self.cache(trajectory, blocks)
        return blocks * self.block_size

    def flush_kv(self) -> None:
        self.cached, self.prompts, self.holders = [], {}, {}
        for sequence in self.running:
            sequence.void_kv = True

    def fail(self) -> list[tuple[str, int]]:
        lost = [(end.trajectory, end.tokens) for end in self.ended]
        lost += [(s.trajectory, s.made) for s in (*self.running, *self.waiting)]
        self.dead = True
        self.running, self.waiting, self.ended, self.cached = [], [], [], []
        return lost

    # ---- blocks

    @property
    def total_blocks(self) -> int:
        return self.table.kv_capacity_tokens // self.block_size

    def blocks(self, tokens: int) -> int:
        return (tokens + self.block_size - 1) // self.block_size

    def used_blocks(self) -> int:
        return sum(self.blocks(max(s.kv, s.slots)) for s in self.running)

    @property
    def kv_used_tokens(self) -> int:
        return self.used_blocks() * self.block_size

    @property
    def kv_cached_tokens(self) -> int:
        return len(self.cached) * self.block_size

    def cached_blocks(self, trajectory: str) -> int:
        return sum(1 for t, _ in self.cached if t == trajectory)

    def cache(self, trajectory: str, blocks: int) -> None:
        self.cached += [(trajectory, i) for i in reversed(range(blocks))]

    def make_free(self, blocks: int) -> bool:
        """Evict until `blocks` are free; evict nothing and return False if that is impossible."""
        if self.used_blocks() + blocks > self.total_blocks:
            return False
        while self.used_blocks() + len(self.cached) + blocks > self.total_blocks:
            self.cached.pop(0)
        return True

    def grow(self, sequence: Sequence, kv: int, slots: int = 0) -> bool:
        held = max(sequence.kv, sequence.slots)
        wanted = max(kv, slots, held)
        if not self.make_free(self.blocks(wanted) - self.blocks(held)):
            return False
        sequence.kv, sequence.slots = kv, max(slots, sequence.slots)
        return True

    def grow_with_drafts(self, sequence: Sequence) -> bool:
        last = sequence.prompt + sequence.output
        return self.grow(sequence, sequence.length, min(sequence.length + self.drafts, last))

    # ---- one iteration

    def boundary(self) -> None:
        if self.dead:
            return
        for sequence in list(self.running):
            if sequence.made == sequence.output:
                self.leave(sequence)
                self.end(sequence, finished=True)
        while self.ended or self.aborts:
            aborts, self.aborts = self.aborts, []
            for sequence in aborts:
                if sequence in self.running:
                    self.leave(sequence)
                    self.end(sequence, finished=False)
            self.tell()
        if self.dead:
            return
        if self.table.drafting is not None:
            self.drafts = self.table.drafting.drafts[self.scheduled]
        decodes, chunks = self.schedule()
        self.busy = bool(decodes or chunks)
        if self.busy:
            self.iterations += 1
            self.scheduled = len(decodes) + len(chunks)
            self.after(self.seconds(decodes, chunks), lambda: self.iterated(decodes, chunks))
        else:
            assert not self.running
            assert not self.waiting

    def schedule(self) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        preempted = False
        for sequence in list(self.running):
            if sequence in self.running and sequence.prefilled:
                while sequence in self.running and not self.grow_with_drafts(sequence):
                    self.preempt(self.running[-1])
                    preempted = True
        decodes = [s for s in self.running if s.prefilled]
        budget = self.max_batched_tokens - len(decodes) * (self.drafts + 1)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in list(self.running):
            if not sequence.prefilled:
                assert sequence is self.running[-1]
                chunk = min(sequence.length - sequence.kv, budget)
                if self.grow(sequence, sequence.kv + chunk):
                    budget -= chunk
                    chunks.append((sequence, chunk))
                else:
                    self.preempt(sequence)
                    preempted = True
        if preempted:
            return decodes, chunks
        while self.waiting and len(self.running) < self.max_running and budget > 0:
            sequence = self.waiting[0]
            hit = self.hit_blocks(sequence) * self.block_size
            chunk = min(sequence.length - hit, budget)
            if self.used_blocks() + self.blocks(hit + chunk) > self.total_blocks:
                break
            self.waiting.pop(0)
            self.release(sequence.trajectory)
            self.grow(sequence, hit + chunk)
            self.running.append(sequence)
            if sequence.admitted_s is None:
                sequence.admitted_s, sequence.cached = self.env.now, hit
            budget -= chunk
            chunks.append((sequence, chunk))
        return decodes, chunks

    def hit_blocks(self, sequence: Sequence) -> int:
        if not self.prefix_caching:
            return 0
        limit = (sequence.length - 1) // self.block_size
        hit = min(self.cached_blocks(sequence.trajectory), limit)
        prompt = self.prompts.get(sequence.group)
        if prompt is None:
            if sequence.shared == 0:
                self.prompts[sequence.group] = sequence.prompt
                self.holders[sequence.trajectory] = sequence.group
            return hit
        first = sequence.shared == 0 and sequence.prompt == prompt
        if not first and sequence.shared < prompt:
            self.holders.pop(sequence.trajectory, None)
            return hit
        self.holders[sequence.trajectory] = sequence.group
        for holder, group in self.holders.items():
            if group == sequence.group:
                resident = self.cached_blocks(holder)
                for other in self.running:
                    if other.trajectory == holder:
                        resident = other.kv // self.block_size
                hit = max(hit, min(resident, prompt // self.block_size, limit))
        return hit

    def seconds(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> float:
        table, batch = self.table, len(decodes)
        base_s = table.base_s if table.drafting is None else table.drafting.base_s[self.drafts]
        seconds = base_s[batch]
        if chunks:
            seconds += max(0.0, table.base_s[0] - table.base_s[batch * (self.drafts + 1)])
        context = sum(s.length + s.fraction / ONE for s in decodes)
        seconds += table.per_context_s[batch] * context
        if chunks:
            pairs = sum(n * (s.kv - n + n / 2) for s, n in chunks)
            seconds += table.prefill_s(sum(n for _, n in chunks), pairs)
            seconds += table.host_per_prefill_s * len(chunks)
        return seconds / self.speed

    def iterated(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> None:
        if self.dead:
            return
        for sequence in decodes:
            self.decode(sequence)
        for sequence, _ in chunks:
            if sequence.kv == sequence.length:
                sequence.prefilled = True
                sequence.made += 1
                if sequence.first_token_s is None:
                    sequence.first_token_s = self.env.now
        self.boundary()

    def decode(self, sequence: Sequence) -> None:
        drafting, new = self.table.drafting, 1
        if drafting is not None:
            draw = draw_of(sequence.trajectory, sequence.prompt + sequence.output)
            progress = sequence.fraction + drafting.rate(self.drafts, sequence.output, draw)
            new, sequence.fraction = divmod(progress, ONE)
        assert 1 <= new <= self.drafts + 1
        new = min(new, sequence.output - sequence.made)
        self.drafted += self.drafts
        self.accepted += new - 1
        sequence.made += new
        sequence.kv = sequence.length - 1

    # ---- ends

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self.prefix_caching and not sequence.void_kv:
            self.cache(sequence.trajectory, sequence.kv // self.block_size)

    def preempt(self, sequence: Sequence) -> None:
        self.leave(sequence)
        sequence.kv, sequence.prefilled, sequence.void_kv = 0, False, False
        sequence.slots, sequence.fraction = 0, 0
        sequence.recomputes += 1
        self.preemptions += 1
        self.waiting.insert(0, sequence)

    def end(self, sequence: Sequence, *, finished: bool) -> None:
        now = self.env.now
        admitted = now if sequence.admitted_s is None else sequence.admitted_s
        first = now if sequence.first_token_s is None else sequence.first_token_s
        self.ended.append(
            End(
                sequence.trajectory,
                sequence.made,
                finished,
                admitted - sequence.started_s,
                first - admitted,
                now - first,
                sequence.cached,
                sequence.recomputes,
            )
        )

    def tell(self) -> None:
        while self.ended:
            self.on_end(self.ended.pop(0))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        callbacks = self.env.timeout(delay_s).callbacks
        assert callbacks is not None
        callbacks.append(lambda _: act())
