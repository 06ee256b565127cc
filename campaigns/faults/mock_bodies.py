"""Bodies of `vllm serve` 0.32 for tokens that only count: prompts, answers, chunks, refusals.

The next token depends on the whole context, and each token has a text of its own: one that is lost
or made twice shows in tokens and in text. Shapes are those of vLLM's `entrypoints/openai` and
`entrypoints/scale_out`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/inference/v1/generate"
PREFIXES: Final[Mapping[str, str]] = {
    CHAT: "chatcmpl-",
    COMPLETIONS: "cmpl-",
    GENERATE: "generate-tokens-",
}
"""What vLLM puts before the id of a request."""
MODEL: Final = "counting"
DEFAULT_TOKENS: Final = 16
"""`max_tokens` of a completion without one, and of vLLM's `SamplingParams`."""
BYTES_FROM: Final = 2000
"""Token id of the byte 0 in a prompt of text; tokens of outputs are below."""
_MARKS: Final[Mapping[str, int]] = {"": 10_000, "render": 20_000, "sse": 30_000, "mid": 40_000}
_MARK: Final = re.compile(r"!(render|sse|mid|)(4\d\d)")
LOGPROB: Final = -0.5


class MockRefusalError(Exception):
    """A request that is answered with an error in OpenAI's envelope."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status, self.param = status, param
        self.kind = kind or {404: "NotFoundError"}.get(status, "BadRequestError")

    @property
    def body(self) -> dict[str, Any]:
        """The whole answer."""
        return error_body(self.status, str(self), kind=self.kind, param=self.param)


def error_body(
    status: int, message: str, *, kind: str = "InternalServerError", param: str | None = None
) -> dict[str, Any]:
    """Return vLLM's `ErrorResponse`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def next_token(context: Sequence[int], model: str = MODEL) -> int:
    """Return the token that this "model" makes of a context: from 300 to 1799."""
    return (sum(context[-7:]) * 31 + len(context) * 7 + len(model)) % 1500 + 300


def continued(prompt: Sequence[int], tokens: int, model: str = MODEL) -> list[int]:
    """Return so many tokens after a prompt."""
    context = list(prompt)
    for _ in range(tokens):
        context.append(next_token(context, model))
    return context[len(prompt) :]


def without_output(ids: Sequence[int]) -> Sequence[int]:
    """Return the prompt that a generation began with, of one that goes on elsewhere."""
    end = len(ids)
    while end > 1 and next_token(ids[: end - 1]) == ids[end - 1]:
        end -= 1
    return ids[:end]


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens of an output."""
    return "".join(f"t{token} " for token in tokens)


def ids_of(text: str) -> list[int]:
    """Return the tokens of a prompt; a mark such as `!413`, `!sse400` is one token.

    A marked prompt is refused: with that status; also by rendering (`!render400`); in an event of
    a stream before its first token (`!sse400`), or after some (`!mid400`).
    """
    ids: list[int] = []
    end = 0
    for mark in _MARK.finditer(text):
        ids += (BYTES_FROM + byte for byte in text[end : mark.start()].encode())
        ids.append(_MARKS[mark[1]] + int(mark[2]))
        end = mark.end()
    return ids + [BYTES_FROM + byte for byte in text[end:].encode()]


def mark_of(ids: Sequence[int]) -> tuple[str, int] | None:
    """Return where and with which status a prompt is refused; None: nowhere."""
    for each in ids:
        for kind, base in _MARKS.items():
            if 400 <= each - base < 500:
                return kind, each - base
    return None


def refusal_words(status: int, ids: Sequence[int]) -> str:
    """Return what an engine says of a marked prompt; it differs between prompts."""
    return f"this prompt of {len(ids)} tokens, sum {sum(ids)}, is refused with {status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a request of generation wants."""

    path: str
    ids: list[int]
    max_tokens: int
    request_id: str
    """With the prefix of its path."""
    stream: bool = False
    include_usage: bool = False
    usage_each: bool = False
    return_token_ids: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    logprobs: int | None = None
    interval: int = 1


