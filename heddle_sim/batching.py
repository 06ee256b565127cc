"""Decisions of an engine at the boundary of an iteration: continuous batching as in vLLM V1.

It has blocks, queues and seconds per iteration, but no clock: that is in `engine`. At a boundary,
in this order: each decoding step allocates KV for one more token; a prefill under way continues;
waiting steps are admitted in queue order while there is a slot, token budget and KV for their
chunk.

Two facts keep it small. A prefill that does not end in an iteration used up the token budget, so at
a boundary at most one step is in the middle of its prefill, and it is the one admitted last. And in
a run of pure decode iterations the head of a blocked queue stays blocked, because use only grows: a
cached block of its prompt that is evicted frees exactly the block that displaced it.

With `prefill_first` it is SGLang's (admission by `PrefillAdder` of `managers/schedule_policy.py` at
00550cd1): prompts are computed in iterations of their own while decoding waits, and a step is
admitted only where KV remains for tokens that it and those that run may still make.
"""

from collections import deque
from collections.abc import Sequence

from heddle_rollout.engines import StepResult
from heddle_sim.drafts import DraftedBatch, Samples
from heddle_sim.host_kv import HostLink, Load
from heddle_sim.latency import LatencyTable
from heddle_sim.leap import DecodeBatch
from heddle_sim.prefix_cache import GroupPrompts, PrefixCache
from heddle_sim.request import ENDED, LOADING, RUNNING, WAITING, Context, Request

NEW_TOKEN_RATIO = 0.098
"""Of the tokens that running steps may still make, the part that SGLang keeps free for them: its
initial ratio 0.7 times 0.14, reached after 600 iterations."""
CLIPPED_NEW_TOKENS = 4096
"""The most that SGLang expects a step to make."""


