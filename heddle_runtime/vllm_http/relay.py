"""Events of vLLM's chat and completion streams, checked as they are passed on to a client."""

from typing import Any

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_runtime.vllm_http.probe import CHAT, COMPLETIONS
from heddle_runtime.vllm_http.stream import ProtocolError

_ENGINE_IDS = {CHAT: "chatcmpl-{}", COMPLETIONS: "cmpl-{}-0"}
_FINISHES = frozenset({"stop", "length", "abort", "repetition", "tool_calls", "function_call"})


_LAST_EVENTS = frozenset(
    {"message_stop", "response.completed", "response.incomplete", "response.failed"}
)
MOST_CALLS = 4096
"""Tool calls of one answer; vLLM's parsers number them from 0."""


class EngineError(Exception):
    """An engine's error object, in an answer or in an event of a stream."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(str(body["error"].get("message", "")))
        self.status, self.body = status, body


def engine_id(path: str, request_id: str) -> str:
    """The id by which vLLM knows a request: an order to abort names it. "": none is known."""
    return _ENGINE_IDS.get(path, "").format(request_id)


def relay_body(
    body: dict[str, Any],
    request_id: str,
    *,
    streams: bool,
    counts_tokens: bool,
    counts_each: bool,
    interval: int = 1,
) -> dict[str, Any]:
    """Return a client's body as it is sent to an engine.

    With `counts_tokens`, events bring token ids and the last one what was found in the prefix
    cache; with `counts_each` each says how many tokens there are by then, so that one that comes
    twice is seen. What the client did not ask for is taken out again on the way back. Where it
    does not stream, an event has `interval` tokens: in one without text, as of half a character,
    vLLM 0.32 counts no reasoning token.
    """
    sent = {**body, "request_id": request_id}
    if not counts_tokens:
        return sent
    sent |= {"stream": True, "return_token_ids": True}
    if not streams:
        sent.setdefault("stream_interval", interval)
    options = body.get("stream_options") if streams else None
    options = dict(options) if isinstance(options, dict) else {}
    wanted = bool(options.get("include_usage") and options.get("continuous_usage_stats"))
    each = {"include_usage": True, "continuous_usage_stats": wanted or counts_each}
    sent["stream_options"] = options | each
    return sent


def read_object(data: bytes) -> dict[str, Any]:
    """Decode an answer or an event.

    Raises:
        ProtocolError: it is no JSON object.
        EngineError: it is an error.
    """
    try:
        found = msgspec.json.decode(data)
    except NO_JSON as error:
        raise ProtocolError(f"it sent what is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ProtocolError("it sent what is no JSON object")
    if (said := found.get("error")) is not None:
        raise EngineError(_status_of(said), {"error": _error_object(said)})
    return found


def _status_of(error: Any) -> int:
    """The HTTP status that an error object stands for."""
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, bool) or not isinstance(code, int) or not 400 <= code < 600:
        return 500
    return code


def _error_object(error: Any) -> dict[str, Any]:
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return error
    text = error if isinstance(error, str) else msgspec.json.encode(error).decode()[:500]
    return {"message": text, "type": "InternalServerError", "param": None, "code": 500}


def check_event(found: dict[str, Any]) -> tuple[list[int], str | None, int | str | None]:
    """Return the token ids of a stream's event, how it ends, and the stop token or string.

    Raises:
        ProtocolError: it is not what vLLM sends.
    """
    choices = found.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise ProtocolError("it sent an event without one list of at most one choice")
    if not isinstance(found.get("usage"), dict | None):
        raise ProtocolError("it sent a usage that is no object")
    if not choices:
        return [], None, None
    choice = choices[0]
    if not isinstance(choice, dict):
        raise ProtocolError("it sent a choice that is no object")
    ids, finish = choice.get("token_ids") or [], choice.get("finish_reason")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ProtocolError("it sent token ids that are none")
    if finish is not None and not (isinstance(finish, str) and finish in _FINISHES):
        raise ProtocolError(f"it ended with {str(finish)[:80]!r}, which is no end")
    body = choice.get("delta") if "delta" in choice else choice.get("text")
    if not isinstance(body, dict | str):
        raise ProtocolError("it sent a choice without text")
    if isinstance(body, dict) and not _is_delta(body):
        raise ProtocolError("it sent a delta that is not that of a chat")
    if not _are_logprobs(choice.get("logprobs")):
        raise ProtocolError("it sent log-probs that are none")
    return ids, finish, choice.get("stop_reason")


def empty(choice: dict[str, Any]) -> None:
    """Take out of a choice what it brings, but not how it ends."""
    choice |= {"token_ids": [], "logprobs": None}
    if "delta" in choice:
        choice["delta"] = {}
    else:
        choice["text"] = ""


def _is_delta(delta: dict[str, Any]) -> bool:
    for name in ("role", "content", "reasoning"):
        if not isinstance(delta.get(name), str | None):
            return False
    calls = delta.get("tool_calls")
    return calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(call: Any) -> bool:
    function = call.get("function") or {} if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    index = call.get("index")
    placed = index is None or (type(index) is int and 0 <= index < MOST_CALLS)
    texts = (call.get("id"), function.get("name"), function.get("arguments"))
    return placed and all(isinstance(text, str | None) for text in texts)


def _are_logprobs(found: Any) -> bool:
    """Whether it is log-probs of a chat, or of a completion, which has lists by name."""
    if not isinstance(found, dict):
        return found is None
    lists = [value for value in found.values() if value is not None]
    if not all(isinstance(each, list) for each in lists):
        return False
    return all(isinstance(entry, dict) for entry in found.get("content") or ())


def ends_answer(found: dict[str, Any]) -> bool:
    """Whether it is the last event of a forwarded stream."""
    return found.get("type") in _LAST_EVENTS


def forwarded_counts(found: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return output and cached tokens that a forwarded answer or event says, where it does."""
    inner = found.get("response") or found.get("message")
    usage = found.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
    usage = usage if isinstance(usage, dict) else {}
    details = usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    counts = usage.get("output_tokens"), cached or usage.get("cache_read_input_tokens")
    made, cached = (n if type(n) is int and n >= 0 else None for n in counts)
    return made, cached


def cached_tokens(found: dict[str, Any]) -> int | None:
    """Prompt tokens that an answer or event says came from the prefix cache, if it says so."""
    usage = found.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


def completion_tokens(found: dict[str, Any]) -> int | None:
    """Tokens that an answer or event says it made, if it says so."""
    usage = found.get("usage")
    made = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return made if isinstance(made, int) and made >= 0 else None
