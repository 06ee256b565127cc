"""What a client's request says of a generation, and what the engine reports beside its tokens.

A gateway's agents send the one as `StepRequest.payload` and get the other as `StepResult.extras`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""vLLM's names."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are to be sampled."""

    sampling: dict[str, Any] = {}
    """Fields of vLLM's `SamplingParams`, as JSON values. `max_tokens` is the step's own."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of equal salt; "": between all."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called with new tokens while the dispatch runs. Those of the result that were not reported
    before are not reported again by it: the result is always whole."""


class GenerationEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine reported of one dispatch."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""
    logprobs: tuple[Any, ...] = ()
    """One JSON object for each token, in vLLM's form of `logprobs.content`, where asked for."""
    weight_versions: tuple[Any, ...] = ()
    """Spans of output by version of the weights, where the engine reports them."""
