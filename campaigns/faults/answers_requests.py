"""Requests of clients whose answers are known beforehand, and the check of what comes back."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import aiohttp
import msgspec

from campaigns.faults.mock_bodies import (
    CHAT,
    COMPLETIONS,
    DEFAULT_TOKENS,
    GENERATE,
    MODEL,
    continued,
    ids_of,
    refusal_words,
    text_of,
    wanted,
)

PATHS: Final = (CHAT, COMPLETIONS, GENERATE)
REFUSALS: Final = ("!400", "!404", "!408", "!413", "!422", "!render400", "!sse400", "!mid400")
OUTSIDE: Final = (("temperature", -1.0), ("top_p", 2.0), ("presence_penalty", 9.0))
"""Sampling that engines refuse in words of their own."""
GIVES_UP_S: Final = 120.0
"""Beyond the limit of a request, until its client does not wait any more."""


@dataclass(slots=True, eq=False)
class Sent:
    """A request, what its answer must be, and what came."""

    path: str
    body: dict[str, Any]
    ids: list[int]
    made: list[int]
    finish: str = "length"
    refusal: tuple[int, str] | None = None
    """The status and a part of the words with which it must be refused."""
    leaves_s: float | None = None
    """When its client goes away, from its beginning; None: never."""
    limit_s: float = 0.0
    """From its beginning to its end, as stated."""
    begun_s: float = 0.0
    ended_s: float = 0.0
    wrong: str = ""
    """What was wrong with the answer; "": nothing."""
    status: int = 0
    """Of HTTP, or of an error in a stream; 0: there was none."""
    words: str = ""
    """Of an error."""

    @property
    def streamed(self) -> bool:
        """Whether it is a stream."""
        return bool(self.body.get("stream"))

    @property
    def kind(self) -> str:
        """Which endpoint, and how it is answered."""
        path = {CHAT: "chat", COMPLETIONS: "completion", GENERATE: "ids"}[self.path]
        return f"{path} {'streamed' if self.streamed else 'whole'}"


def new_request(rng: Random, name: str, *, context: Sequence[int] = ()) -> Sent:
    """Draw an honest request; `context` is the prompt of one of token ids, if it has one."""
    path = GENERATE if context else rng.choice(PATHS)
    text = f"{name} " + "x" * rng.choice((0, 5, 60, 400))
    body: dict[str, Any] = {"model": MODEL, "stream": rng.random() < 0.5}
    tokens = rng.choice((1, 2, 7, 16, 40))
    sampling: dict[str, Any] = {"max_tokens": tokens}
    match path:
        case "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": text}]
            if rng.random() < 0.3:
                sampling = {"max_completion_tokens": tokens}
        case "/v1/completions":
            body["prompt"] = text if rng.random() < 0.7 else ids_of(text)
            if tokens == DEFAULT_TOKENS:
                sampling = {}
        case _:
            body["token_ids"] = list(context) or ids_of(text)
    if body["stream"] and rng.random() < 0.6:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.3:
        body["return_token_ids"] = True
    if rng.random() < 0.15:
        sampling["logprobs"] = True if path == CHAT else 0
    sampling["temperature"] = rng.choice((0.0, 0.7))
    sent = _known(path, body, sampling, tokens)
    if tokens > 2 and rng.random() < 0.15:
        sampling["stop_token_ids"] = [sent.made[tokens // 2]]
        sent = _known(path, body, sampling, tokens)
    return sent


def _known(path: str, body: dict[str, Any], sampling: dict[str, Any], tokens: int) -> Sent:
    """The request with its answer."""
    body = body | ({"sampling_params": dict(sampling)} if path == GENERATE else sampling)
    want = wanted(path, body, context_tokens=1 << 30, request_id="")
    made, finish = continued(want.ids, tokens), "length"
    for n, token in enumerate(made):
        if token in want.stop_token_ids:
            made, finish = made[: n + 1], "stop"
            break
    return Sent(path, body, want.ids, made, finish)


def hostile_request(rng: Random, name: str) -> Sent:
    """Draw a request that every engine refuses, or whose client goes away."""
    sent = new_request(rng, name)
    how = rng.random()
    if how < 0.25:
        sent.leaves_s = rng.choice((0.0, 0.1, 1.0, 4.0))
        return sent
    if how < 0.45 and sent.path != GENERATE:
        field_, value = rng.choice(OUTSIDE)
        sent.body[field_] = value
        sent.refusal = 400, f"{field_} is {value}"
        return sent
    mark = rng.choice(REFUSALS)
    if not sent.streamed and mark[1] in "sm":
        mark = "!400"
    text = f"{name} {mark} end"
    match sent.path:
        case "/v1/chat/completions":
            sent.body["messages"] = [{"role": "user", "content": text}]
        case "/v1/completions":
            sent.body["prompt"] = text
        case _:
            sent.body["token_ids"] = ids_of(text)
    want = wanted(sent.path, sent.body, context_tokens=1 << 30, request_id="")
    ids = want.ids
    sent.ids, sent.made = ids, continued(ids, len(sent.made))
    status = int(mark[-3:])
    if mark == "!mid400" and sent.made[0] in want.stop_token_ids:
        sent.made, sent.finish = sent.made[:1], "stop"
    if mark == "!mid400" and len(sent.made) == 1:
        return sent  # it ends before the error
    sent.refusal = status, refusal_words(status, ids)
    return sent


@dataclass(slots=True)
class _Stream:
    """What came of a stream."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    logprobs: int = 0
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    wrong: str = ""


