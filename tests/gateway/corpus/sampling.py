"""Requests about each optional field: absent, at its default, at its edges, and wrong."""

from typing import Any

from tests.gateway.corpus.request import ABSENT, Requests

DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 11}
"""Random, but the same each time."""
_VALUES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("temperature", (0.0, 0.5, 1.0, 2.0, 1e-6, -0.1, "hot", True)),
    ("top_p", (1.0, 0.5, 0.01, 0.0, 1.1, -1, None, "x")),
    ("top_k", (0, 1, 5, -1, 10**6, -2, 1.5, None, "x")),
    ("min_p", (0.0, 0.3, 1.0, 1.1, -0.1, None)),
    ("presence_penalty", (0.0, 2.0, -2.0, 2.1, None)),
    ("frequency_penalty", (0.0, 1.5, -2.1, None)),
    ("repetition_penalty", (1.0, 1.4, 0.5, 0.0, -1.0, None)),
    ("seed", (0, -5, 2**40, 2**63 - 1, 2**63, 1.5, "x")),
)
_FIXED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("n", (1, 0, -1, "x")),
    ("logit_bias", ({}, {"70": 100}, {"5000": 1}, {"x": 1}, {"70": "y"}, {"70": 101}, None, [])),
    ("logit_bias", ({"-1": 5}, {"70": -100, "71": 3.5}, {"2047": 50}, {"2048": 50})),
    ("allowed_token_ids", ([70, 71, 72], [], [5000], [-1], [2048], ["x"], None, 7)),
    ("bad_words", ([], ["a"], ["<|unused704|>", "zebra"], [""], None, "x", [1])),
    ("priority", (0, 1, -1, "x", 2**64)),
    ("cache_salt", ("salt", "", 5, "a/b", "x" * 129, None)),
    ("user", ("someone", None, 5)),
    ("metadata", ({"run": "1"}, None, "x")),
    ("service_tier", ("auto", "default", "x", None)),
    ("store", (False, True)),
    ("session_id", ("one", None, 5)),
    ("length_penalty", (1.0, 0.5, "x", None)),
    ("stream_interval", (1, 3, 0, "x")),
    ("repetition_detection", (None, {"max_pattern_size": 4, "min_count": 3}, {"min_count": -1})),
    ("vllm_xargs", ({"mine": 1}, {}, {"mine": {"a": 1}}, None)),
    ("thinking_token_budget", (None, 5, -1, -2)),
    ("watermarking", (None, False)),
    ("return_token_offsets", (True, None)),
    ("routed_experts_prompt_start", (0, -1)),
    ("mm_payload", ("none", "x")),
    ("kv_transfer_params", (None, {})),
    ("logits_processors", (["mine"], None)),
    ("guided_regex", ("[a-c]+",)),
    ("best_of", (1, 2)),
    ("suffix", ("end", None)),
    ("use_beam_search", (False, True)),
    ("early_stopping", (True,)),
    ("unknown_field", ("x", {"deep": [1, {"er": None}]})),
)
_OF_CHATS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("reasoning_effort", ("low", "none", "x", None)),
    ("include_reasoning", (True, False, "x")),
    ("parallel_tool_calls", (True, False, None)),
    ("tool_choice", ("none", "auto", "x", None)),
    ("tools", ([], None, [{"type": "function"}], "x")),
    ("add_generation_prompt", (True, False)),
    ("add_special_tokens", (True, False)),
    ("documents", (None, [{"title": "a", "text": "b"}], "x")),
    ("chat_template", (None, "{{ messages[0].content }}", "{% broken")),
    ("chat_template_kwargs", ({}, {"mine": 1}, {"add_generation_prompt": False}, "x")),
    ("mm_processor_kwargs", (None, {"a": 1})),
    ("media_io_kwargs", (None, {"video": {"num_frames": 4}})),
    ("modalities", (["text"], ["text", "audio"])),
    ("verbosity", ("low",)),
    ("prediction", ({"type": "content", "content": "x"},)),
    ("function_call", ("auto",)),
    ("functions", ([{"name": "f", "parameters": {}}],)),
)


def fields(seed: int, model: str) -> Requests:
    """One field a request; where it matters of a random draw with a seed."""
    made = Requests("fields", seed=seed, model=model)
    for name, values in _VALUES:
        for value in values:
            drawn = DRAWN | {name: value}
            if made.chance():
                made.chat(f"{name} {value!r}, chat", **drawn)
            else:
                made.text(f"{name} {value!r}, text", **drawn)
    for name, values in _FIXED:
        for value in values:
            shown = f"{name} {str(value)[:60]}"
            if made.chance():
                made.chat(f"{shown}, chat", **{name: value})
            else:
                made.text(f"{shown}, text", **{name: value})
    for name, values in _OF_CHATS:
        for value in values:
            made.chat(f"{name} {str(value)[:60]}", **{name: value})
    made.both("temperature absent", temperature=ABSENT, seed=4)
    made.both("temperature null", temperature=None, seed=4)
    made.both("everything at its default", **_DEFAULTS)
    made.both(
        "several at once",
        **DRAWN,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
    )
    made.both("request_id", request_id="mine-1")
    made.both("request_id empty", request_id="")
    made.both("request_id no text", request_id=7)
    made.both("X-Request-Id", headers={"X-Request-Id": "mine-2"})
    made.both("X-Session-ID", headers={"X-Session-ID": "session-1"})
    made.both("Authorization", headers={"Authorization": "Bearer none"})
    made.both("Accept", headers={"Accept": "application/json"})
    return made


_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "prompt_logprobs": None,
    "echo": False,
    "response_format": None,
    "structured_outputs": None,
    "priority": 0,
    "return_token_ids": None,
    "return_tokens_as_token_ids": None,
    "cache_salt": None,
    "user": None,
}
