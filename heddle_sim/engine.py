"""One simulated engine, behaving like vLLM V1 or, with `prefill_first`, like SGLang (`batching`),
that leaps from batch change to batch change.

An iteration begins at a *boundary*. Steps that made their last token end there, aborts apply, and
`batching` chooses the next batch:

- Continuous batching up to `max_running`; chunked prefill under `max_batched_tokens`, of which
  decoding steps take one each, first. The iteration that ends a prefill yields the first token. The
  last token made has no KV: a step of `p` prompt and `o` output tokens leaves KV for ``p + o - 1``.
- KV is held in blocks. Blocks that no running step uses stay as prefix cache until they are needed
  (`prefix_cache`). Hits are whole blocks, and at least one token is computed.
- When no block is free for a decoding step, the step admitted last is preempted: its KV goes to the
  cache, and it goes to the head of the queue with its tokens kept and prefills again. That
  iteration admits no step.
- A prompt that a sibling of the group prefilled here counts as cached up to the block floor, from
  the iteration on that prefills it. Only time is saved: each trajectory keeps KV of its own, which
  overstates the memory that vLLM would use.

Nothing happens between boundaries that change the batch, so a run of decode iterations is one leap
(`leap`), cut short at the end of an iteration when a step arrives or is aborted. A boundary costs
O(log batch); events are a few per step, none per token. Cached blocks displaced during a leap are
evicted when it ends or when the cache is read.
"""

from collections.abc import Callable

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_rollout.clock import Clock
from heddle_rollout.engines import EngineRefusedError, StepResult
from heddle_sim.batching import ContinuousBatch
from heddle_sim.config import check_settings
from heddle_sim.drafts import Samples
from heddle_sim.host_kv import HostLink, Load
from heddle_sim.latency import LatencyTable
from heddle_sim.request import COMING, ENDED, LOADING, RUNNING, WAITING, Request

_IDLE, _LEAPING, _AT_BOUNDARY, _FAILED = range(4)