def wanted(path: str, body: Mapping[str, Any], *, context_tokens: int, request_id: str) -> Wanted:
    """Read a body.

    Raises:
        MockRefusalError: vLLM refuses it with status 400.
    """
    sampling = body.get("sampling_params", {}) if path == GENERATE else body
    if not isinstance(sampling, Mapping):
        raise MockRefusalError(400, "sampling_params is no object", param="sampling_params")
    _check(sampling)
    ids = prompt_of(path, body)
    left = context_tokens - len(ids)
    default = DEFAULT_TOKENS if path == COMPLETIONS else left
    limit = sampling.get("max_tokens")
    if path == CHAT:
        limit = sampling.get("max_completion_tokens", limit)
    limit = default if limit is None else limit
    if limit > left:
        raise MockRefusalError(
            400,
            f"the context has {context_tokens} tokens, and {len(ids)} and {limit} are wanted",
            param="input_tokens",
        )
    stop = sampling.get("stop") or ()
    logprobs = sampling.get("logprobs")
    if path == CHAT:
        logprobs = (sampling.get("top_logprobs") or 0) if logprobs else None
    return Wanted(
        path=path,
        ids=ids,
        max_tokens=limit,
        request_id=PREFIXES[path] + request_id,
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        usage_each=bool((body.get("stream_options") or {}).get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        stop_token_ids=tuple(sampling.get("stop_token_ids") or ()),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        keeps_stop=bool(sampling.get("include_stop_str_in_output")),
        logprobs=logprobs,
        interval=int(sampling.get("stream_interval") or 1),
    )


def _check(sampling: Mapping[str, Any]) -> None:
    """Refuse values outside of the ranges that vLLM's `SamplingParams` states."""
    for name, low, high in (
        ("temperature", 0.0, float("inf")),
        ("top_p", 1e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("max_tokens", 1, float("inf")),
        ("max_completion_tokens", 1, float("inf")),
    ):
        value = sampling.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MockRefusalError(400, f"{name} is no number: {value!r}", param=name)
        if not low <= value <= high:
            raise MockRefusalError(400, f"{name} is {value}, outside of its range", param=name)


def prompt_of(path: str, body: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a body's prompt.

    Raises:
        MockRefusalError: it has none.
    """
    if path == GENERATE:
        return [int(token) for token in body["token_ids"]]
    if path == CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise MockRefusalError(400, "messages is no list", param="messages")
        parts = [f"<{m.get('role')}>{m.get('content') or ''}" for m in messages]
        return ids_of("".join([*parts, "<assistant>"]))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return ids_of(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(t, int) for t in prompt):
        return list(prompt)
    raise MockRefusalError(400, "prompt is no text and no list of ids", param="prompt")


_ALWAYS: Final[Mapping[str, Any]] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop": [],
    "stop_token_ids": [],
    "output_kind": 2,
    "skip_clone": True,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
}
"""Fields of rendered sampling that vLLM 0.32 never leaves out, with their values of no request."""
_IF_OTHER: Final[Mapping[str, Any]] = {
    "n": 1,
    "top_k": 0,
    "seed": None,
    "ignore_eos": False,
    "min_tokens": 0,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "logit_bias": None,
    "allowed_token_ids": None,
}
"""Fields that are left out at these, their defaults."""


def rendered_sampling(body: Mapping[str, Any], want: Wanted) -> dict[str, Any]:
    """Return `sampling_params` as rendering returns them: without values equal to a default."""
    sampling = {
        name: body[name] if body.get(name) is not None else value for name, value in _ALWAYS.items()
    }
    if isinstance(sampling["stop"], str):
        sampling["stop"] = [sampling["stop"]]
    for name, value in _IF_OTHER.items():
        if body.get(name, value) not in (None, value):
            sampling[name] = body[name]
    if want.max_tokens != DEFAULT_TOKENS:
        sampling["max_tokens"] = want.max_tokens
    if want.logprobs is not None:
        sampling["logprobs"] = want.logprobs
    if want.stream:
        sampling["output_kind"] = 1
    return sampling


def rendered(body: Mapping[str, Any], want: Wanted) -> dict[str, Any]:
    """Return the `GenerateRequest` that rendering answers with."""
    return {
        "request_id": want.request_id,
        "token_ids": want.ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": rendered_sampling(body, want),
        "model": body.get("model"),
        "reasoning_ended": True if want.path == CHAT else None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": want.stream,
        "stream_options": body.get("stream_options") if want.stream else None,
        "cache_salt": body.get("cache_salt"),
        "priority": body.get("priority", 0),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }
