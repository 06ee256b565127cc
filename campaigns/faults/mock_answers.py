"""Answers of `vllm serve` 0.32 to one request, whole or in chunks; see `mock_bodies`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from campaigns.faults.mock_bodies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    LOGPROB,
    MODEL,
    MockRefusalError,
    Wanted,
    text_of,
)

BLOCK: Final = 16
BLOCKS: Final = 65_537
CREATED: Final = 1_700_000_000
_KINDS: Final[Mapping[str, tuple[str, str]]] = {
    CHAT: ("chat.completion", "chat.completion.chunk"),
    COMPLETIONS: ("text_completion", "text_completion"),
    GENERATE: ("", ""),
}


class Answering:
    """The output of one request as its client gets it."""

    def __init__(self, want: Wanted, *, model: str = MODEL, cached: int | None = None) -> None:
        """`cached`: prompt tokens from the prefix cache; None: not reported."""
        self._want, self._model, self._cached = want, model, cached
        self.made: list[int] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self._text = ""
        self._sent = 0
        """Characters of the text that were sent."""

    def take(self, token: int) -> bool:
        """Add a token; return whether the output ends with it."""
        want = self._want
        self.made.append(token)
        self._text += text_of([token])
        if token in want.stop_token_ids:
            self._end("stop", token)
            if not want.keeps_stop:
                self._text = self._text[: -len(text_of([token]))]
            return True
        for stop in want.stops:
            at = self._text.find(stop)
            if at >= 0:
                self._end("stop", stop)
                self._text = self._text[: at + len(stop) * want.keeps_stop]
                return True
        if len(self.made) >= want.max_tokens:
            self._end("length", None)
        return self.finish is not None

    def _end(self, finish: str, reason: int | str | None) -> None:
        self.finish, self.stop_reason = finish, reason

    def abort(self) -> None:
        """End with the tokens so far."""
        self._end("abort", None)

    # -- chunks ------------------------------------------------------------------------------------

    def _head(self, *, whole: bool = False) -> dict[str, Any]:
        want = self._want
        if want.path == GENERATE:
            return {"request_id": want.request_id, "output_mode": "tokens"}
        kind = _KINDS[want.path][0 if whole else 1]
        return {"id": want.request_id, "object": kind, "created": CREATED, "model": self._model}

    def first(self) -> dict[str, Any] | None:
        """Return the chunk before the first token: the role of a chat; None where there is none."""
        want = self._want
        if want.path != CHAT:
            return None
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = want.ids if want.return_token_ids else None
        return {**self._head(), "choices": [choice], "prompt_token_ids": ids}

    def chunk(self, since: int) -> dict[str, Any]:
        """Return the chunk of the tokens from number `since` on."""
        want, tokens = self._want, self.made[since:]
        choice: dict[str, Any] = {"index": 0}
        text = self._new_text()
        if want.path == CHAT:
            choice["delta"] = {"content": text}
        elif want.path == COMPLETIONS:
            choice["text"] = text
        choice |= {"logprobs": self._logprobs(since), "finish_reason": self.finish}
        if want.path != CHAT or self.finish is not None:
            choice["stop_reason"] = self.stop_reason
        if want.path == COMPLETIONS:
            first = want.return_token_ids and since == 0
            choice["prompt_token_ids"] = want.ids if first else None
        if want.path == GENERATE or want.return_token_ids:
            choice["token_ids"] = tokens
        else:
            choice["token_ids"] = None
        chunk = {**self._head(), "choices": [choice]}
        if want.include_usage and want.usage_each:
            chunk["usage"] = self._usage()
        if want.path == GENERATE and want.return_token_ids and since == 0:
            chunk["prompt_token_ids"] = want.ids
        return chunk

    def _new_text(self) -> str:
        """Text that no stop string can take back any more."""
        held = 0 if self.finish else max((len(stop) - 1 for stop in self._want.stops), default=0)
        end = max(self._sent, len(self._text) - held)
        text = self._text[self._sent : end]
        self._sent = end
        return text

    def last(self) -> dict[str, Any] | None:
        """Return the chunk of the counts; None where the client did not want it."""
        if not self._want.include_usage:
            return None
        return {**self._head(), "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        prompt, made = len(self._want.ids), len(self.made)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + made,
            "completion_tokens": made,
        }
        if self._cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self._cached}
        return usage

    def _logprobs(self, since: int) -> dict[str, Any] | None:
        want, tokens = self._want, self.made[since:]
        if want.logprobs is None:
            return None
        if want.path == GENERATE:
            return {"content": [_of_id(token) for token in tokens]}
        if want.path == CHAT:
            return {"content": [_of_text(token) for token in tokens]}
        offsets, at = [], len(text_of(self.made[:since]))
        for token in tokens:
            offsets.append(at)
            at += len(text_of([token]))
        return {
            "text_offset": offsets,
            "token_logprobs": [LOGPROB] * len(tokens),
            "tokens": [text_of([token]) for token in tokens],
            "top_logprobs": [{text_of([token]): LOGPROB} for token in tokens],
        }

    # -- the whole ---------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        want = self._want
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(0)}
        answer = self._head(whole=True)
        ids = want.ids if want.return_token_ids else None
        if want.path == CHAT:
            choice["message"] = {"role": "assistant", "content": self._text, "tool_calls": []}
            answer["prompt_token_ids"] = ids
        elif want.path == COMPLETIONS:
            choice |= {"text": self._text, "prompt_token_ids": ids}
        elif ids is not None:
            answer["prompt_token_ids"] = ids
        shows = want.path == GENERATE or want.return_token_ids
        choice |= {
            "finish_reason": self.finish,
            "stop_reason": self.stop_reason,
            "token_ids": self.made if shows else None,
        }
        return {**answer, "choices": [choice], "usage": self._usage()}


def _of_id(token: int) -> dict[str, Any]:
    entry = {"token_id": token, "logprob": LOGPROB, "rank": 1}
    return {**entry, "top_logprobs": [entry]}


def _of_text(token: int) -> dict[str, Any]:
    text = text_of([token])
    return {
        "token": text,
        "logprob": LOGPROB,
        "bytes": list(text.encode()),
        "top_logprobs": [],
    }


def derendered(path: str, body: Mapping[str, Any], *, model: str = MODEL) -> dict[str, Any]:
    """Return what derendering answers: a whole response, or a chunk with the state after it.

    Its text has every token, also one that ended the output: no stop is known here.

    Raises:
        MockRefusalError: a whole response has no tokens, or it has no one choice.
    """
    if body.get("stream"):
        return _derendered_chunk(path, body, model)
    chat = path == CHAT
    given = body["generate_response"] if chat else body["generate_responses"][0]
    made = _only_choice(given)
    ids: Sequence[int] = made.get("token_ids") or ()
    if not ids:
        raise MockRefusalError(400, "choice 0 has no tokens")
    prompt_tokens = body.get("prompt_tokens") if chat else (body.get("prompt_tokens") or [0])[0]
    prompt_tokens = prompt_tokens or 0
    text = text_of(ids)
    choice: dict[str, Any] = {"index": 0}
    if chat:
        choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
    else:
        choice["text"] = text
    choice |= {
        "logprobs": _text_logprobs(path, made, 0),
        "finish_reason": made.get("finish_reason"),
        "stop_reason": made.get("stop_reason"),
    }
    return {
        "id": given.get("request_id") or "",
        "object": _KINDS[path][0],
        "created": CREATED,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "total_tokens": prompt_tokens + len(ids),
        },
    }


def _derendered_chunk(path: str, body: Mapping[str, Any], model: str) -> dict[str, Any]:
    chat, given = path == CHAT, body["generate_chunk"]
    made, state = _only_choice(given), body.get("stream_state") or {}
    request = body.get("chat_request" if chat else "completion_request") or {}
    ids: Sequence[int] = made.get("token_ids") or ()
    before = state.get("read_offset", 0)
    choice: dict[str, Any] = {"index": 0}
    if chat:
        role = None if state.get("role_sent") else "assistant"
        choice["delta"] = {"role": role, "content": text_of(ids)}
    else:
        choice["text"] = text_of(ids)
    choice |= {
        "logprobs": _text_logprobs(path, made, before),
        "finish_reason": made.get("finish_reason"),
        "stop_reason": made.get("stop_reason"),
        "token_ids": list(ids) if request.get("return_token_ids") else None,
    }
    chunk = {
        "id": given.get("request_id") or "",
        "object": _KINDS[path][1],
        "created": CREATED,
        "model": model,
        "choices": [choice],
        "usage": None,
    }
    after = {"read_offset": before + len(text_of(ids)), "role_sent": True, "prev_tokens": []}
    return {"chunk": chunk, "stream_state": after}


def _only_choice(given: Mapping[str, Any]) -> Mapping[str, Any]:
    choices: Sequence[Mapping[str, Any]] = given.get("choices") or ()
    if len(choices) != 1:
        raise MockRefusalError(400, f"one choice is expected, not {len(choices)}")
    return choices[0]


def _text_logprobs(path: str, made: Mapping[str, Any], at: int) -> dict[str, Any] | None:
    """Log-probs of ids as those of texts; `at`: characters before the first."""
    content = (made.get("logprobs") or {}).get("content")
    if not content:
        return None
    ids = [entry["token_id"] for entry in content]
    if path == CHAT:
        return {"content": [_of_text(token) for token in ids]}
    return {
        "text_offset": [at + len(text_of(ids[:n])) for n in range(len(ids))],
        "token_logprobs": [entry["logprob"] for entry in content],
        "tokens": [text_of([token]) for token in ids],
        "top_logprobs": [{text_of([token]): LOGPROB} for token in ids],
    }


def metrics_text(
    *, running: int, waiting: int, usage: float, iterations: int, iteration_tokens: int
) -> str:
    """Return `/metrics`, as far as it is used: `usage` is the share of the KV cache."""
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    return (
        f"vllm:num_requests_running{labels} {running}.0\n"
        f"vllm:num_requests_waiting{labels} {waiting}.0\n"
        f"vllm:kv_cache_usage_perc{labels} {usage}\n"
        f"vllm:num_preemptions_total{labels} 0.0\n"
        f"vllm:iteration_tokens_total_count{labels} {iterations}.0\n"
        f"vllm:iteration_tokens_total_sum{labels} {iteration_tokens}.0\n"
        f'vllm:cache_config_info{{block_size="{BLOCK}",num_gpu_blocks="{BLOCKS}",'
        'enable_prefix_caching="True",engine="0"} 1.0\n'
    )
