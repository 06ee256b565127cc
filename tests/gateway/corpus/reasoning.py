"""Requests of a model that reasons before it answers."""

from collections.abc import Mapping
from typing import Any

from tests.gateway.corpus.request import Requests
from tests.gateway.corpus.structured import DENSE, PERSON
from tests.gateway.corpus.tools import HISTORY, MARKUPS, NAMED, STRICT, TOOLS, forced

THINKING = ("<think>", "</think>")
"""Markers, each one token."""
NO_THINKING = """\
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- "<think></think>" }}
{%- endif %}
"""
"""What follows the chat template of the model."""


def reasoning(seed: int, parser: str, *, token_ids: Mapping[str, int]) -> Requests:
    """Reasoning of a few tokens, then an answer; `token_ids` are those of the markers.

    Where the server constrains only what follows the reasoning, a bias of the token that ends it
    lets it come after some tokens.
    """
    made = Requests("reasoning", seed=seed)
    begin, end = (str(token_ids[marker]) for marker in THINKING)
    call = MARKUPS[parser].write([("get_weather", {"city": "Köln"})])
    made.ways("that does not end")
    for bias in (2, 5, 7, 9, 12, 100):
        made.ways(f"that ends by a bias of {bias}", logit_bias={end: bias}, max_tokens=24)
    for bias in (7, 100):
        then: dict[str, Any] = {"logit_bias": {end: bias}}
        name = f"with a bias of {bias}"
        made.ways(f"then a text, {name}", **forced("Sunny, 12 °C.", **then))
        made.ways(f"then a call, {name}", tools=TOOLS, **forced(call, **then))
        dense = {"logit_bias": {**DENSE, end: bias}}
        json_form = {"structured_outputs": {"json": PERSON}, "max_tokens": 60}
        made.ways(f"then JSON, {name}", **json_form, **dense)
        required = {"tools": [STRICT], "tool_choice": "required", "max_tokens": 90}
        made.ways(f"then a required call, {name}", **required, **dense)
        made.ways(
            f"then a named call, {name}", tools=TOOLS, tool_choice=NAMED, max_tokens=60, **then
        )
        made.ways(f"hidden, {name}", include_reasoning=False, max_tokens=24, **then)
        made.ways(f"with ids, {name}", return_token_ids=True, max_tokens=16, **then)
        made.ways(f"with log-probs, {name}", logprobs=True, top_logprobs=1, max_tokens=16, **then)
        made.ways(f"and stop, {name}", stop="Sun", **forced("A Sunny day", **then))
    made.ways("that begins by a token", logit_bias={begin: 100}, max_tokens=5)
    # Hidden reasoning is constrained from the first token on.
    hidden = {"include_reasoning": False, "logit_bias": {begin: 50, end: 50}}
    for name, text in (
        ("a whole one", "<think>it rains</think>Rain."),
        ("without its begin", "it rains</think>Rain."),
        ("without its end", "<think>it rains"),
        ("empty", "<think></think>Rain."),
        ("twice", "<think>a</think>b<think>c</think>d"),
        ("nothing after it", "<think>it rains</think>"),
        ("then a call", f"<think>look</think>{call}"),
        ("a call inside", f"<think>{call}</think>done"),
    ):
        made.ways(f"hidden, {name}", tools=TOOLS, **forced(text, **hidden))
    made.ways("hidden, with ids", return_token_ids=True, **forced("<think>a</think>b", **hidden))
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    made.ways("switched off", **off)
    made.ways("switched off, then a text", **forced("Sunny.", **off))
    made.ways("switched off, then a call", tools=TOOLS, **forced(call, **off))
    made.ways("switched off, then JSON", structured_outputs={"json": PERSON}, max_tokens=60, **off)
    made.chat("reasoning_effort none", reasoning_effort="none")
    made.chat("reasoning_effort high", reasoning_effort="high")
    made.chat("thinking_token_budget", thinking_token_budget=4, max_tokens=12)
    made.ways("after results", messages=HISTORY, tools=TOOLS)
    told = [*HISTORY, {"role": "assistant", "content": "Cold.", "reasoning": "12 and 9"}]
    made.ways("after reasoning", messages=[*told, {"role": "user", "content": "and now?"}])
    made.text("in a completion", prompt="a <think>b</think> c")
    made.ways("and stop inside", stop="unused", min_tokens=6)
    made.ways("and stop inside, kept", stop="unused", min_tokens=6, include_stop_str_in_output=True)
    return made
