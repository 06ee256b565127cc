"""Layouts that tables lack: ranks of attention and experts spread, by the roofline."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks.check_gpu import compared
from heddle.cli.profile_line import profile_lines
from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import layout_profile
from heddle_calibrate.roofline.missing_layouts import BY_ROOFLINE, with_layouts
from heddle_calibrate.roofline.slower_layouts import shown_seconds
from heddle_calibrate.serving.sglang import of_sglang
from heddle_sim.profile_files import ProfileError, load_profile
from heddle_sim.profile_parts import nearest_release, release


def test_ranks_that_tables_lack_come_from_the_roofline_with_their_error() -> None:
    whole = load_profile("qwen3-30b-a3b", "h200")
    less = replace(
        whole,
        tables={name: table for name, table in whole.tables.items() if "dp" not in name},
        kernel_factors=None,
    )
    made = with_layouts(less, expert_parallel=True, attention_dp=4)
    assert set(made.tables) - set(less.tables) == {"1dp4ep4", "2dp4ep8"}
    assert made.tables["1dp4ep4"].errors["roofline"] == BY_ROOFLINE
    known = replace(whole, kernel_factors=None)
    step, batch, _ = zip(*(shown_seconds(p, "1dp4ep4") for p in (made, known)), strict=True)
    assert step[0] == pytest.approx(step[1], rel=0.15)
    assert batch[0] == pytest.approx(batch[1], rel=0.15)


def test_tables_that_are_there_stay() -> None:
    profile = load_profile("qwen3-30b-a3b", "h200")
    assert with_layouts(profile, expert_parallel=True, attention_dp=2).tables == profile.tables
    dense = load_profile("qwen3-8b", "h100")
    assert with_layouts(dense, expert_parallel=False, attention_dp=2) is dense


def test_experts_in_fp8_are_not_cut_through_their_blocks() -> None:
    profile = load_profile("minimax-m2.5", "h200")
    made = with_layouts(profile, expert_parallel=False, attention_dp=2)
    # 1,536 wide experts over 8 GPUs would have 192 in each: no multiple of 128.
    assert {"1dp2", "2dp2"} <= set(made.tables)
    assert "4dp2" not in made.tables


def test_a_layout_by_the_roofline_is_not_said_to_be_a_table() -> None:
    cluster = ClusterConfig(model="qwen3-30b-a3b", gpu="h100", attention_dp=2, gpus=8)
    (line, *_) = profile_lines(layout_profile(cluster), 1)
    assert line == f"vLLM 0.24 kernel tables; this layout {BY_ROOFLINE}"


def test_a_layout_that_is_impossible_has_its_reason() -> None:
    cluster = ClusterConfig(
        model="qwen3-30b-a3b-fp8", gpu="h100", expert_parallel="off", attention_dp=2, tp=2, gpus=8
    )
    with pytest.raises(ProfileError, match=r"TP 2dp2: 768 columns of an expert over 4 GPUs"):
        layout_profile(cluster).at(2)


def test_a_cluster_of_a_layout_without_tables_runs() -> None:
    cluster = ClusterConfig(
        model="gpt-oss-120b", gpu="h200", expert_parallel="off", attention_dp=2, tp=2, gpus=4
    )
    profile = layout_profile(cluster)
    assert profile.shape(2).gpus == 4
    assert profile.table(2).base_s[8] > 0


def test_a_version_takes_the_host_time_of_the_nearest_release_that_was_measured() -> None:
    profile = load_profile("gpt-oss-120b", "h100")
    times = profile.host_versions
    assert times is not None
    assert {"0.11.2", "0.18.0"} <= set(times)
    assert profile.of_version("0.12.0").host.per_step_s == times["0.11.2"].per_step_s
    assert profile.of_version("0.26.0").host.per_step_s == times["0.18.0"].per_step_s
    assert profile.of_version("") is profile
    said = "host time of 0.18.0, the nearest measured to 0.26.0"
    assert profile.of_version("0.26.0").source.note.endswith(said)
    assert said not in profile.of_version("0.18.0").source.note
    cluster = ClusterConfig(model="gpt-oss-120b", gpu="h100", engine_version="0.11.2")
    assert layout_profile(cluster).host.per_step_s == times["0.11.2"].per_step_s
    with pytest.raises(ProfileError, match=r"version 'nightly'; take one near .*0\.18\.0"):
        profile.of_version("nightly")


def test_a_version_without_a_measured_release_leaves_times_and_says_so() -> None:
    profile = load_profile("qwen3-14b", "h100")
    made = profile.of_version("0.26.0")
    assert (made.host, made.tables) == (profile.host, profile.tables)
    assert made.source.note.startswith("no host time of 0.26.0 was measured: it is that of Qwen3")
    with pytest.raises(ProfileError, match=r"near 0\.26\.0, or leave cluster\.engine_version out"):
        profile.of_version("nightly")


def test_the_version_of_our_own_run_has_the_host_time_that_it_showed() -> None:
    """No host time in iterations: that of vLLM 0.12 is 22 % too much of them."""
    found = json.loads(Path("benchmarks/gpu_h200.json").read_text(encoding="utf-8"))
    profile = load_profile("qwen3-8b", "h200")
    steps = {
        version: median(
            row.off_pct
            for row in compared(found, profile.of_version(version).table(1))
            if row.kind == "decode"
        )
        for version in ("0.12.0", found["vllm"])
    }
    assert steps["0.12.0"] > 20
    assert abs(steps[found["vllm"]]) < 5
    assert profile.of_version("0.12.0").host.per_step_s == profile.host.per_step_s
    assert profile.of_version("") == profile.of_version(found["vllm"])
    cluster = ClusterConfig(model="qwen3-8b", gpu="h200")
    assert layout_profile(cluster) == layout_profile(replace(cluster, engine_version="0.26.0"))


def test_the_cost_estimate_has_the_host_time_of_the_release() -> None:
    """That of vLLM 0.12 made a policy's steps up to three times as long as 0.26's."""
    whole = load_profile("qwen3-8b", "h200")
    for version in ("0.12.0", "0.26.0", ""):
        profile = whole.of_version(version)
        for tp in profile.tps:
            truth, cost = profile.table(tp), profile.cost_estimate().by_shape[profile.shape(tp)]
            for batch in (1, 16, 64, 128):
                step = truth.base_s[batch] + truth.per_context_s[batch] * batch * 4096
                found = cost.t0_s + cost.t1_s * batch + cost.t2_s * batch * 4096
                assert found == pytest.approx(step, rel=0.4), (version, tp, batch)


def test_the_knee_of_an_estimate_has_the_host_time_of_the_release() -> None:
    whole = load_profile("gpt-oss-120b", "h100")
    known, made = whole.at(2).belief.filling, whole.of_version("0.11.2")
    found, more_s = made.at(2).belief.filling, made.host.per_step_s - whole.host.per_step_s
    assert known is not None
    assert found is not None
    assert more_s > 0
    assert found.t0_s == pytest.approx(known.t0_s + more_s)


def test_without_a_version_times_of_runs_without_releases_stay() -> None:
    for names in (("qwen3-14b", "h100"), ("qwen3-30b-a3b", "h200"), ("gpt-oss-120b", "h100")):
        profile = load_profile(*names)
        assert profile.of_version("") == profile


def test_batches_that_tables_lack_are_named() -> None:
    profile = load_profile("qwen3-30b-a3b", "h200")
    said = "batches over 256 are extrapolated: its tables have none"
    assert profile_lines(profile, 1, 257)[-1] == said
    assert said not in profile_lines(profile, 1, 256)
    ranks = profile.laid_out("on", attention_dp=2)
    assert not [line for line in profile_lines(ranks, 1, 512) if "extrapolated" in line]


def test_sglang_says_which_version_stands_in_for_one_that_was_not_measured() -> None:
    profile = load_profile("gpt-oss-120b", "h200")
    said = "those of 0.5.10.post1, the nearest measured to 0.7.0"
    assert of_sglang(profile, "0.7.0").source.note.endswith(said)
    assert "nearest" not in of_sglang(profile, "0.5.9").source.note


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("0.7.0", "0.5.10"),
        ("0.4.9", "0.5.1"),
        ("0.5.11", "0.5.10"),
        ("0.5.7", "0.5.6"),
        ("1.0", "0.5.10"),
        ("0.5", "0.5.1"),
    ],
)
def test_the_nearest_release_is_that_of_the_numbers(wanted: str, near: str) -> None:
    known = [release(each) for each in ("0.5.1", "0.5.6", "0.5.9", "0.5.10")]
    assert nearest_release(release(wanted), known) == release(near)