class ContinuousBatch:
    """The steps on an engine, waiting and running, and the KV blocks they hold."""

    __slots__ = (
        "_admissions",
        "_block_size",
        "_chunks",
        "_drafted",
        "_epoch",
        "_host",
        "_inverse_speed",
        "_max_batched_tokens",
        "_max_running",
        "_partial",
        "_prefill_first",
        "_prefix_caching",
        "_prompts",
        "_samples",
        "_sequences",
        "_table",
        "_taken",
        "cache",
        "cached_tokens",
        "decoded_tokens",
        "decoding",
        "ended",
        "preemptions",
        "prefilled_tokens",
        "running_steps",
        "total_blocks",
        "used_blocks",
        "waiting",
    )

    def __init__(
        self,
        table: LatencyTable,
        *,
        max_running: int,
        max_batched_tokens: int,
        block_size: int,
        prefix_caching: bool,
        prefill_first: bool,
        speed: float,
        host: HostLink | None,
        samples: Samples,
    ) -> None:
        self._table = table
        self._samples = samples
        self._host = host
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self._block_size = block_size
        self._prefix_caching = prefix_caching
        self._prefill_first = prefill_first
        self._inverse_speed = 1.0 / speed
        per_context_s = _scaled(table.per_context_s, speed)
        drafting = table.drafting
        self._drafted: DraftedBatch | None = None
        """What decodes, where that has drafts."""
        if drafting is None:
            self.decoding = DecodeBatch(_scaled(table.base_s, speed), per_context_s, block_size)
        else:
            base_s = {k: _scaled(seconds, speed) for k, seconds in drafting.base_s.items()}
            self._drafted = DraftedBatch(drafting, base_s, per_context_s, block_size, samples)
            self.decoding = self._drafted
        self.cache = PrefixCache()
        self._prompts = GroupPrompts()
        self.waiting: deque[Request] = deque()
        self.running_steps = 0
        """Steps in the batch."""
        self.ended: deque[StepResult] = deque()
        """Ends that were not reported yet."""
        self._partial: Request | None = None
        """The step in the middle of its prefill."""
        self._chunks: list[tuple[Request, int]] = []
        """Steps that prefill in this iteration, and how many tokens."""
        self._sequences = 0
        """Sequences that the last iteration computed."""
        self._taken = False
        """Whether `used_blocks` counts the iteration that runs; a leap is counted when it ends."""
        self._admissions = 0
        self._epoch = 0
        """Raised by a flush: KV of an older epoch does not enter the prefix cache."""
        self.total_blocks = table.kv_capacity_tokens // block_size
        self.used_blocks = 0
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.preemptions = 0

    # ---- between boundaries

    def running(self) -> list[Request]:
        """Steps in the batch, in order of admission."""
        found = [*self.decoding.members(), *(request for request, _ in self._chunks)]
        partial = self._partial
        if partial is not None and partial not in found:
            found.append(partial)
        return sorted(found, key=lambda request: request.order)

    def used_after(self, iterations: int) -> int:
        """Blocks in use once `iterations` of the running leap (1 of anything else) have begun."""
        if self._taken:
            return self.used_blocks
        return self.used_blocks + self.decoding.blocks_due(iterations)

    def evict_displaced(self, used_blocks: int) -> None:
        """Evict cached blocks that do not fit beside `used_blocks` of running steps."""
        over = used_blocks + self.cache.blocks - self.total_blocks
        if over > 0:
            self.cache.evict(over)

    def place(self, context: Context, blocks: int, used_blocks: int) -> int:
        """Cache KV from elsewhere as the most recently used; returns the blocks placed."""
        request = context.request
        if not self._prefix_caching or (
            request is not None and (request.state == RUNNING or request.state == LOADING)
        ):
            return 0
        blocks = max(self.cache.take(context), blocks)
        blocks = min(blocks, self.total_blocks - used_blocks)
        self.evict_displaced(used_blocks + blocks)
        self.cache.put(context, blocks)
        return blocks

    def let_go(self, context: Context) -> None:
        """KV that was kept for another engine becomes prefix cache."""
        self.used_blocks -= context.kept
        self.cache.put(context, max(context.blocks, context.kept))
        context.kept = 0

    def flush(self) -> None:
        """Void all cached KV; what runs keeps its own, which is not cached afterwards."""
        for context in self.cache.contexts.values():
            self.used_blocks -= context.kept
            context.kept = 0
        self.cache.clear()
        self._prompts.clear()
        self._epoch += 1

    def take_weights(self, version: int) -> None:
        """Other weights, of this version; at a boundary."""
        if self._drafted is not None:
            self._drafted.take_weights(version)

    def clear(self) -> None:
        """Lose everything but the counters."""
        self.running_steps = 0
        self.waiting.clear()
        self.ended.clear()
        self._chunks.clear()
        self.flush()
        self._partial = None
        self._taken = True
        self.used_blocks = 0

    def loaded(self, load: Load) -> None:
        """A context has come from host memory; its step goes to the head of the queue.

        Nothing of it stays when the step was aborted or the weights are others.
        """
        request = load.request
        self.used_blocks -= load.blocks
        if request.state != LOADING:
            return
        request.state = WAITING
        if load.epoch == self._epoch:
            self.cache.put(request.context, load.blocks)
        self.waiting.appendleft(request)

    # ---- the end of iterations

    def end(self, iterations: int, now_s: float) -> None:
        """Account for iterations that are over; steps that made their last token go to `ended`."""
        decoding, cache = self.decoding, self.cache
        if not self._taken:
            self.used_blocks += decoding.blocks_due(iterations)
            self._taken = True
            over = self.used_blocks + cache.blocks - self.total_blocks
            if over > 0:
                cache.evict(over)
        if not (self._chunks and self._prefill_first):
            self.decoded_tokens += decoding.advance(iterations)
        if self._chunks:
            for request, _ in self._chunks:
                if request is not self._partial:
                    request.made_tokens += 1
                    self.decoded_tokens += 1
                    if request.first_token_s < 0.0:
                        request.first_token_s = now_s
                    decoding.join(request)
            self._chunks.clear()
        while decoding.first_end <= decoding.iterations:
            done = decoding.first()
            self._end_step(done, keep=done.keep_kv)
            if self._drafted is not None:
                self._samples.end(done.group, done.context.trajectory)
            self.ended.append(done.result(now_s, finished=True))

    def abort(self, request: Request, now_s: float) -> None:
        """At a boundary: end a running step early, unless it has just ended."""
        if request.state == RUNNING:
            self._end_step(request)
            self.ended.append(request.result(now_s, finished=False))

    def _end_step(self, request: Request, *, keep: bool = False) -> None:
        self._withdraw(request, keep=keep)
        context = request.context
        request.state, context.request = ENDED, None
        self.cache.forget_if_empty(context)

    def _withdraw(self, request: Request, *, keep: bool = False) -> None:
        """Take a step out of the batch; its whole blocks become prefix cache, or are kept."""
        block_size = self._block_size
        held = 0
        if request.finish >= 0:
            kv_tokens = self.decoding.leave(request)
            if self._drafted is not None:
                held = request.held
                self.decoded_tokens += request.made_tokens - request.joined_tokens
        else:
            kv_tokens = request.computed_tokens
            self._partial = None
        self.used_blocks -= held or -(-kv_tokens // block_size)
        self.running_steps -= 1
        if self._prefix_caching and request.epoch == self._epoch:
            if keep:
                request.context.kept = kv_tokens // block_size
                self.used_blocks += request.context.kept
                return
            self.cache.put(request.context, kv_tokens // block_size)
            if self._host is not None:
                self._host.store.put(request.context.trajectory, kv_tokens // block_size)

    # ---- the begin of iterations

    def begin(self, now_s: float) -> tuple[int, float]:
        """Begin the next iterations: how many until the batch changes, and their seconds.

        (0, 0.0) when there is nothing to do.
        """
        decoding, drafted = self.decoding, self._drafted
        if drafted is not None:
            drafted.propose(self._sequences)
        free_blocks = self.total_blocks - self.used_blocks
        # Few sequences need a block in one iteration; only a nearly full engine has to count them.
        most_blocks = decoding.size * decoding.most_blocks
        short = most_blocks > free_blocks and decoding.blocks_due(1) > free_blocks
        if (
            short
            or self._partial is not None
            or (self.waiting and self.running_steps < self._max_running)
        ):
            seconds = self._begin_single(now_s, short=short)
            if seconds is not None:
                self._sequences = decoding.size + len(self._chunks)
                return 1, seconds
        if not decoding.size:
            return 0, 0.0
        self._taken = False
        self._sequences = decoding.size
        return decoding.leap(self.total_blocks - self.used_blocks)

    def _begin_single(self, now_s: float, *, short: bool) -> float | None:
        """Begin one iteration with prefill, or with preemption when KV is short; its seconds.

        None, and no batch has changed, when neither has to be.
        """
        decoding = self.decoding
        if self._prefill_first:
            self._prefill(now_s, admit=not short)
            if self._chunks:
                return self._prefill_s()
        due = decoding.blocks_due(1)
        if short:
            self._preempt_for_kv()
        else:
            self.used_blocks += due
        self.evict_displaced(self.used_blocks)
        if not self._prefill_first:
            short = self._prefill(now_s, admit=not short) or short
        if short or self._chunks:
            return decoding.iteration_s() + self._prefill_s()
        self.used_blocks -= due
        return None

    def _preempt_for_kv(self) -> None:
        """Give each decoding step its block, in order of admission; the last admitted pay."""
        decoding = self.decoding
        running = self.running()
        for request in running:
            if request.finish < 0 or not (needed := decoding.blocks_needed(request)):
                continue
            while self.used_blocks + needed > self.total_blocks:
                self.evict_displaced(self.used_blocks)
                while running[-1].state != RUNNING:
                    running.pop()
                victim = running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                self.used_blocks += needed

    def _preempt(self, request: Request) -> None:
        """Take a step's KV away and put it at the head of the queue; its tokens are kept."""
        self._withdraw(request)
        request.state = WAITING
        request.recomputes += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _prefill(self, now_s: float, *, admit: bool) -> bool:
        """Choose the chunks of this iteration. Returns whether a step was preempted for it."""
        decoding = self.decoding
        budget = self._max_batched_tokens
        if not self._prefill_first:
            budget -= decoding.size * (decoding.drafts + 1)
        request = self._partial
        if request is not None:
            start = request.computed_tokens
            chunk = min(request.prompt_tokens + request.made_tokens - start, budget)
            block_size = self._block_size
            blocks = -(-(start + chunk) // block_size) + -start // block_size
            if self.used_blocks + blocks > self.total_blocks:
                # It is the one admitted last, so it is its own victim.
                self._preempt(request)
                return True
            budget -= self._take_chunk(request, chunk, self.used_blocks + blocks)
        if admit:
            waiting = self.waiting
            host = self._host
            free = self._max_running - (host.loading if host is not None else 0)
            while waiting and budget > 0 and self.running_steps < free:
                if host is not None and not waiting[0].loaded:
                    blocks = self._in_host(waiting[0], host)
                    if self.used_blocks + blocks > self.total_blocks:
                        break
                    if blocks:
                        self._begin_load(now_s, blocks, host)
                        free -= 1
                        continue
                chunk = self._admit(now_s, budget)
                if not chunk:
                    break
                budget -= chunk
        return False

    def _in_host(self, request: Request, host: HostLink) -> int:
        """Blocks of the prompt to have from host memory; 0 when that has no more than is here."""
        limit = (request.prompt_tokens + request.made_tokens - 1) // self._block_size
        blocks = min(host.store.held(request.context.trajectory), limit)
        return blocks if blocks > self._hit_blocks(request, limit) else 0

    def _begin_load(self, now_s: float, blocks: int, host: HostLink) -> None:
        """Load the context of the head of the queue, which waits apart until that is done."""
        request = self.waiting.popleft()
        request.state, request.loaded = LOADING, True
        missing = blocks - self.cache.take(request.context)
        self.used_blocks += blocks
        self.evict_displaced(self.used_blocks)
        host.begin(request, blocks, missing, self._epoch, now_s)

    def _take_chunk(self, request: Request, chunk: int, used_blocks: int) -> int:
        self.used_blocks = used_blocks
        over = used_blocks + self.cache.blocks - self.total_blocks
        if over > 0:
            self.cache.evict(over)
        request.computed_tokens += chunk
        ends = request.computed_tokens == request.prompt_tokens + request.made_tokens
        self._partial = None if ends else request
        self._chunks.append((request, chunk))
        self.prefilled_tokens += chunk
        return chunk

    def _admit(self, now_s: float, budget: int) -> int:
        """Admit the head of the queue. Returns its first chunk, 0 without KV for that."""
        request = self.waiting[0]
        tokens = request.prompt_tokens + request.made_tokens
        block_size = self._block_size
        hit = 0
        if self._prefix_caching:
            hit = self._hit_blocks(request, (tokens - 1) // block_size) * block_size
        chunk = tokens - hit
        if chunk > budget:
            chunk = budget
        used_blocks = self.used_blocks - -(hit + chunk) // block_size
        if used_blocks > self.total_blocks:
            return 0
        if self._prefill_first and self.running_steps:
            promised = CLIPPED_NEW_TOKENS * (
                1 + len(self._chunks) + NEW_TOKEN_RATIO * self.decoding.size
            )
            rest = tokens - hit - chunk + promised
            if used_blocks + rest / block_size > self.total_blocks:
                return 0
        self.waiting.popleft()
        self.running_steps += 1
        request.state, request.loaded = RUNNING, False
        self.cache.take(request.context)
        self._admissions += 1
        request.order = self._admissions
        request.epoch = self._epoch
        request.computed_tokens = hit
        if request.admitted_s < 0.0:
            request.admitted_s = now_s
            request.cached_tokens = hit
            self.cached_tokens += hit
        return self._take_chunk(request, chunk, used_blocks)

    def _hit_blocks(self, request: Request, limit: int) -> int:
        """Blocks of the prompt, `limit` at most, cached for the trajectory or its group."""
        own = min(request.context.blocks, limit)
        first = self._prompts.first_sibling(request)
        if first is None:
            return own
        sibling = first
        most = min(first.group_prompt_tokens // self._block_size, limit)
        while own < most:
            if sibling.holds_group_prompt:
                blocks, its_step = sibling.blocks + sibling.kept, sibling.request
                if its_step is not None and its_step.state == RUNNING:
                    blocks = its_step.computed_tokens // self._block_size
                own = max(own, min(blocks, most))
            following = sibling.next_sibling
            if following is None or following is first:
                break
            sibling = following
        return own

    def _prefill_s(self) -> float:
        """Seconds that the chunks of this iteration add to it."""
        if not self._chunks:
            return 0.0
        tokens, pairs = 0, 0.0
        for request, chunk in self._chunks:
            tokens += chunk
            pairs += chunk * (request.computed_tokens - 0.5 * chunk)
        table, decoding = self._table, self.decoding
        seconds = table.prefill_s(tokens, pairs) + table.host_per_prefill_s * len(self._chunks)
        if self._prefill_first:
            return self._inverse_speed * (seconds + table.base_s[0])
        decoded = decoding.size * (decoding.drafts + 1)
        return self._inverse_speed * (seconds + table.any_prefill_s(decoded))


def _scaled(seconds: Sequence[float], speed: float) -> Sequence[float]:
    """Seconds at a speed; engines of speed 1 share those of their table."""
    return seconds if speed == 1.0 else [s / speed for s in seconds]
