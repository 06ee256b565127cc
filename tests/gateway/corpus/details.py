"""Requests about what an answer tells of its tokens: log-probs, ids, prompts, usage."""

from typing import Any

from tests.gateway.corpus.request import Requests

_PROMPT = "one two three"
_OPTIONS: tuple[Any, ...] = (
    {"include_usage": True},
    {"include_usage": False},
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": False, "continuous_usage_stats": True},
    {"continuous_usage_stats": True},
    {},
    None,
    {"include_usage": "x"},
    {"other": 1},
    "x",
)


def logprobs(seed: int, model: str) -> Requests:
    """`logprobs` of both endpoints, `prompt_logprobs`, `echo`."""
    made = Requests("logprobs", seed=seed, model=model)
    for top in (0, 1, 3, 20, 21, -1, -2, 2.5, "2", None):
        made.ways(f"top_logprobs {top!r}", logprobs=True, top_logprobs=top, max_tokens=5)
        made.text(f"logprobs {top!r}, text", logprobs=top, max_tokens=5)
    made.text("logprobs 2, streamed", logprobs=2, stream=True)
    made.text("logprobs true, text", logprobs=True, max_tokens=3)
    made.ways("logprobs without top_logprobs", logprobs=True)
    made.chat("logprobs false", logprobs=False)
    made.chat("logprobs 1, chat", logprobs=1, max_tokens=3)
    made.ways("top_logprobs without logprobs", top_logprobs=2)
    made.both("as token ids", logprobs=1, top_logprobs=1, return_tokens_as_token_ids=True)
    made.both("as token ids, with ids", logprobs=1, top_logprobs=1, **_ALL_IDS)
    made.both("as token ids without log-probs", return_tokens_as_token_ids=True)
    made.ways("of a forced text", logprobs=True, top_logprobs=2, **_said("né 日本 🙂"))
    made.text("of a forced text, text", logprobs=2, **_said("né 日本 🙂"))
    made.both("with penalties", logprobs=1, top_logprobs=1, presence_penalty=1.0)
    made.both("of a draw", logprobs=1, top_logprobs=1, temperature=0.7, seed=3)
    for count in (0, 1, 3, 20, 21, -1, -2, "2", 1.5, None):
        made.both(f"prompt_logprobs {count!r}", prompt_logprobs=count, stream=False, max_tokens=2)
    made.both("prompt_logprobs 1, streamed", prompt_logprobs=1, stream=True)
    made.both("prompt_logprobs 0, streamed", prompt_logprobs=0, stream=True)
    made.text("prompt_logprobs of ids", prompt=[70, 71, 72], prompt_logprobs=2, stream=False)
    made.text(
        "prompt_logprobs and logprobs", prompt=_PROMPT, prompt_logprobs=1, logprobs=1, stream=False
    )
    for ids in ([70, 71], [], [5000], [-1], None):
        made.both(f"logprob_token_ids {ids!r}", logprobs=1, logprob_token_ids=ids, max_tokens=3)
    made.both("logprob_token_ids without logprobs", logprob_token_ids=[70])

    for stream in (False, True):
        how = ", streamed" if stream else ""
        echo = {"echo": True, "stream": stream}
        made.text(f"echo{how}", **echo)
        made.text(f"echo of ids{how}", prompt=[70, 71, 72], **echo)
        made.text(f"echo of nothing else{how}", max_tokens=0, **echo)
        made.text(f"echo with logprobs{how}", logprobs=1, **echo)
        made.text(f"echo with logprobs 0{how}", logprobs=0, **echo)
        made.text(f"echo of nothing else with logprobs{how}", max_tokens=0, logprobs=1, **echo)
        made.text(f"echo with ids{how}", return_token_ids=True, **echo)
        made.text(f"echo and stop{how}", stop="><", prompt="a>< b", **echo)
        made.chat(f"echo of a user's message{how}", **echo)
        made.chat(
            f"echo of an assistant's message{how}",
            messages=[*_ASKED, {"role": "assistant", "content": "It is "}],
            **echo,
        )
    made.text("echo no bool", echo="x")
    return made


def shown(seed: int, model: str) -> Requests:
    """`return_token_ids` and its kin, and `stream_options`."""
    made = Requests("shown", seed=seed, model=model)
    for field in ("return_token_ids", "return_prompt_text"):
        for value in (True, False, None, "x"):
            made.both(f"{field} {value!r}", **{field: value})
    for prompt, name in (
        (_PROMPT, "text"),
        ([70, 71, 72], "ids"),
        ([[70, 71, 72]], "ids in a list"),
    ):
        made.text(f"ids of {name}", prompt=prompt, return_token_ids=True, stream=False)
        made.text(f"ids of {name}, streamed", prompt=prompt, return_token_ids=True, stream=True)
    made.ways("ids and prompt", return_token_ids=True, return_prompt_text=True)
    made.ways("ids of a forced text", return_token_ids=True, **_said("né 日本 🙂"))
    for options in _OPTIONS:
        made.both(f"stream_options {options}", stream=True, stream_options=options)
    made.both("stream_options without stream", stream=False, stream_options={"include_usage": True})
    for value in ("x", 1, 2, "true", []):
        made.both(f"stream {value!r}", stream=value)
    return made


_ASKED = [{"role": "user", "content": "what is it?"}]
_ALL_IDS: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}


def _said(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 40}
