"""Judges from outside whether an engine behind a URL still works. No clock and no I/O.

An engine is judged by itself, not by one stream: a long prefill, or a queue, is silent on a healthy
engine. vLLM counts iterations that give a token, and a prompt whole with its first token; between
the two, each chunk of a prefill takes more KV (`vllm:kv_cache_usage_perc`). Both stand still in an
engine that is stopped or waits for a lost peer.
"""

EXPECTED_SHARE = 4.0
"""A silent stream is suspect after so many times what its prefill and queue, or the tokens of its
next event, should take."""
BAD_HEALTH = 2
"""Answers of `/health` in a row, other than 200, after which an engine is out."""
PREFILL_TOKENS = 16
"""Tokens beside those decoded that count as prefill: streams lag a little."""
WITHOUT_PREFILL = 8
"""Iterations in a row without any prefill, after which an engine has no prompt to prefill."""


class EngineLife:
    """What streams and calls of one engine have brought. Times are seconds of one clock."""

    def __init__(self, now_s: float, *, silence_s: float) -> None:
        """`silence_s`: no silence that is shorter says anything."""
        self._silence_s = silence_s
        self._brought_s = self._answered_s = self._moved_s = now_s
        self._counted_s = 0.0
        self._iterated_s = now_s
        """When the count of iterations last grew, or a stream began where none was."""
        self._iterations: float | None = None
        self.iteration_s = 0.0
        """Of an iteration, when their count last grew; 0: unknown."""
        self._tokens: float | None = None
        self._kv_tokens = 0
        self._decoded = 0
        """Tokens of streams since the counters were read."""
        self._left = 0
        """Tokens of streams that have ended since, whose KV may be free."""
        self.prefilled = 0.0
        """Tokens of prompts that it has prefilled, as far as is known."""
        self.grows = False
        """Whether a prefill may have taken KV when the counters were last read."""
        self._without_prefill = 0.0
        """Iterations in a row that prefilled nothing, as far as is known."""
        self._bad_health = 0

    @property
    def counts_tokens(self) -> bool:
        """Whether the engine counts the tokens of its iterations."""
        return self._tokens is not None

    def begun(self, now_s: float) -> None:
        """A stream begins where none was: silence counts from now on."""
        self._brought_s = self._moved_s = max(now_s, self._brought_s)
        self._iterated_s = max(now_s, self._iterated_s)
        self._without_prefill = 0.0

    def brought(self, now_s: float, tokens: int) -> None:
        """A stream brought tokens."""
        self._brought_s = now_s
        self._decoded += tokens

    def left(self, tokens: int) -> None:
        """A stream of so many tokens, prompt and output, has ended."""
        self._left += tokens

    def answered(self, now_s: float) -> None:
        """A call was answered, whatever the answer was."""
        self._answered_s = now_s

    def stood_still(self, seconds: float) -> None:
        """This process read nothing for so long: that is no silence of the engine."""
        self._brought_s += seconds
        self._answered_s += seconds
        self._moved_s += seconds
        self._counted_s += seconds
        self._iterated_s += seconds

    def health(self, status: int) -> bool:
        """`/health` was answered; return whether the engine is out."""
        self._bad_health = 0 if status == 200 else self._bad_health + 1
        return self._bad_health >= BAD_HEALTH

    def counted(
        self, now_s: float, iterations: float | None, tokens: float | None, kv_tokens: int
    ) -> None:
        """The counters of iterations and of their tokens were read, and the KV that is used.

        None: there is no such counter.
        """
        done = 0.0
        if iterations is not None and self._iterations is not None:
            done = iterations - self._iterations
        if done > 0.0:
            self.iteration_s, self._iterated_s = (now_s - self._iterated_s) / done, now_s
        self._counted_s = now_s
        # Used KV falls by itself when clients leave; only work makes it grow.
        if iterations is None or iterations != self._iterations or kv_tokens > self._kv_tokens:
            self._moved_s = now_s
        before = tokens if self._tokens is None else self._tokens
        prefilled = 0.0 if tokens is None else tokens - (before or 0.0) - self._decoded
        taken = kv_tokens - self._kv_tokens + self._left - self._decoded
        self.grows = taken > PREFILL_TOKENS
        if prefilled > PREFILL_TOKENS:
            self.prefilled += prefilled
        if self.grows or prefilled > PREFILL_TOKENS:
            self._without_prefill = 0.0
        else:
            self._without_prefill += max(done, 0.0)
        self._iterations, self._tokens, self._kv_tokens = iterations, tokens, kv_tokens
        self._decoded = self._left = 0

    def moves(self, now_s: float) -> bool:
        """Whether it computes: tokens came, or its counters moved, within half of `silence_s`."""
        recently_s = now_s - self._silence_s / 2
        counter_moves = self._iterations is not None and self._moved_s > recently_s
        return self._brought_s > recently_s or counter_moves

    def prefills(self) -> bool:
        """Whether its latest iterations may have prefilled anything."""
        return self._without_prefill < WITHOUT_PREFILL

    def hung(self, now_s: float, *, streams: bool, expected_s: float) -> str:
        """Why the engine counts as hung; "" while it does not.

        `streams`: whether any stream is open. `expected_s`: what prefill and queue of a silent one
        should take.
        """
        unanswered_s = now_s - self._answered_s
        if not streams:
            if unanswered_s < 2 * self._silence_s:
                return ""
            return f"no call was answered for {unanswered_s:.0f} s"
        silent_s = now_s - self._brought_s
        if silent_s < self._silence_s:
            return ""
        if unanswered_s >= self._silence_s:
            return f"streams and calls brought nothing for {silent_s:.0f} s"
        limit_s = max(self._silence_s, EXPECTED_SHARE * expected_s)
        still_s = self._counted_s - self._moved_s
        if self._iterations is not None and min(silent_s, still_s) >= limit_s:
            return f"its streams are silent and its iterations stand still for {still_s:.0f} s"
        return ""