class SimEngine:
    """An engine in simulated time; `start` and `abort` take effect now, `on_end` reports the end.

    `on_end` is called exactly once for each step started, from the engine's own event and never
    from inside `start` or `abort`, unless the engine fails first. It may call the engine: a step
    started there joins the iteration that begins at that instant.
    """

    def __init__(
        self,
        clock: Clock,
        engine: EngineId,
        table: LatencyTable,
        *,
        max_running: int,
        on_end: Callable[[StepResult], None],
        max_batched_tokens: int = 8192,
        block_size: int = 16,
        prefix_caching: bool = True,
        prefill_first: bool = False,
        speed: float = 1.0,
        arrival_s: float = 0.0,
        host: HostLink | None = None,
        samples: Samples | None = None,
    ) -> None:
        """`speed` divides all times of the table. A step reaches the engine `arrival_s` after its
        start, as through a message and threads. `host` needs prefix caching. `samples` are of all
        engines that share their drafts.

        Raises:
            EngineRefusedError: a setting that no engine can have.
        """
        check_settings(engine, table, max_running, max_batched_tokens, block_size, speed)
        self.engine = engine
        self.table = table
        self.max_running = max_running
        self.busy_s = 0.0
        """Seconds in iterations, as of the last batch change."""
        self._clock = clock
        self._host = host = host if prefix_caching else None
        self._block_size = block_size
        self._on_end = on_end
        self._arrival_s = arrival_s
        self._coming = 0
        """Steps that have not reached the engine yet."""
        self._batch = ContinuousBatch(
            table,
            max_running=max_running,
            max_batched_tokens=max_batched_tokens,
            block_size=block_size,
            prefix_caching=prefix_caching,
            prefill_first=prefill_first,
            speed=speed,
            host=host,
            samples=Samples() if samples is None else samples,
        )
        self._aborts: list[Request] = []
        """Running steps to end at the next boundary."""
        self._paused = False
        self._state = _IDLE
        self._since_s = 0.0
        self._leap = 0
        """Iterations under way: until the batch changes, fewer once the leap is cut."""
        self._leap_is_cut = False
        self._wake_s = -1.0
        """When the next boundary is; a call at another time is left over from a leap that was cut
        short."""
        self._on_wake = self._wake

    # ---- calls of a driver

    def start(
        self,
        trajectory: TrajectoryId,
        group: GroupId,
        *,
        prompt_tokens: int,
        shared_tokens: int,
        output_tokens: int,
        keep_kv: bool = False,
    ) -> None:
        """Queue a step; it joins the next iteration if it can be admitted.

        `shared_tokens` of the prompt continue the context at the end of the trajectory's previous
        step (0 for its first one). KV held here beyond that is no longer a prefix and is dropped.
        If a trajectory was compacted while it ran on another engine, its KV here must be released.
        With `keep_kv` its KV stays in use after its last token, until `release`.

        Raises:
            EngineRefusedError: it can never fit, it is here already, or the engine has failed.
        """
        batch = self._batch
        if prompt_tokens < 1 or output_tokens < 1 or not 0 <= shared_tokens <= prompt_tokens:
            raise EngineRefusedError(
                f"engine {self.engine}: {trajectory} needs 0 <= shared_tokens <= prompt_tokens and "
                f"at least one prompt and one output token, not shared_tokens={shared_tokens}, "
                f"prompt_tokens={prompt_tokens}, output_tokens={output_tokens}"
            )
        if prompt_tokens + output_tokens > batch.total_blocks * self._block_size:
            raise EngineRefusedError(
                f"engine {self.engine}: {trajectory} needs KV for {prompt_tokens + output_tokens} "
                f"tokens, the engine holds {self.kv_capacity_tokens}; "
                f"use a higher TP degree or a shorter step"
            )
        if self._state == _FAILED:
            raise EngineRefusedError(
                f"engine {self.engine}: {trajectory} was started after it failed"
            )
        context = batch.cache.context(trajectory)
        if context.request is not None:
            raise EngineRefusedError(f"engine {self.engine}: {trajectory} has a step here already")
        if context.kept:
            self.release(trajectory)
            context = batch.cache.context(trajectory)
        request = Request(
            context, group, prompt_tokens, shared_tokens, output_tokens, self._clock.now_s, keep_kv
        )
        context.request = request
        if self._arrival_s > 0.0:
            self._coming += 1
            self._clock.call_after(self._arrival_s, self._arrived, request)
        else:
            self._queue(request)

    def _arrived(self, request: Request) -> None:
        if request.state == COMING:
            self._coming -= 1
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Add a step that has reached the engine."""
        batch, context = self._batch, request.context
        waiting = batch.waiting
        kept = request.shared_tokens // self._block_size
        if context.blocks > kept:
            self._settle()
            batch.cache.trim(context, kept)
            self._reconsider_waiting()
        if self._host is not None:
            self._host.store.trim(context.trajectory, kept)
        request.state = WAITING
        waiting.append(request)
        if self._state == _IDLE:
            self._wake_after(0.0)
        elif len(waiting) == 1 and batch.running_steps < self.max_running:
            # Behind other steps or without a slot it changes no batch.
            self._cut_leap()

    def abort(self, trajectory: TrajectoryId) -> None:
        """End a step at the end of the running iteration, at once if it waits; its KV stays cached.

        If it finishes at that boundary it counts as finished. Nothing happens when no step of the
        trajectory is here: its end has been reported or is about to be.
        """
        batch = self._batch
        context = batch.cache.contexts.get(trajectory)
        request = context.request if context is not None else None
        if context is None or request is None:
            return
        if request.state == RUNNING:
            if request not in self._aborts:
                self._aborts.append(request)
            if self._state == _IDLE:
                self._wake_after(0.0)  # it is paused
            else:
                self._cut_leap()
            return
        state = request.state
        request.state, context.request = ENDED, None
        if state == WAITING:
            batch.waiting.remove(request)
            self._reconsider_waiting()
        elif state == COMING:
            self._coming -= 1
        batch.cache.forget_if_empty(context)
        batch.ended.append(request.result(self._clock.now_s, finished=False))
        self._clock.call_after(0.0, self._report_ends)

    def release(self, trajectory: TrajectoryId) -> None:
        """Drop the cached KV of a trajectory; KV that is kept for another engine becomes cache."""
        self._settle()
        cache = self._batch.cache
        context = cache.contexts.get(trajectory)
        if context is not None:
            if context.kept:
                self._batch.let_go(context)
                if self._state == _IDLE and self._batch.waiting:
                    self._wake_after(0.0)
            else:
                cache.take(context)
            cache.forget_if_empty(context)
        self._reconsider_waiting()

    def export_kv(self, trajectory: TrajectoryId) -> int:
        """Tokens of KV that a migration could take from here, whole blocks; it stays here.

        0 when there is none, and while a step of the trajectory runs.
        """
        self._settle()
        return self._batch.cache.held(trajectory) * self._block_size

    def import_kv(self, trajectory: TrajectoryId, group: GroupId, tokens: int) -> int:
        """Place migrated KV in the prefix cache, where it is the most recently used.

        It displaces other cached KV, but no KV of running steps. Siblings of `group` hit its prompt
        only after a step of the trajectory ran here. Returns the tokens placed, whole blocks: fewer
        than requested when running steps fill the engine, 0 while the trajectory runs here.
        """
        if self._state == _FAILED:
            return 0
        batch, used_blocks = self._batch, self._settle()
        context = batch.cache.context(trajectory)
        placed = batch.place(context, tokens // self._block_size, used_blocks)
        batch.cache.forget_if_empty(context)
        self._reconsider_waiting()
        return placed * self._block_size

    def flush_kv(self) -> None:
        """New weights: cached KV is void. Running steps keep theirs; it is not cached later."""
        self._batch.flush()
        if self._host is not None:
            self._host.store.clear()
        self._reconsider_waiting()

    def take_weights(self, version: int) -> None:
        """Take weights of this version: a frozen drafter fits them less."""
        self._batch.take_weights(version)

    def pause(self) -> None:
        """Begin no iteration after the one that runs now; steps stay, and may be started."""
        self._paused = True
        self._cut_leap()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._state == _IDLE:
                self._wake_after(0.0)

    def fail(self) -> list[tuple[TrajectoryId, int]]:
        """Fail now. Returns each step whose end was not reported, with the tokens it has made.

        No `on_end` is called any more, and nothing can be started.
        """
        batch = self._batch
        lost = [(result.trajectory, result.tokens) for result in batch.ended]
        done = batch.decoding.iterations
        if self._state == _LEAPING:
            done += self._begun() - 1
        for request in self._requests():
            made = request.made_tokens
            if request.finish >= 0:
                made = batch.decoding.made(request, done)
            if self._host is not None and request.state == RUNNING and request.finish >= 0:
                kv_tokens = request.prompt_tokens + made - 1
                self._host.store.put(request.context.trajectory, kv_tokens // self._block_size)
            request.state, request.context.request = ENDED, None
            lost.append((request.context.trajectory, made))
        self._state = _FAILED
        self._wake_s = -1.0
        self._aborts.clear()
        self._coming = 0
        batch.clear()
        return lost

    # ---- counters

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV that the engine holds, whole blocks; a step's prompt and output must fit."""
        return self._batch.total_blocks * self._block_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV of one token, over all GPUs of the engine."""
        return self.table.kv_bytes_per_token

    @property
    def running(self) -> int:
        """Steps in the batch."""
        return self._batch.running_steps

    @property
    def waiting(self) -> int:
        """Steps in the engine's own queue, not arrived there yet, or waiting for their KV."""
        return len(self._batch.waiting) + self._loading + self._coming

    @property
    def _loading(self) -> int:
        return self._host.loading if self._host is not None else 0

    def trajectories(self) -> list[TrajectoryId]:
        """Trajectories whose step is here: the batch in order of admission, then the queue."""
        return [request.context.trajectory for request in self._requests()]

    def _requests(self) -> list[Request]:
        batch = self._batch
        contexts = batch.cache.contexts.values() if self._coming or self._loading else ()
        requests = [context.request for context in contexts]
        apart = [r for r in requests if r and (r.state == COMING or r.state == LOADING)]
        return [*batch.running(), *batch.waiting, *apart]

    @property
    def kv_used_tokens(self) -> int:
        """Tokens of KV in blocks of running steps at this instant; nothing cached counts."""
        return self._batch.used_after(self._begun()) * self._block_size

    @property
    def kv_cached_tokens(self) -> int:
        """Tokens of KV in the prefix cache at this instant."""
        self._settle()
        return self._batch.cache.blocks * self._block_size

    @property
    def preemptions(self) -> int:
        """Preemptions by the engine itself."""
        return self._batch.preemptions

    @property
    def decoded_tokens(self) -> int:
        """Output tokens made, as of the last batch change."""
        return self._batch.decoded_tokens + self._batch.decoding.unreported()

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens computed, recomputed ones each time."""
        return self._batch.prefilled_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache saved at first admissions."""
        return self._batch.cached_tokens

    # ---- time

    def _wake_after(self, delay_s: float) -> None:
        clock = self._clock
        self._wake_s = clock.now_s + delay_s
        clock.call_at(self._wake_s, self._on_wake)

    def _begun(self) -> int:
        """Iterations under way that have begun, the one that runs included."""
        if self._leap == 1 or self._state != _LEAPING:
            return 1
        return min(self._batch.decoding.begun(self._clock.now_s - self._since_s), self._leap)

    def _cut_leap(self) -> None:
        """End the leap with the iteration that runs now."""
        if self._state != _LEAPING or self._leap_is_cut:
            return
        self._leap_is_cut = True
        begun = self._begun()
        if begun < self._leap:
            self._leap = begun
            end_s = self._since_s + self._batch.decoding.elapsed_s(begun)
            self._wake_after(max(0.0, end_s - self._clock.now_s))

    def _reconsider_waiting(self) -> None:
        """Cut the leap when the head of the queue may be admissible now."""
        if self._batch.waiting:
            self._cut_leap()

    def _settle(self) -> int:
        """Evict what the iterations begun so far have displaced; returns the blocks in use."""
        used = self._batch.used_after(self._begun())
        self._batch.evict_displaced(used)
        return used

    def _wake(self) -> None:
        """A boundary: account for the iterations that ended, report ends, begin the next."""
        now = self._clock.now_s
        if now != self._wake_s:
            return
        batch = self._batch
        if self._state == _LEAPING:
            self.busy_s += now - self._since_s
            batch.end(self._leap, now)
        self._state = _AT_BOUNDARY
        while batch.ended or self._aborts:
            for request in self._aborts:
                batch.abort(request, now)
            self._aborts.clear()
            self._report_ends()
        if self._state == _FAILED:
            return
        if self._paused:
            self._state = _IDLE
            self._wake_s = -1.0
            return
        iterations, duration_s = batch.begin(now)
        if self._host is not None and self._host.begun:
            for load in self._host.begun:
                self._clock.call_after(load.end_s - now, self._loaded, load)
            self._host.begun.clear()
        if iterations:
            self._leap = iterations
            self._leap_is_cut = iterations == 1
            self._state = _LEAPING
            self._since_s = now
            self._wake_s = now + duration_s
            self._clock.call_at(self._wake_s, self._on_wake)
        else:
            self._state = _IDLE
            self._wake_s = -1.0

    def _loaded(self, load: Load) -> None:
        """A context has come from host memory."""
        assert self._host is not None
        self._host.loading -= 1
        if self._state == _FAILED:
            return
        self._settle()
        self._batch.loaded(load)
        if self._state == _IDLE:
            self._wake_after(0.0)
        else:
            self._cut_leap()

    def _report_ends(self) -> None:
        ended = self._batch.ended
        while ended:
            self._on_end(ended.popleft())
