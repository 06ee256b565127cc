"""What can be wrong is said in one line, before anything is started."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from heddle_runtime.vllm import checks
from heddle_runtime.vllm.checks import (
    EngineSetupError,
    check_engines,
    check_tokenizer,
    free_memory,
    read_model,
    visible_gpus,
)
from heddle_runtime.vllm.settings import SUPPORTED, Installed, VllmSettings, installed_vllm

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 2048,
    "max_position_embeddings": 32768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 32,
    "dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"0" * 4096)
    return folder


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the right vLLM, two cores and enough memory, whatever this one has."""
    monkeypatch.setattr(checks, "installed_vllm", lambda: Installed(SUPPORTED["cpu"], "cpu"))
    monkeypatch.setattr(checks, "has_nixl", lambda: True)
    monkeypatch.setattr(checks, "free_memory", lambda: 16 << 30)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})


def check(model, *, tp=(1,), largest=1000, **settings):
    return check_engines(
        VllmSettings(**({"model_dir": str(model)} | settings)),
        tp_degrees=tp,
        largest_tokens=largest,
    )


def refusal(model, **settings) -> str:
    with pytest.raises(EngineSetupError) as error:
        check(model, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_right_passes_and_returns_the_model(model):
    found = check(model, tp=(1, 2))
    assert found.notes == ()
    assert found.model.kv_bytes_per_token("float32") == 2 * 2 * 2 * 32 * 4
    assert found.model.kv_bytes_per_token("auto") == 2 * 2 * 2 * 32 * 2
    assert (found.model.vocabulary, found.model.max_context) == (2048, 32768)


def test_vllm_that_is_not_there(model, monkeypatch):
    monkeypatch.setattr(checks, "installed_vllm", lambda: None)
    assert "make vllm-cpu" in refusal(model)


def test_another_release_is_refused_unless_it_is_allowed(model, monkeypatch):
    monkeypatch.setattr(checks, "installed_vllm", lambda: Installed("0.33.0", "cpu"))
    message = refusal(model)
    assert "0.33.0" in message
    assert SUPPORTED["cpu"] in message
    assert "allow_unknown_vllm" in message
    (note,) = check(model, allow_unknown_vllm=True).notes
    assert "0.33.0" in note


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / "config.json").unlink(), "no config.json"),
        (lambda m: (m / "config.json").write_text("{"), "JSON"),
        (lambda m: (m / "config.json").write_text("[" * 5_000), "JSON"),
        (lambda m: (m / "config.json").write_text("[]"), "no architectures"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights"),
        (
            lambda m: (m / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": "many"})),
            "vocab_size is 'many'",
        ),
        (
            lambda m: (m / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "part-1.safetensors"}}'
            ),
            "lacks part-1.safetensors",
        ),
        (lambda m: (m / "model.safetensors.index.json").write_text("{}"), "not a list of weights"),
        (lambda m: (m / "model.safetensors.index.json").write_text("[" * 5_000), "not a list of w"),
    ],
)
def test_a_folder_that_is_no_model(model, spoil, message):
    spoil(model)
    assert message in refusal(model)


def test_a_folder_that_is_not_there(tmp_path):
    assert "no such model folder" in refusal(tmp_path / "nowhere")
    with pytest.raises(EngineSetupError, match="no model: there is no such"):
        read_model("")


def test_random_weights_need_no_files(model):
    (model / "model.safetensors").unlink()
    assert check(model, load_format="dummy").model.weight_bytes == 0


def test_a_context_beyond_the_model(model):
    assert "40,000 tokens, and the model takes 32,768" in refusal(model, largest=40_000)
    assert "max_context is 2,000" in refusal(model, largest=2001, max_context=2000)
    assert "was made for 32,768" in refusal(model, max_context=40_000)