async def send(http: aiohttp.ClientSession, url: str, sent: Sent) -> None:
    """Send a request, and note in it what came and what was wrong."""
    loop = asyncio.get_running_loop()
    sent.begun_s = loop.time()
    patience_s = sent.limit_s + GIVES_UP_S if sent.leaves_s is None else sent.leaves_s
    try:
        async with (
            asyncio.timeout(patience_s),
            http.post(url + sent.path, json=sent.body) as answer,
        ):
            if answer.status == 200 and sent.streamed:
                got = await _read_stream(answer, sent.path)
                sent.wrong = _check_stream(sent, got)
            else:
                _check_whole(sent, answer.status, await answer.read())
    except TimeoutError:
        sent.wrong = "" if sent.leaves_s is not None else "no end"
    except (aiohttp.ClientError, OSError) as error:
        sent.wrong = f"connection {type(error).__name__}"
    sent.ended_s = loop.time()
    if sent.refusal is not None and sent.leaves_s is None:
        sent.wrong = _check_refusal(sent, *sent.refusal)


async def _read_stream(answer: aiohttp.ClientResponse, path: str) -> _Stream:
    got = _Stream()
    async for line in answer.content:
        stripped = line.strip()
        if not stripped or stripped.startswith(b":"):
            continue
        if got.done or not stripped.startswith(b"data: "):
            got.wrong = f"a line that is no event: {stripped[:80]!r}"
            continue
        if stripped == b"data: [DONE]":
            got.done = True
            continue
        try:
            _take(got, path, msgspec.json.decode(stripped[6:]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            got.wrong = f"an event that is none of vLLM's: {stripped[:80]!r}, {error!r}"
    return got


def _take(got: _Stream, path: str, event: dict[str, Any]) -> None:
    if event.get("error") is not None:
        got.error = event["error"]
        return
    if event.get("usage"):
        got.usage = event["usage"]
    for choice in event["choices"]:
        if got.finishes:
            got.wrong = "more after the end"
        if path == CHAT:
            got.text += choice["delta"].get("content") or ""
        elif path == COMPLETIONS:
            got.text += choice["text"]
        got.ids += choice.get("token_ids") or []
        got.logprobs += _logprobs_of(choice)
        if choice.get("finish_reason"):
            got.finishes.append(choice["finish_reason"])


def _logprobs_of(choice: dict[str, Any]) -> int:
    found = choice.get("logprobs") or {}
    return len(found.get("content") or found.get("tokens") or ())


def _check_stream(sent: Sent, got: _Stream) -> str:
    if got.wrong:
        return f"malformed: {got.wrong}"
    if got.error is not None:
        code = got.error.get("code")
        sent.status = code if isinstance(code, int) else 500
        sent.words = str(got.error.get("message"))
        return f"error {code} in the stream"
    if not got.done:
        return "the stream has no [DONE]"
    if got.finishes != [sent.finish]:
        return f"finish is {got.finishes}, not {sent.finish}"
    shows = sent.path == GENERATE or bool(sent.body.get("return_token_ids"))
    if (sent.body.get("stream_options") or {}).get("include_usage") and not got.usage:
        return "no usage"
    return _compare(sent, got.text, got.ids if shows else None, got.usage, got.logprobs)


def _check_whole(sent: Sent, status: int, raw: bytes) -> None:
    try:
        answer = msgspec.json.decode(raw)
        assert isinstance(answer, dict)
    except (msgspec.DecodeError, AssertionError):
        sent.status, sent.wrong = status, f"status {status} with no object: {raw[:80]!r}"
        return
    if status != 200:
        error = answer.get("error")
        sent.status = status
        sent.words = str(error.get("message")) if isinstance(error, dict) else repr(raw[:80])
        sent.wrong = f"status {status}"
        return
    try:
        (choice,) = answer["choices"]
        if choice["finish_reason"] != sent.finish:
            sent.wrong = f"finish is {choice['finish_reason']}, not {sent.finish}"
            return
        text = choice["message"]["content"] if sent.path == CHAT else choice.get("text", "")
        shows = sent.path == GENERATE or bool(sent.body.get("return_token_ids"))
        ids = choice["token_ids"] if shows else None
        sent.wrong = _compare(sent, text, ids, answer["usage"], _logprobs_of(choice))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        sent.wrong = f"an answer that is none of vLLM's: {error!r}"


def _compare(
    sent: Sent, text: str, ids: list[int] | None, usage: dict[str, Any] | None, logprobs: int
) -> str:
    made = sent.made
    shown = made[:-1] if sent.finish == "stop" else made
    if sent.path != GENERATE and text != text_of(shown):
        return f"text: {_differs(text.split(), text_of(shown).split())}"
    if ids is not None and ids != made:
        return f"tokens: {_differs(ids, made)}"
    if usage is not None and usage.get("completion_tokens") != len(made):
        return f"usage has {usage.get('completion_tokens')} of {len(made)} tokens"
    if usage is not None and usage.get("prompt_tokens") != len(sent.ids):
        return f"usage has {usage.get('prompt_tokens')} of {len(sent.ids)} tokens of the prompt"
    wants = sent.body.get("sampling_params", sent.body).get("logprobs")
    if wants is not None and wants is not False and logprobs != len(made):
        return f"{logprobs} log-probs of {len(made)} tokens"
    return ""


def _differs(got: Sequence[Any], right: Sequence[Any]) -> str:
    """How a sequence differs from the right one, in one line."""
    at = next((n for n, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), None)
    at = min(len(got), len(right)) if at is None else at
    return f"{len(got)} of {len(right)}, other from number {at} on: {list(got[at : at + 3])}"


def _check_refusal(sent: Sent, status: int, words: str) -> str:
    if sent.status == status and words in sent.words:
        return ""
    got = f"{sent.status} {sent.words[:160]!r}" if sent.status else sent.wrong or "no error"
    return f"refusal {status} came as {got}"


def direct_s(sent: Sent, *, iteration_s: float, prefill_tokens: int) -> float:
    """Seconds that a request takes at an engine of its own."""
    parts = -(-len(sent.ids) // prefill_tokens)
    return iteration_s * (1 + parts + len(sent.made))
