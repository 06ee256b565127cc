"""The interface of an inference engine whose iterations our own loop runs one by one.

`heddle_runtime.vllm.process` implements it with vLLM; tests implement it without a model.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

Finish: TypeAlias = Literal["", "length", "stop", "abort", "error"]
Activity: TypeAlias = Literal["computing", "waiting", "idle"]
"""`waiting`: nothing to compute, but a transfer is under way."""
TopLogprobs: TypeAlias = list[tuple[int, float, int]]
"""Token, log-prob and rank of the sampled token, then of the most likely ones."""


class IterationOutput(NamedTuple):
    """What one iteration did for one request."""

    request: str
    tokens: list[int]
    finish: Finish
    scheduled_s: float
    """When it first began to run, reported once; 0 otherwise."""
    preemptions: int
    """Preemptions since the last output."""
    cached_tokens: int
    """Reported with the first token; -1 otherwise."""
    kv: dict[str, Any] | None
    """Where its KV can be pulled from; None unless exported."""
    logprobs: Sequence[float] = ()
    """Of `tokens`; empty unless the settings or the request want them."""
    top: Sequence[TopLogprobs] = ()
    """Of `tokens`; empty unless the request wants them."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""


class SteppedEngine(Protocol):
    """An inference engine; each call of `step` runs one iteration."""

    block_tokens: int
    drafted: tuple[int, ...]
    """As in `wire.Sampled`; empty without speculative decoding."""

    def add(
        self,
        request: str,
        prompt: list[int],
        *,
        max_tokens: int,
        exact: bool = True,
        seed: str = "",
        salt: str = "",
        kv: dict[str, Any] | None = None,
        export: bool = False,
        pin: bool = False,
        known: int = 0,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        """Take a request; raises ValueError if it can never run.

        `sampling` has the fields of vLLM's `SamplingParams`; None: those of the settings. `salt`
        separates KV of different weights and clients in the prefix cache. `kv` is the handle of KV
        to pull. `export` keeps the request's KV for a pull. A pinned request (`pin`) keeps its
        blocks after its end, until it is aborted or continued; then they hold `known` tokens of the
        prompt.
        """

    def abort(self, request: str) -> None:
        """Drop a request; its KV stays in the prefix cache."""

    def step(self) -> Iterable[IterationOutput]:
        """Run one iteration."""
        ...

    def activity(self) -> Activity:
        """Whether `step` has anything to do."""
        ...

    def has_begun(self, request: str) -> bool:
        """Whether a request has left the queue, or its pull has begun."""
        ...

    def release(self, exported: str) -> None:
        """Release an exported request's KV early, where that is possible."""

    def load_weights(self, path: str, *, keep_kv: bool = False) -> None:
        """Replace the weights between two iterations; nothing runs unless `keep_kv`."""

    def counters(self) -> tuple[int, int, int]:
        """Return requests running and waiting, and tokens of KV in use."""
        ...

    def sleep(self, level: int) -> None:
        """Free accelerator memory."""

    def wake(self) -> None:
        """Allocate it again."""
