"""Configuration is strict: every message names the source, the key and the remedy."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import load_profiles
from heddle.command_config import Config
from heddle.config import RunConfig
from heddle.config_files import (
    ConfigError,
    from_builtins,
    read_toml,
    resolve,
    setting,
    to_builtins,
)
from heddle.setup import simulation_config
from heddle_compiled import in_force
from heddle_core.defaults import ENGINE_START_S, REPORT_DELAY_S, REPORT_INTERVAL_S, SPARE_SLOTS
from heddle_core.ids import EngineShape
from heddle_core.policy import PolicyContext
from heddle_rollout.driver import Driver
from heddle_runtime.vllm.settings import VllmSettings
from heddle_sim.config import SimulationConfig


def test_later_sources_win_and_the_rest_are_defaults(tmp_path: Path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('trace = "t.jsonl"\nseed = 3\n[cluster]\ngpus = 4\ntp = 2\n')
    second.write_text("[cluster]\ngpus = 16\n")
    config = resolve([read_toml(first), read_toml(second), setting("cluster.gpu=h200")])
    assert config == Config(
        trace="t.jsonl", seed=3, cluster=ClusterConfig(gpus=16, tp=2, gpu="h200")
    )


def test_resolved_values_read_back_equal():
    config = RunConfig(trace="t", cluster=ClusterConfig(gpus=4, tp_choices=(1, 2)))
    assert from_builtins(to_builtins(config), "x") == config


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster.max_runing=3", 'is not a key of [cluster]. Did you mean "max_running"?'),
        ("polcy.preset=verl", 'polcy is not a key of the top level. Did you mean "policy"?'),
        ("cluster.gpus=many", "expected `int`, got `str`"),
        ("cluster.gpus=0", "gpus must be from 1"),
        ("cluster.gpus=99999999", "gpus must be from 1 to 100,000"),
        ("cluster.tp=3", "gpus = 8 is not divisible by tp = 3: take gpus = 6"),
        (
            "cluster.report_interval_s=nan",
            "report_interval_s must be from 0.01 to below 1e9 seconds",
        ),
        (
            "cluster.report_interval_s=inf",
            "report_interval_s must be from 0.01 to below 1e9 seconds",
        ),
        ("missing.tool_s=guess", "'guess' is no rule; write error, zero, sample, typical"),
        ("missing.output_tokens=zero", "take one of 'error', 'sample'"),
        ("missing.cap_tool_s=-1", "cap_tool_s must be more than 0"),
        ("cluster=3", "cluster is a section"),
        ("seed=-1", "seed must be from 0"),
        ("seed=true", "expected `int`, got `bool`"),
        ('policy.preset=""', "preset must name a policy"),
        ("history=a\0b", "history is no path: it has a NUL character in it"),
        ("predictor_model=a\0b", "predictor_model is no path: it has a NUL character in it"),
        ("gpus", "write it as section.key=value"),
        ("cluster.tp_choices=[]", "tp_choices = [] must list TP degrees from 1 to gpus = 8"),
    ],
)
def test_a_wrong_setting_is_named(text: str, said: str):
    with pytest.raises(ConfigError) as error:
        resolve([setting("trace=t"), setting(text)])
    assert said in str(error.value)
    assert text in str(error.value)


def test_a_number_may_begin_with_its_point():
    found = resolve([setting("trace=t"), setting("loop.reward_failure_rate=.2")])
    assert found.loop.reward_failure_rate == 0.2
    assert resolve([setting("trace=t"), setting("loop.reward_s=.5")]).loop.reward_s == 0.5
    with pytest.raises(ConfigError, match=r"gpus=.2: expected `int`, got `float`"):
        resolve([setting("trace=t"), setting("cluster.gpus=.2")])


def test_a_wrong_key_in_a_file_names_the_file_and_the_key(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text('trace = "t"\n[cluster]\ngpus = "8"\n')
    with pytest.raises(ConfigError, match=r"run\.toml: cluster\.gpus: expected `int`, got `str`"):
        resolve([read_toml(path)])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"gpus = ", "not TOML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"gpus = " + b"[" * 5000, "nested too deeply"),
        (b"gpus = " + b"{a=" * 5000, "nested too deeply"),
        (b"gpus = " + b"9" * 5000, "too many digits"),
        (None, "no such"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes | None, said: str):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        read_toml(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_a_value_that_is_too_large_is_named_without_it(value: str):
    with pytest.raises(ConfigError) as error:
        setting(f"cluster.gpus={value}")
    said = "nested too deeply, or a number of too many digits"
    assert str(error.value) == f"--set cluster.gpus: its value is {said}"


def test_a_folder_is_not_a_file(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a directory"):
        read_toml(tmp_path)


def test_defaults_that_several_packages_use_are_equal_in_all_of_them():
    def default(of: Callable[..., Any], name: str) -> Any:
        return signature(of).parameters[name].default

    assert default(ClusterConfig, "report_interval_s") == REPORT_INTERVAL_S
    assert default(SimulationConfig, "report_interval_s") == REPORT_INTERVAL_S
    assert default(SimulationConfig, "report_delay_s") == REPORT_DELAY_S
    assert default(SimulationConfig, "engine_start_s") == ENGINE_START_S
    assert default(PolicyContext, "engine_start_s") == ENGINE_START_S
    assert VllmSettings(model_dir="m").spare_slots == SPARE_SLOTS


@pytest.mark.skipif(in_force(), reason="a compiled class has no signature to read")
def test_the_driver_has_the_same_defaults():
    parameters = signature(Driver).parameters
    assert parameters["report_interval_s"].default == REPORT_INTERVAL_S
    assert parameters["report_delay_s"].default == REPORT_DELAY_S


def test_the_table_of_an_engine_covers_its_spare_slots():
    cluster = ClusterConfig(gpus=1, max_running=600)
    table = simulation_config(cluster, load_profiles(cluster)).table(EngineShape("h100", 1))
    assert len(table.base_s) - 1 >= cluster.max_running + SPARE_SLOTS


def test_a_run_needs_a_trace():
    with pytest.raises(ConfigError, match="no trace is named"):
        resolve([setting("seed=1")])
