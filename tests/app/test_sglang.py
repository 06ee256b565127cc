"""Clusters of SGLang engines: their times and limits, and what starts them."""

from dataclasses import replace
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import load_profiles
from heddle.config_error import ConfigError
from heddle.planning.blocks import block, blocks
from heddle.planning.exports import export
from heddle.setup import simulation_config
from heddle_sim.profile_files import ProfileError
from tests.app.test_blocks import CLUSTER, deployment, pairs

SGLANG = replace(CLUSTER, engine="sglang")


def test_engines_have_the_limits_and_times_of_sglang() -> None:
    ours, theirs = (load_profiles(each) for each in (SGLANG, CLUSTER))
    config = simulation_config(SGLANG, ours)
    assert (config.prefill_first, config.block_size, config.max_batched_tokens) == (True, 1, 8192)
    assert not simulation_config(CLUSTER, theirs).prefill_first
    mine, other = ours.classes[0].profile, theirs.classes[0].profile
    assert mine.host != other.host
    assert mine.at(2).belief.t0_s != other.at(2).belief.t0_s
    assert mine.at(2).kv_capacity_tokens != other.at(2).kv_capacity_tokens
    assert "published runs" in mine.source.note


def test_a_release_has_its_times_and_another_word_is_refused() -> None:
    of = [
        load_profiles(replace(SGLANG, engine_version=version)).classes[0].profile.host.per_step_s
        for version in ("0.5.1", "0.5.9", "0.5.12")
    ]
    assert len(set(of)) == 3
    with pytest.raises(ProfileError, match=r"'new' is no release of SGLang; take one near 0\.5\.1"):
        load_profiles(replace(SGLANG, engine_version="new"))


def test_settings_are_of_frameworks_that_run_sglang(trace: Path, tmp_path: Path) -> None:
    plan = deployment(trace, tmp_path / "runs", SGLANG)
    every = blocks(plan)
    assert set(every) == {"verl", "slime", "sglang"}
    assert pairs(every["verl"])["actor_rollout_ref.rollout.name"] == "sglang"
    checked, *lines = every["sglang"].splitlines()
    assert checked.startswith("# Names of InferenceX's published scripts of SGLang")
    assert len(lines) == 4
    for line in lines:
        assert "sglang.launch_server --model-path MODEL" in line
        assert "--tp-size 2 --max-running-requests 48 --chunked-prefill-size 8192" in line
    with pytest.raises(ConfigError, match=r"vime has no settings with cluster\.engine = 'sglang'"):
        block(plan, "vime")
    script = export(plan, tmp_path / "engines.sh")[tmp_path / "engines.sh"]
    assert script.count("sglang.launch_server --model-path") == 4
    assert "vllm" not in script.lower()
    with pytest.raises(ConfigError, match=r"gateway need vLLM engines, cluster\.engine is"):
        export(plan, tmp_path / "gateway.toml")


def test_drafts_are_options_of_the_launch(trace: Path, tmp_path: Path) -> None:
    drafted = replace(SGLANG, speculation="eagle3:3:0.8/0.7/0.6")
    found = blocks(deployment(trace, tmp_path / "runs", drafted))
    assert "--speculative-algorithm EAGLE3 --speculative-num-steps 3" in found["sglang"]
    assert (
        "+actor_rollout_ref.rollout.engine_kwargs.sglang.speculative_num_steps=3" in found["verl"]
    )


def test_vllm_stays_the_default(trace: Path, tmp_path: Path) -> None:
    assert ClusterConfig().engine == "vllm"
    plan = deployment(trace, tmp_path / "runs", CLUSTER)
    assert "sglang" not in blocks(plan)