def test_tp_beyond_the_cores_or_not_dividing_the_heads(model, monkeypatch):
    assert "TP 4 needs" in refusal(model, tp=(1, 4))
    assert "TP 3 does not divide" in refusal(model, tp=(3,))
    monkeypatch.setattr(checks, "installed_vllm", lambda: Installed(SUPPORTED["cuda"], "cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpus() == ("3",)
    assert "GPU" in refusal(model, tp=(2,))
    assert check(model, tp=(1,)).installed.platform == "cuda"


def test_too_little_kv_space_says_how_much_is_enough(model):
    message = refusal(model, max_context=8192, kv_bytes=2 << 20)
    assert "2 MiB holds 4,064 tokens" in message
    assert "8,192" in message
    enough = int(message.partition("give an engine ")[2].split()[0])
    check(model, max_context=8192, kv_bytes=enough << 20)
    assert "KV space" in refusal(model, max_context=8192, kv_bytes=(enough - 1) << 20)


def test_engines_that_do_not_fit_into_memory(model, monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda: 2 << 30)
    check(model)
    message = refusal(model, tp=(1, 1))
    assert "2 engines need about 2." in message
    assert "2.0 are free" in message


def test_the_memory_of_this_machine_can_be_read():
    assert free_memory() > 1 << 20


def test_nixl_that_is_not_there(model, monkeypatch):
    monkeypatch.setattr(checks, "has_nixl", lambda: False)
    assert check(model).notes == ()
    assert "nixl is not installed" in refusal(model, kv_transfer="nixl")


def taken_after_a_free_one() -> socket.socket:
    """A socket on a port after a free one, below those that the system gives."""
    for port in range(20_001, 32_000, 2):
        other = socket.socket()
        try:
            with socket.socket() as before:
                before.bind(("", port - 1))
                other.bind(("127.0.0.1", port))
            return other
        except OSError:
            other.close()
    raise AssertionError("no two free ports")


def test_a_port_that_is_taken(model):
    with taken_after_a_free_one() as other:
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} cannot be used" in refusal(
            model, tp=(1, 1), kv_transfer="nixl", kv_port=port - 1
        )
    check(model, tp=(1, 1), kv_transfer="nixl")


def test_kv_in_host_memory_needs_gpus_and_the_only_connector(model, monkeypatch):
    assert "no OffloadingConnector on CPU" in refusal(model, host_kv_gib=64.0)
    on_gpu = Installed(SUPPORTED["cuda"], "cuda")
    monkeypatch.setattr(checks, "installed_vllm", lambda: on_gpu)
    monkeypatch.setattr(checks, "visible_gpus", lambda: tuple("01234567"))
    check(model, host_kv_gib=64.0)
    assert "two connectors" in refusal(model, host_kv_gib=64.0, kv_transfer="nixl")


def test_vllm_knows_the_option_for_kv_in_host_memory():
    if installed_vllm() is None:
        pytest.skip("vLLM is not installed")
    # In a process of its own: to import vLLM changes more of one than a test should.
    script = (
        "import dataclasses; from vllm.engine.arg_utils import EngineArgs;"
        "print(*(field.name for field in dataclasses.fields(EngineArgs)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert {"kv_offloading_size", "kv_transfer_config"} <= {*done.stdout.split()}


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_margin_s": 60.0},
        {"temperature": -0.1},
        {"gpu_memory_share": 1.5},
        {"progress_s": 0.0},
        {"threads": 0},
    ],
)
def test_settings_out_of_range_name_themselves(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        VllmSettings(model_dir="x", **wrong)


def test_a_tokenizer_that_is_to_be_loaded_must_be_there(model):
    check_tokenizer(VllmSettings(model_dir=str(model)))
    wanted = VllmSettings(model_dir=str(model), tokenizer=True)
    with pytest.raises(EngineSetupError, match=r"has no tokenizer .*leave out runtime\.tokenizer"):
        check_tokenizer(wanted)
    (model / "tokenizer.json").write_text("{}")
    check_tokenizer(wanted)
