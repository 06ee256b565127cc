"""`heddle serve check`: a line for what a gateway needs, and status 2 where something is wrong."""

import json
import socket
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="the gateway needs aiohttp: pip install 'heddle-rl[serve]'")

from heddle_gateway.saved import SavedState
from heddle_runtime.tiny_model import make_tiny_model
from tests.app.gateways import gateway
from tests.app.journals import Heddle
from tests.app.test_serve import FakeVllmThread


def checked(heddle: Heddle, *args: object) -> tuple[int, dict[str, tuple[bool, str]]]:
    done = heddle("serve", "check", "--port", "0", "--json", *args)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines, done.stderr
    return done.exit_code, {each["what"]: (each["ok"], each["said"]) for each in lines}


def test_all_is_well_and_nothing_is_left(heddle: Heddle, tmp_path: Path):
    state, log = tmp_path / "state.db", tmp_path / "access.jsonl"
    files = ("--set", f"serve.state={state}", "--set", f"serve.access_log={log}")
    with FakeVllmThread() as url:
        status, found = checked(heddle, "--worker", url, "--out", tmp_path / "runs", *files)
    assert status == 0, found
    assert found.keys() == {"configuration", "address", "serve.state", "serve.access_log", url}
    assert "vLLM 0.32.0, model counting" in found[url][1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    done = heddle("serve", "check", "--engine", "fake", "--port", "0")
    assert done.exit_code == 0
    assert [line[:5] for line in done.stdout.splitlines()] == ["ok   ", "ok   "]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no token endpoints": ({"scale_out": False}, "--enable-scale-out"),
    "no template": ({"template": False}, "--chat-template"),
    "another release": ({"version": "0.31.0"}, "give all one release"),
    "another model": ({"model": "other"}, "all must have one model"),
    "a key": ({"key": "secret"}, "it refuses the key (401)"),
    "no such TP": ({"tp": 64}, "give cluster.model another"),
    "no metrics": ({"metrics": False}, "--disable-log-stats"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_cannot_be_used_is_named_with_the_remedy(heddle: Heddle, fault: str):
    lies, remedy = FAULTS[fault]
    second = FakeVllmThread()
    for name, value in lies.items():
        setattr(second.vllm, name, value)
    with FakeVllmThread() as first, second as url:
        status, found = checked(heddle, "--worker", first, "--set", f'serve.workers=["{url}"]')
    assert status == 2
    assert found[first][0]
    ok, said = found[url]
    assert not ok
    assert remedy in said


def test_an_engine_that_is_given_by_two_names_is_said(heddle: Heddle):
    with FakeVllmThread() as url:
        same = url.replace("127.0.0.1", "localhost")
        status, found = checked(heddle, "--worker", url, "--worker", same)
    assert status == 2
    assert f"is the engine of {url}" in found[same][1]


def test_every_fault_of_a_configuration_is_said_at_once(heddle: Heddle, tmp_path: Path):
    state = tmp_path / "state.db"
    held = SavedState(state, 1.0, 1.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, found = checked(
            heddle,
            *("--worker", "http://127.0.0.1:9", "--port", port),
            *("--set", f"serve.state={state}", "--set", "serve.access_log=/no/such/log"),
            *("--set", f"serve.keys={tmp_path / 'none.toml'}"),
        )
    held.close()
    assert status == 2
    assert not any(ok for ok, _ in found.values())
    assert "none.toml: No such file" in found["configuration"][1]
    assert "--port 0 takes any" in found["address"][1]
    assert found["serve.state"][1].startswith(f"{state}: another gateway uses it")
    assert "/no/such" in found["serve.access_log"][1]
    assert "is it vLLM, and ready?" in found["http://127.0.0.1:9"][1]


def test_a_log_that_takes_nothing_is_said(heddle: Heddle):
    full = ("--engine", "fake", "--set", "serve.access_log=/dev/full")
    status, found = checked(heddle, *full)
    assert status == 2
    assert "No space left" in found["serve.access_log"][1]


def test_servers_of_other_models_are_asked_for_them(heddle: Heddle, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[ann]\nsha256 = "{sha256(b"ann").hexdigest()}"\n')
    with FakeVllmThread() as url, gateway(tmp_path, "--engine", "fake") as other:
        models = f'serve.models=["counting={url}","wrong={url}","qwen3-14b={other.url}"]'
        given = ("--engine", "fake", "--set", models)
        _, found = checked(heddle, *given)
        assert found[f"counting={url}"][0]
        assert "lists adapter, counting" in found[f"wrong={url}"][1]
        assert found[f"qwen3-14b={other.url}"] == (True, "is there")
        status, found = checked(heddle, *given, "--set", f"serve.keys={keys}")
        assert status == 2
        assert "cannot tell the tenants" in found[f"qwen3-14b={other.url}"][1]


def test_a_model_of_ones_own_needs_a_chat_template(heddle: Heddle, tmp_path: Path):
    _, found = checked(heddle, "--engine", "vllm", "--model-dir", tmp_path)
    assert not found["configuration"][0]
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    make_tiny_model(tmp_path)
    assert str(tmp_path) not in checked(heddle, "--engine", "vllm", "--model-dir", tmp_path)[1]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("[" * 5_000)
    status, found = checked(heddle, "--engine", "vllm", "--model-dir", tmp_path)
    assert status == 2
    assert "--chat-template=FILE" in found[str(tmp_path)][1]
