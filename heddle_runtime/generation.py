"""What a client's request says of a generation, and what the engine reports beside its tokens.

A gateway's agents send the one as `StepRequest.payload` and get the other as `StepResult.extras`.
"""

import asyncio
from array import array
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
    features: dict[str, Any] = {}
    """Further fields of vLLM's generate request that rendering returned; engines of one's own have
    no use for them."""


def report_tokens(payload: Any, tokens: Sequence[int]) -> None:
    """Call a payload's `on_tokens`. Its errors end the run, not the engine that calls."""
    if not (tokens and isinstance(payload, Generation) and payload.on_tokens is not None):
        return
    try:
        payload.on_tokens(tokens)
    except Exception as error:
        asyncio.get_running_loop().call_exception_handler(
            {"message": "on_tokens has failed", "exception": error, "handle": None}
        )


class GenerationEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine reported of one dispatch."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""
    logprobs: tuple[Any, ...] = ()
    """One JSON object for each token, in vLLM's form of `logprobs.content`, where asked for."""
    weight_versions: tuple[Any, ...] = ()
    """Spans of output by version of the weights, where the engine reports them."""


class Rendered(msgspec.Struct, kw_only=True):
    """A client's request body as tokens: what an engine needs, and what the answer is made from."""

    prompt_ids: "array[int]"
    sampling: dict[str, Any] = {}
    """Fields of vLLM's `SamplingParams`, as JSON values, `max_tokens` excepted."""
    max_tokens: int | None = None
    """Most tokens of output; None: as many as the engine's context has room for."""
    features: dict[str, Any] = {}
    """The rest that rendering returned; the renderer makes the response from it."""


class RenderError(Exception):
    """The renderer refused a request body."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", error)))
        self.status = status
        """HTTP status for the client."""
        self.error = error
        """OpenAI's error object: `message`, `type`, `param`, `code`."""
