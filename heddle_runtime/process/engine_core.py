"""An inference engine as its process sees it: a thing that is stepped by hand.

`heddle_runtime.vllm.process` makes one of vLLM; tests make one of nothing.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

Finish: TypeAlias = Literal["", "length", "stop", "abort", "error"]
Activity: TypeAlias = Literal["computing", "waiting", "idle"]
"""`waiting`: nothing to compute, but a transfer to watch."""


class Output(NamedTuple):
    """What one iteration did for one request."""

    request: str
    tokens: list[int]
    finish: Finish
    scheduled_s: float
    """When it first began to run, told once; 0 otherwise."""
    preemptions: int
    """How often its KV was taken away since the last output."""
    cached_tokens: int
    """Told with the first token; -1 otherwise."""
    kv: dict[str, Any] | None
    """Where its KV can be pulled from, if that was asked for."""


class Core(Protocol):
    """An inference engine that is stepped by hand."""

    block_tokens: int

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
    ) -> None:
        """Take a request; raises ValueError if it can never run.

        `salt` keeps KV of other weights from being found; `kv` is to be pulled, `export` asks to
        keep the request's own KV for a pull. A pinned one (`pin`) keeps its blocks when it ends,
        until it is aborted or goes on: then `known` tokens of the prompt are in them.
        """

    def abort(self, request: str) -> None:
        """Drop a request; its KV stays in the prefix cache."""

    def step(self) -> Iterable[Output]:
        """Run one iteration."""
        ...

    def activity(self) -> Activity:
        """Whether there is anything to step for."""
        ...

    def has_begun(self, request: str) -> bool:
        """Whether a request has left the queue, or its pull has begun."""
        ...

    def release(self, exported: str) -> None:
        """Keep an exported request's KV no longer, where that is possible."""

    def load_weights(self, path: str) -> None:
        """Replace the weights; nothing is running."""

    def counters(self) -> tuple[int, int, int]:
        """Return requests running and waiting, and tokens of KV in use."""
        ...

    def sleep(self, level: int) -> None:
        """Give memory back."""

    def wake(self) -> None:
        """Take it again."""
