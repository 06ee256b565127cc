"""Requests with tools: calls in the markup of each parser, well-formed, broken and cut."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.gateway.corpus.request import Requests
from tests.gateway.corpus.structured import DENSE

Call = tuple[str, Mapping[str, Any]]

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "Köln", "東京"]},
                "days": {"type": "integer", "enum": [1, 7]},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STOP_ALL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "stop_all"}}
STRICT: Final[dict[str, Any]] = {
    "type": "function",
    "function": {**WEATHER["function"], "name": "strict_weather", "strict": True},
}
TOOLS: Final = [WEATHER, STOP_ALL]
NAMED: Final = {"type": "function", "function": {"name": "get_weather"}}
_PARIS: Final[Call] = ("get_weather", {"city": "Paris"})
_KOELN: Final[Call] = ("get_weather", {"city": "Köln", "days": 7})
_DEEP: Final[Call] = (
    "get_weather",
    {"city": 'a "b" \\ 東京', "days": [1, {"x": None}], "on": True},
)
_EMPTY: Final[Call] = ("stop_all", {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """How the model that a parser is for writes calls."""

    write: Callable[[list[Call]], str]
    broken: tuple[str, ...]
    """Texts that begin as calls do, and are none."""
    tokens: tuple[str, ...] = ()
    """Markers that are one token each in the vocabulary."""


def _dumped(call: Call, arguments: str = "arguments") -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, ensure_ascii=False)


def _hermes(calls: list[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_dumped(call)}\n</tool_call>" for call in calls)


def _llama(calls: list[Call]) -> str:
    return "; ".join(_dumped(call, "parameters") for call in calls)


def _pythonic(calls: list[Call]) -> str:
    each = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(each)}]"


def _marker(words: str) -> str:
    """A marker of DeepSeek's: full-width bars, and blocks between its words."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS: Final = (_marker("tool calls begin"), _marker("tool calls end"))
_CALL: Final = (_marker("tool call begin"), _marker("tool call end"))
_SEP: Final = _marker("tool sep")


def _deepseek(calls: list[Call]) -> str:
    each = (
        f"{_CALL[0]}{name}{_SEP}{json.dumps(arguments, ensure_ascii=False)}{_CALL[1]}"
        for name, arguments in calls
    )
    return f"{_CALLS[0]}{''.join(each)}{_CALLS[1]}"


def _qwen(calls: list[Call]) -> str:
    def parameters(arguments: Mapping[str, Any]) -> str:
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        return "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


_TAGGED: Final = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "<tool_call>none</tool_call>",
    '</tool_call>{"name": "get_weather"}',
)
MARKUPS: Final[Mapping[str, Markup]] = {
    "hermes": Markup(write=_hermes, broken=_TAGGED),
    "granite4": Markup(write=_hermes, broken=_TAGGED, tokens=("<tool_call>", "</tool_call>")),
    "llama3_json": Markup(
        write=_llama,
        broken=(
            '{"name": "get_weather", "parameters": {"city": ',
            '{"parameters": {}}',
            '{"name": 5, "parameters": {"city": "Paris"}}',
            "{not json}",
            '<|python_tag|>{"name": "stop_all", "parameters": {}}',
        ),
        tokens=("<|python_tag|>",),
    ),
    "pythonic": Markup(
        write=_pythonic,
        broken=(
            "[get_weather(city='Paris')",
            "[get_weather(city=)]",
            "[1, 2]",
            "get_weather(city='Paris')",
            "[get_weather(city=open('x'))]",
        ),
    ),
    "deepseek_v31": Markup(
        write=_deepseek,
        broken=(
            f"{_CALLS[0]}none{_CALLS[1]}",
            f'{_CALLS[0]}{_CALL[0]}get_weather{_SEP}{{"city": ',
            _CALLS[1],
            f"{_CALLS[0]}{_CALL[0]}get_weather",
            f"{_CALL[0]}get_weather{_SEP}{{}}{_CALL[1]}",
        ),
        tokens=(*_CALLS, *_CALL, _SEP),
    ),
    "qwen3_coder": Markup(
        write=_qwen,
        broken=(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis",
            "<tool_call>none</tool_call>",
            "<function=stop_all>\n</function>",
            "</tool_call>",
            "<tool_call>\n<function=>\n</function>\n</tool_call>",
        ),
        tokens=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
}
HISTORY: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "weather in Paris and Köln?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call-{n}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
            for n, city in enumerate(("Paris", "Köln"))
        ],
    },
    {"role": "tool", "tool_call_id": "call-0", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "9 degrees"}]},
]


