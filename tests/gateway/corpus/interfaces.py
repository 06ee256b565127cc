"""Requests for several answers, of other protocols, and to paths that an engine answers itself."""

import json
from typing import Any, Final

from tests.gateway.corpus.request import Requests

SAMPLED: Final[dict[str, Any]] = {"temperature": 0.8, "seed": 11}
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"


def several(seed: int, model: str) -> Requests:
    """Samples, and several prompts."""
    made = Requests("several", seed=seed, model=model)
    for stream in (False, True):
        how = ", streamed" if stream else ""
        made.both(f"two samples{how}", n=2, stream=stream, **SAMPLED)
        made.both(f"samples with log-probs{how}", n=2, logprobs=1, stream=stream, **SAMPLED)
        made.both(f"samples with ids{how}", n=2, return_token_ids=True, stream=stream, **SAMPLED)
        made.text(f"two prompts{how}", prompt=["one", "a longer two"], stream=stream)
        made.text(f"prompts of ids{how}", prompt=[[70, 71], [72]], stream=stream)
        made.text(f"prompts and samples{how}", prompt=["a", "b"], n=2, stream=stream, **SAMPLED)
        made.text(f"prompts with echo{how}", prompt=["a", "b"], echo=True, stream=stream)
    made.both("greedy samples", n=2)
    made.both("samples as a text", n="2", stream=False, **SAMPLED)
    made.both("more samples than vLLM makes", n=20_000, **SAMPLED)
    made.text("a prompt of two is empty", prompt=["a", ""], stream=False)
    made.text("prompts of two kinds", prompt=["a", [70]], stream=False)
    made.text("prompts that are too long", prompt=["a", "b " * 9_000], stream=False)
    return made


def others(seed: int, model: str) -> Requests:
    """Anthropic's messages, OpenAI's responses, and paths that are passed on."""
    made = Requests("interfaces", seed=seed)
    user = [{"role": "user", "content": "a river"}]
    for name, fields in _MESSAGES.items():
        body = {"model": model, "max_tokens": 8, "temperature": 0, "messages": user, **fields}
        made.raw(f"messages, {name}", MESSAGES, json.dumps(body).encode())
    for name, fields in _RESPONSES.items():
        body = {"model": model, "max_output_tokens": 8, "temperature": 0, "input": "a stone"}
        made.raw(f"responses, {name}", RESPONSES, json.dumps(body | fields).encode())
    for path in (MESSAGES, RESPONSES):
        made.raw(f"a form to {path}", path, b"a=1", content_type="text/plain")
    counted = json.dumps({"model": model, "messages": user}).encode()
    made.raw("tokens of messages", f"{MESSAGES}/count_tokens", counted)
    made.raw("tokens of another model", f"{MESSAGES}/count_tokens", b'{"model": "x"}')
    for path in ("/v1/embeddings", "/rerank", "/classify"):
        made.raw(f"not there: {path}", path, json.dumps({"model": model, "input": "a"}).encode())
    return made


_TOOL: Final = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
_MESSAGES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "streamed": {"stream": True},
    "with a system": {"system": "be brief"},
    "with blocks": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    "with a tool": {"tools": [_TOOL], "tool_choice": {"type": "none"}},
    "after a reply": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    },
    "a stop sequence": {"stop_sequences": ["e"]},
    "too hot": {"temperature": 3},
    "no limit": {"max_tokens": None},
    "no messages": {"messages": []},
    "a role": {"messages": [{"role": "x", "content": "a"}]},
    "another model": {"model": "other"},
    "too long": {"max_tokens": 100_000},
}
_RESPONSES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "streamed": {"stream": True},
    "a list": {"input": [{"role": "user", "content": "a"}]},
    "with instructions": {"instructions": "be brief"},
    "after a reply": {
        "input": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    },
    "too hot": {"temperature": 3},
    "no input": {"input": None},
    "another model": {"model": "other"},
    "after an unknown one": {"previous_response_id": "resp_none"},
    "too long": {"max_output_tokens": 100_000},
}
