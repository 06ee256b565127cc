"""Tiny models: their chat template, and that a seed decides the rest."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="tiny models need safetensors")
pytest.importorskip("tokenizers", reason="tiny models need tokenizers")

from heddle_runtime.tiny_model import make_tiny_model

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
DIALOGUE: list[dict[str, Any]] = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "the weather in Köln?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "9 degrees"},
    {"role": "assistant", "content": "It is "},
]


def test_a_chat_has_roles_tools_calls_and_results(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))

    def chat(messages: list[dict[str, Any]], **options: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    assert chat(DIALOGUE[:2], add_generation_prompt=True) == (
        "<system>be short\n<user>the weather in Köln?\n<assistant>"
    )
    whole = chat(DIALOGUE, tools=[TOOL], add_generation_prompt=True)
    assert whole == (
        "<tools>\n"
        '{"type": "function", "function": {"name": "get_weather", "parameters": '
        '{"type": "object", "properties": {}}}}\n'
        "<system>be short\n<user>the weather in Köln?\n"
        '<assistant><call>get_weather {"city": "Köln"}\n'
        "<tool>call-1: 9 degrees\n<assistant>It is \n<assistant>"
    )
    assert chat(DIALOGUE, continue_final_message=True).endswith("\n<assistant>It is ")


def test_a_dialogue_begins_with_the_tokens_of_the_one_before(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tiny_model(tmp_path))
    before: list[int] = []
    for length in range(1, len(DIALOGUE) + 1):
        text = tokenizer.apply_chat_template(DIALOGUE[:length], tokenize=False)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert tokens[: len(before)] == before
        before = tokens


def test_a_model_without_a_tokenizer_has_no_chat_template(tmp_path: Path):
    make_tiny_model(tmp_path, size="micro")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_seed_decides_the_weights_and_nothing_else(tmp_path: Path):
    one, same, other = (
        make_tiny_model(tmp_path / name, seed=seed)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    for path in one.iterdir():
        assert (same / path.name).read_bytes() == path.read_bytes()
        differs = (other / path.name).read_bytes() != path.read_bytes()
        assert differs == (path.name == "model.safetensors")