def forced(text: str, **fields: Any) -> dict[str, Any]:
    """Fields that make the model say a text and end."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 3 * len(text) + 8, **fields}


def calls(seed: int, parser: str, *, token_ids: Mapping[str, int]) -> Requests:
    """Replies in a parser's markup; `token_ids` are those of its markers."""
    made = Requests("calls", seed=seed)
    markup = MARKUPS[parser]
    # Markers come as one token, as a model writes them, not letter by letter.
    auto: dict[str, Any] = {"tools": TOOLS}
    if token_ids:
        auto["logit_bias"] = {str(token): 50 for token in token_ids.values()}
    one = markup.write([_PARIS])
    for name, text in (
        ("one", one),
        ("two", markup.write([_PARIS, _KOELN])),
        ("the same twice", markup.write([_PARIS, _PARIS])),
        ("without arguments", markup.write([_EMPTY])),
        ("with deep arguments", markup.write([_DEEP])),
        ("of an unknown tool", markup.write([("nothing", {"a": 1})])),
        ("after a text", f"I will look. {one}"),
        ("before a text", f"{one} Done."),
        ("after white space", f"\n {one}\n"),
    ):
        made.ways(f"call {name}", **forced(text, **auto))
    for n, text in enumerate(markup.broken):
        made.ways(f"broken call {n}", **forced(text, **auto))
    made.ways("no call", **forced("It is 12 degrees.", **auto))
    whole = 3 * len(one.encode())
    for share in (0.1, 0.25, 0.4, 0.6):
        limit = max(1, int(share * whole / 3))
        made.ways(f"call cut after {share:.0%}", **forced(one, **auto) | {"max_tokens": limit})
    two = forced(markup.write([_PARIS, _KOELN]), **auto)
    made.ways("two calls, one allowed", parallel_tool_calls=False, **two)
    made.ways("two calls, both allowed", parallel_tool_calls=True, **two)
    made.ways("call with ids", return_token_ids=True, **forced(one, **auto))
    made.ways("call with log-probs", logprobs=True, top_logprobs=1, **forced(one, **auto))
    made.ways("call and stop inside", stop="weather", **forced(one, **auto))
    made.ways("call and no tools", **forced(one))
    made.ways("call and tool_choice none", **forced(one, **auto | {"tool_choice": "none"}))
    made.chat("call, special tokens skipped", skip_special_tokens=True, **forced(one, **auto))
    kept = {"stop": "weather", "include_stop_str_in_output": True}
    made.ways("call and stop inside, kept", **kept, **forced(one, **auto))
    return made


def unparsed(seed: int) -> Requests:
    """Tools at a server that has no parser."""
    made = Requests("unparsed tools", seed=seed)
    for choice in ("auto", "required", "none", None, NAMED):
        made.ways(f"tool_choice {str(choice)[:20]}", tools=TOOLS, tool_choice=choice)
    made.chat("not said", tools=TOOLS)
    made.ways("after results", messages=HISTORY)
    made.chat("after results, no more of them", messages=HISTORY, tools=TOOLS, tool_choice="none")
    return made


def choices(seed: int) -> Requests:
    """`tool_choice` of each kind, where the form of the reply is the server's doing."""
    made = Requests("tool_choice", seed=seed)
    long = {"tools": TOOLS, "max_tokens": 90}
    cities = {"tools": [STRICT], "max_tokens": 90, "logit_bias": DENSE}
    made.ways("auto", tools=TOOLS, tool_choice="auto")
    made.ways("not said", tools=TOOLS)
    made.ways("null", tools=TOOLS, tool_choice=None)
    made.ways("none", tools=TOOLS, tool_choice="none")
    made.ways("required", tool_choice="required", **cities)
    made.ways("required of two tools", tool_choice="required", **long)
    made.ways("required, one call", tool_choice="required", parallel_tool_calls=False, **cities)
    made.ways("required, cut", tool_choice="required", **cities | {"max_tokens": 14})
    made.ways("named", tool_choice=NAMED, **long)
    made.ways("named, cut", tool_choice=NAMED, tools=TOOLS, max_tokens=7)
    made.ways("named, with ids", tool_choice=NAMED, return_token_ids=True, **long)
    made.ways("named, with log-probs", tool_choice=NAMED, logprobs=True, **long)
    made.ways("strict", tools=[STRICT], tool_choice="auto")
    made.ways("required of a lax tool", tools=[WEATHER], tool_choice="required", max_tokens=90)
    strict = {"type": "function", "function": {"name": "strict_weather"}}
    made.ways("named of a strict tool", tool_choice=strict, **cities)
    made.ways("after results", messages=HISTORY, tools=TOOLS)
    made.ways("required after results", messages=HISTORY, tool_choice="required", **cities)
    for name, choice in (
        ("of a tool that is not there", {"type": "function", "function": {"name": "nothing"}}),
        ("without a function", {"type": "function"}),
        ("without a name", {"type": "function", "function": {}}),
        ("of another type", {"type": "custom", "custom": {"name": "get_weather"}}),
        ("no choice", "sometimes"),
        ("a number", 5),
    ):
        made.chat(f"tool_choice {name}", tools=TOOLS, tool_choice=choice)
    made.chat("required without tools", tool_choice="required")
    made.chat("a tool without a name", tools=[{"type": "function", "function": {}}])
    made.chat("a tool of another type", tools=[{"type": "custom", "custom": {"name": "x"}}])
    broken = [dict(message) for message in HISTORY]
    broken[1]["tool_calls"] = [
        {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{oops"}}
    ]
    made.chat("history with arguments that are no JSON", messages=broken, tools=TOOLS)
    made.chat("history without tools", messages=HISTORY)
    made.chat(
        "form and a named tool", structured_outputs={"regex": "a+"}, tool_choice=NAMED, **long
    )
    made.chat(
        "form and required",
        structured_outputs={"choice": ["a"]},
        tool_choice="required",
        **cities,
    )
    return made
