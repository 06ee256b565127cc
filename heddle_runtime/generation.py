"""What a client's request says of a generation, and what the engine reports beside its tokens.

A gateway's agents send the one as `StepRequest.payload` and get the other as `StepResult.extras`.
"""

import asyncio
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""vLLM's names."""


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """A client's own request, which an engine that has the endpoint may answer by itself."""

    path: str
    """`/v1/chat/completions`, `/v1/completions`, or one whose answers are passed on as they are."""
    body: dict[str, Any]
    streams: bool
    """Whether it is asked as a stream."""
    counts_tokens: bool
    """Whether each event is to bring its token ids. Otherwise the tokens are known to the client
    only, and the step cannot be resumed."""
    on_begin: Callable[[], None]
    """Called when an engine begins, from the start: earlier events count no more."""
    on_event: Callable[[dict[str, Any]], None]
    """Called with each event of a stream as it comes, or with the whole answer, before `on_tokens`
    is called with its tokens."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer that a request cannot be served; the client gets it as it is."""

    status: int
    body: dict[str, Any]
    """With `error`: `message`, `type`, `param` and `code`."""
    retry_after_s: float | None = None
    in_stream: bool = False
    """Whether it came as an event of a stream, after a status of 200."""


class StepAttempts(msgspec.Struct, kw_only=True):
    """What happened to one step at engines so far; shared by all its dispatches."""

    failed_at: list[str] = []
    """URLs of engines that answered the step with a fault of their own."""
    cuts: int = 0
    """Calls of engines that broke off."""
    moved_from: list[str] = []
    """URLs of engines that the step left because it brought nothing there."""
    connected: bool = True
    """Whether the latest engine could be connected, so that the step may be why it died."""


class TraceContext(msgspec.Struct, frozen=True):
    """Which trace a call belongs to (https://www.w3.org/TR/trace-context)."""

    trace_id: str = ""
    """"": the trace of the trajectory."""
    span_id: str = ""
    """"": each call has one of its own."""
    flags: str = "01"


_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)


def trace_context(header: str) -> TraceContext:
    """Read `traceparent`; one that is none says nothing."""
    found = _TRACEPARENT.fullmatch(header) if header else None
    return TraceContext(*found.groups()) if found else TraceContext()


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are to be sampled."""

    sampling: dict[str, Any] = {}
    """Fields of vLLM's `SamplingParams`, as JSON values. `max_tokens` is the step's own."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of equal salt; "": between all."""
    on_tokens: Callable[[Sequence[int]], None] | None = None
    """Called with new tokens while the dispatch runs. Those of the result that were not reported
    before are not reported again by it: the result is always whole."""
    on_logprobs: Callable[[Sequence[Any]], None] | None = None
    """Called before `on_tokens` with the log-probs of its tokens, where they are asked for, in
    vLLM's form of `logprobs.content`."""
    features: dict[str, Any] = {}
    """Further fields of vLLM's generate request that rendering returned; engines of one's own have
    no use for them."""
    streams: bool = False
    """Whether the client gets tokens as they come."""
    relay: Relay | None = None
    """The client's own request, where no token of the step has been made yet."""
    attempts: StepAttempts = msgspec.field(default_factory=StepAttempts)
    adapter: str = ""
    """The LoRA adapter that it is for; only engines that list it can run it."""
    name: str = ""
    """The client's id of its request: ids of calls of engines begin with it."""
    trace: TraceContext = TraceContext()
    prompt_json: bytes = b""
    """The step's whole prompt as JSON, where it is known."""


def report_tokens(payload: Any, tokens: Sequence[int], logprobs: Sequence[Any] = ()) -> None:
    """Call a payload's `on_logprobs` and `on_tokens`. Their errors end the run, not the engine that
    calls.
    """
    if not (tokens and isinstance(payload, Generation)):
        return
    try:
        if logprobs and payload.on_logprobs is not None:
            payload.on_logprobs(logprobs)
        if payload.on_tokens is not None:
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
    cached_tokens: int | None = None
    """Prompt tokens from the prefix cache; None where the engine does not report them."""


class Rendered(msgspec.Struct, kw_only=True):
    """A client's request body as tokens: what an engine needs, and what the answer is made from."""

    prompt_ids: "array[int]"
    sampling: dict[str, Any] = {}
    """Fields of vLLM's `SamplingParams`, as JSON values, `max_tokens` excepted."""
    max_tokens: int | None = None
    """Most tokens of output; None: as many as the engine's context has room for."""
    features: dict[str, Any] = {}
    """The rest that rendering returned; the renderer makes the response from it."""
    prompt_json: bytes = b""
    """`prompt_ids` as JSON, where that is known."""
    prompt_hash: Any = None
    """Their SHA-256, where that is known: of a prompt that grows, only what came is hashed."""


class RenderError(Exception):
    """The renderer refused a request body."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message", error)))
        self.status = status
        """HTTP status for the client."""
        self.error = error
        """OpenAI's error object: `message`, `type`, `param`, `code`."""
