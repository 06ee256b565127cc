"""Requests of other forms: messages and prompts of all kinds, and bodies that are wrong."""

import json
from typing import Any

from tests.gateway.corpus.request import ABSENT, CHAT, COMPLETIONS, JSON_TYPE, Requests, token_of

_TEXTS: tuple[tuple[str, str], ...] = (
    ("emoji", "🙂👍🏽"),
    ("joined emoji", "👩‍👩‍👧"),
    ("flags", "🇩🇪🇯🇵"),
    ("CJK", "日本語と中文"),
    ("combining marks", "e\u0301a\u0308 \u0915\u094d\u0937"),
    ("right to left", "שלום مرحبا"),
    ("beyond the first plane", "\U0001d518\U0001d52b\U0001d526 \U00010348"),
    ("marks and spaces", "a\u200bb\u00a0c\ufeffd"),
    ("control characters", "a\tb\nc\r\nd\u0007"),
    ("quotes and slashes", "\"quoted\" \\back/ 'single' <tag> &amp;"),
    ("replacement characters", "\ufffd\ufffd"),
)
_FLAG = [{"role": "user", "content": "hi"}]
_MESSAGES: tuple[tuple[str, Any], ...] = (
    ("absent", ABSENT),
    ("null", None),
    ("empty", []),
    ("text", "hi"),
    ("object", {"role": "user", "content": "hi"}),
    ("of numbers", [1, 2]),
    ("of an empty object", [{}]),
    ("unknown role", [{"role": "wizard", "content": "hi"}]),
    ("role absent", [{"content": "hi"}]),
    ("role null", [{"role": None, "content": "hi"}]),
    ("role number", [{"role": 5, "content": "hi"}]),
    ("content absent", [{"role": "user"}]),
    ("content null", [{"role": "user", "content": None}]),
    ("content empty", [{"role": "user", "content": ""}]),
    ("content number", [{"role": "user", "content": 5}]),
    ("content object", [{"role": "user", "content": {"type": "text", "text": "hi"}}]),
    ("content empty list", [{"role": "user", "content": []}]),
    ("parts", [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]),
    (
        "two parts",
        [{"role": "user", "content": [{"type": "text", "text": t} for t in ("hi", "you")]}],
    ),
    ("parts of texts", [{"role": "user", "content": ["hi", "you"]}]),
    ("part of unknown type", [{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]),
    (
        "an image",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}],
    ),
    ("system first", [{"role": "system", "content": "be short"}, *_FLAG]),
    ("developer first", [{"role": "developer", "content": "be short"}, *_FLAG]),
    ("system twice", [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]),
    ("a dialogue", [*_FLAG, {"role": "assistant", "content": "hello"}, *_FLAG]),
    ("assistant last", [*_FLAG, {"role": "assistant", "content": "hello"}]),
    ("assistant with reasoning", [*_FLAG, {"role": "assistant", "reasoning_content": "hm"}]),
    ("assistant with a refusal", [*_FLAG, {"role": "assistant", "refusal": "no"}, *_FLAG]),
    ("name", [{"role": "user", "name": "ada", "content": "hi"}]),
    ("extra field", [{"role": "user", "content": "hi", "extra": {"a": 1}}]),
    ("a tool's result alone", [{"role": "tool", "tool_call_id": "c1", "content": "12"}]),
    ("a tool's result without its id", [*_FLAG, {"role": "tool", "content": "12"}]),
    ("function result", [*_FLAG, {"role": "function", "name": "f", "content": "12"}]),
)
_PROMPTS: tuple[tuple[str, Any], ...] = (
    ("absent", ABSENT),
    ("null", None),
    ("empty", ""),
    ("empty list", []),
    ("number", 5),
    ("object", {"text": "hi"}),
    ("list of one text", ["hi there"]),
    ("list of one empty text", [""]),
    ("ids", [70, 71, 72]),
    ("ids in a list", [[70, 71, 72]]),
    ("empty ids in a list", [[]]),
    ("one id", [70]),
    ("special ids", [0, 1, 2]),
    ("last id", [2047]),
    ("id out of the vocabulary", [70, 2048]),
    ("negative id", [70, -1]),
    ("huge id", [70, 2**70]),
    ("fractions", [1.5, 2.5]),
    ("mixed", [70, "a"]),
    ("true", [True, False]),
    ("special tokens as text", "a<|endoftext|>b<|pad|>"),
)
_RAW: tuple[tuple[str, bytes], ...] = (
    ("empty", b""),
    ("no JSON", b"hello"),
    ("half of an object", b'{"messages": ['),
    ("an array", b"[]"),
    ("a text", b'"hi"'),
    ("a number", b"5"),
    ("null", b"null"),
    ("true", b"true"),
    ("an empty object", b"{}"),
    ("trailing bytes", b'{"prompt": "a", "max_tokens": 1, "temperature": 0} x'),
    ("no UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("a lone surrogate", b'{"prompt": "\\ud800", "max_tokens": 2, "temperature": 0}'),
    ("NaN", b'{"prompt": "a", "max_tokens": 2, "temperature": NaN}'),
    ("infinity", b'{"prompt": "a", "max_tokens": 2, "temperature": Infinity}'),
    ("a field twice", b'{"prompt": "a", "prompt": "b", "max_tokens": 2, "temperature": 0}'),
    ("a null byte", b'{"prompt": "a\\u0000b", "max_tokens": 2, "temperature": 0}'),
    ("a byte-order mark", b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 2, "temperature": 0}'),
    (
        "deep",
        b'{"prompt": "a", "max_tokens": 1, "temperature": 0, "x": '
        + b"[" * 200
        + b"]" * 200
        + b"}",
    ),
    ("fields in capitals", b'{"Prompt": "a"}'),
)


def unicode(seed: int, model: str) -> Requests:
    """Texts that a token does not hold, in prompts and in answers."""
    made = Requests("unicode", seed=seed, model=model)
    for name, text in _TEXTS:
        made.chat(f"{name} in a message", messages=_user(text))
        made.text(f"{name} in a prompt", prompt=text, return_token_ids=True)
        said = {"structured_outputs": {"choice": [f"x {text} y"]}, "max_tokens": 90}
        made.ways(f"{name} in the answer", **said)
        made.text(f"{name} in the answer, text", return_token_ids=True, **said)
    emoji = {"structured_outputs": {"choice": ["ab🙂cd日本"]}}
    for cut in (3, 4, 5, 6, 10):
        made.ways(f"cut after {cut} tokens", max_tokens=cut, **emoji)
        made.text(f"cut after {cut} tokens, text", max_tokens=cut, return_token_ids=True, **emoji)
    for stop in ("🙂", "日", "🙂c", "é", "本"):
        made.ways(f"stop {stop}", stop=stop, max_tokens=40, **emoji)
        made.text(f"stop {stop}, text", stop=stop, max_tokens=40, **emoji)
    made.text("with log-probs", logprobs=0, max_tokens=40, **emoji)
    made.text("echo", echo=True, prompt="né 日本 🙂", max_tokens=4)
    made.text("echo of half a character", echo=True, prompt=[token_of(0xE6), token_of(0x97)])
    half = {"allowed_token_ids": [token_of(byte) for byte in range(0xC2, 0x100)]}
    made.both("bytes that are no text", **half)
    made.both("bytes that are no text, with log-probs", logprobs=1, top_logprobs=1, **half)
    return made


def messages(seed: int, model: str) -> Requests:
    """Messages and prompts of every form."""
    made = Requests("messages", seed=seed, model=model)
    for name, value in _MESSAGES:
        made.chat(f"messages {name}", messages=value)
    for name, value in _PROMPTS:
        made.text(f"prompt {name}", prompt=value)
    last = [*_FLAG, {"role": "assistant", "content": "It is "}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    made.ways("going on with a message", messages=last, **going_on)
    made.ways("going on with a message, echoed", messages=last, echo=True, **going_on)
    made.chat("going on with a user's message", messages=_FLAG, **going_on)
    made.chat("going on and a new turn", continue_final_message=True, add_generation_prompt=True)
    made.chat("a prompt in a chat", prompt="x")
    made.text("messages in a completion", messages=_FLAG)
    made.text("only messages in a completion", messages=_FLAG, prompt=ABSENT)
    return made


def wrong(seed: int, model: str) -> Requests:
    """Bodies that are no JSON, other paths and methods, other models."""
    made = Requests("wrong", seed=seed)
    for name, content in _RAW:
        for path, endpoint in ((CHAT, "chat"), (COMPLETIONS, "text")):
            made.raw(f"{name}, {endpoint}", path, content)
    good = json.dumps({"prompt": "a", "max_tokens": 2, "temperature": 0}).encode()
    for kind in ("text/plain", "application/json; charset=utf-8", "Application/JSON", "", "x"):
        made.raw(f"content type {kind!r}", COMPLETIONS, good, content_type=kind)
    made.raw("a form", CHAT, b"a=1", content_type="application/x-www-form-urlencoded")
    for method in ("GET", "PUT", "DELETE", "HEAD", "PATCH"):
        made.raw(f"{method} of chat", CHAT, b"", method=method)
        made.raw(f"{method} of completions", COMPLETIONS, b"", method=method, content_type="")
    for path in ("/v1/nothing", "/v1/chat", "/v1/chat/completions/", "/v1//completions", "/chat"):
        made.raw(f"path {path}", path, good)
    made.raw("GET of an unknown path", "/v1/nothing", b"", method="GET", content_type="")
    for name in ("x", "", 5, None, model.upper(), "a/b", "é", [model]):
        made.both(f"model {name!r}", model=name)
    made.both("model and a wrong field", model="x", temperature="hot")
    made.both("two wrong fields", temperature="hot", top_p="x")
    made.raw("JSON type in a completion", COMPLETIONS, good, content_type=JSON_TYPE)
    return made


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
