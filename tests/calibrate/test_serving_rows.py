"""Rows of published serving runs: what is read, what is left out and why, which profile."""

import csv
from pathlib import Path
from typing import Any

import pytest

from heddle_calibrate.fit.kernel_profile import NO_HOST
from heddle_calibrate.serving.limits import limits, recipe_of, recipes, with_limits
from heddle_calibrate.serving.published_rows import PublishedRowsError
from heddle_calibrate.serving.rows import (
    ServingRow,
    profile_name,
    profile_of,
    read_serving_rows,
)
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile, expand, load_profile

ROW = {
    "backend": "vllm",
    "backend_version": "0.19.0",
    "model": "Qwen/Qwen3-8B-Instruct",
    "gpu": "h100_sxm",
    "precision": "bf16",
    "tp": 2,
    "moe_ep": 1,
    "attention_dp": 1,
    "input_tokens": 1024,
    "output_tokens": 256,
    "concurrency": 16,
    "TTFT_ms": 100.0,
    "TPOT_ms": 10.0,
}


def table(path: Path, *rows: dict[str, Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, list(ROW))
        out.writeheader()
        out.writerows(ROW | row for row in rows)
    return path


def read(path: Path, *rows: dict[str, Any]) -> tuple[list[ServingRow], list[str]]:
    kept, out = read_serving_rows([table(path / "rows.csv", *rows)])
    return kept, [left.rule for left in out]


def test_a_row_names_its_engine_work_and_times(tmp_path: Path) -> None:
    (row,), out = read(tmp_path, {})
    assert not out
    assert (row.engine, row.version, row.model, row.gpu) == ("vllm", "0.19.0", "qwen3-8b", "h100")
    assert (row.tp, row.rank_tp, row.dp, row.expert_parallel) == (2, 2, 1, False)
    assert (row.ttft_s, row.tpot_s) == (0.1, 0.01)


def test_empty_cells_of_optional_columns_are_one(tmp_path: Path) -> None:
    (row,), _ = read(tmp_path, {"moe_ep": "", "attention_dp": "", "backend_version": ""})
    assert (row.dp, row.expert_parallel, row.version) == (1, False, "")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"tp": "two"}, r"rows\.csv:2: tp is 'two', not a positive number"),
        ({"tp": 1.5}, r"rows\.csv:2: tp is '1\.5', not a whole number"),
        ({"TPOT_ms": ""}, r"rows\.csv:2: TPOT_ms is empty; give a positive number, or leave"),
        ({"concurrency": -4}, r"rows\.csv:2: concurrency is '-4', not a positive number"),
    ],
)
def test_bad_cells_name_file_line_and_column(
    tmp_path: Path, cells: dict[str, Any], said: str
) -> None:
    with pytest.raises(PublishedRowsError, match=said):
        read(tmp_path, cells)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("backend,model\nvllm,x\n", encoding="utf-8")
    with pytest.raises(PublishedRowsError, match=r"rows\.csv:1: no column gpu, precision"):
        read_serving_rows([path])


def test_other_engines_and_precisions_are_left_out(tmp_path: Path) -> None:
    kept, out = read(tmp_path, {"backend": "trtllm"}, {"precision": "int2"})
    assert not kept
    assert out[0].startswith("engine trtllm: only vllm and sglang")
    assert out[1].startswith("precision 'int2': known are bf16")


def test_the_same_run_counts_once(tmp_path: Path) -> None:
    # Rounded figures are the same run as well.
    kept, out = read(tmp_path, {}, {}, {"TPOT_ms": 10.001})
    assert len(kept) == 1
    assert out == ["the same run again"] * 2


def test_figures_under_two_layouts_are_of_the_one_without_ranks(tmp_path: Path) -> None:
    kept, out = read(tmp_path, {"attention_dp": 2, "moe_ep": 4}, {})
    assert [row.dp for row in kept] == [1]
    assert out == ["the same figures are given for another layout"]


def test_a_run_slower_than_with_more_clients_is_left_out(tmp_path: Path) -> None:
    kept, out = read(
        tmp_path,
        {"concurrency": 8, "TPOT_ms": 9.0},
        {"concurrency": 16, "TPOT_ms": 30.0},
        {"concurrency": 32, "TPOT_ms": 12.0},
    )
    assert [row.concurrency for row in kept] == [8, 32]
    assert out == ["slower than the same run with as many clients or more: disturbed"]
    kept, left_out = read_serving_rows([tmp_path / "rows.csv"], every=True)
    assert [row.concurrency for row in kept] == [8, 16, 32]
    assert not left_out


PROFILES = {
    (model, "h200"): load_profile(model, "h200")
    for model in ("qwen3-8b", "gpt-oss-120b", "llama-3.1-70b", "llama-3.1-70b-fp8", "minimax-m2.5")
}


@pytest.mark.parametrize(
    ("cells", "name", "layout"),
    [
        ({}, "qwen3-8b", (2, False, 1)),
        ({"precision": "unlabelled"}, "qwen3-8b", (2, False, 1)),
        ({"model": "openai/gpt-oss-120b", "precision": "fp4"}, "gpt-oss-120b", (2, False, 1)),
        ({"model": "x/Meta-Llama-3.1-70B", "precision": "fp8"}, "llama-3.1-70b-fp8", (2, False, 1)),
        # Experts that eight GPUs cannot cut are spread over them.
        ({"model": "MiniMaxAI/MiniMax-M2.5", "precision": "fp8", "tp": 8}, "minimax-m2.5",
         (8, True, 1)),
        # The same number for TP and ranks: attention is not cut.
        ({"model": "MiniMaxAI/MiniMax-M2.5", "precision": "fp8", "tp": 4, "attention_dp": 4,
          "moe_ep": 16}, "minimax-m2.5", (1, True, 4)),
    ],
)  # fmt: skip
def test_rows_find_their_profile_and_layout(
    tmp_path: Path, cells: dict[str, Any], name: str, layout: tuple[int, bool, int]
) -> None:
    (row,), _ = read(tmp_path, {"gpu": "h200_sxm"} | cells)
    found = profile_of(row, PROFILES)
    assert isinstance(found, Profile)
    assert found.model == name
    assert (row.rank_tp, found.expert_parallel, found.attention_dp) == layout


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"model": "new/model"}, "no profile of model on h200"),
        ({"gpu": "mi300x"}, "no profile of qwen3-8b on mi300x: "),
        ({"tp": 3}, "the profile of qwen3-8b on h200 has no table at TP 3 with 1 ranks"),
    ],
)
def test_rows_without_a_profile_say_what_is_missing(
    tmp_path: Path, cells: dict[str, Any], said: str
) -> None:
    (row,), _ = read(tmp_path, {"gpu": "h200_sxm"} | cells)
    found = profile_of(row, PROFILES)
    assert isinstance(found, str)
    assert found.startswith(said)


def test_a_known_shape_without_a_profile_has_the_rooflines(tmp_path: Path) -> None:
    (row,), _ = read(tmp_path, {"model": "deepseek-ai/DeepSeek-R1", "precision": "fp4",
                                "gpu": "b200_sxm", "tp": 8})  # fmt: skip
    found = profile_of(row, PROFILES)
    assert isinstance(found, Profile)
    assert (found.model, found.source.package) == ("deepseek-v3-nvfp4", "heddle roofline")


@pytest.mark.parametrize(
    ("model", "precision", "name"),
    [
        ("Qwen/Qwen3-32B", "int4", "qwen3-32b-int4"),
        ("Qwen/Qwen3-32B-AWQ", "int4", "qwen3-32b-int4"),
        ("Qwen/Qwen3-32B", "mxfp4", "qwen3-32b-mxfp4"),
        ("openai/gpt-oss-120b", "bf16", "gpt-oss-120b-bf16"),
        ("openai/gpt-oss-120b", "mxfp4", "gpt-oss-120b"),
        ("openai/gpt-oss-120b", "unlabelled", "gpt-oss-120b"),
        ("moonshotai/Kimi-K2.5", "int4", "kimi-k2.5"),
        ("deepseek-ai/DeepSeek-R1", "bf16", "deepseek-v3-bf16"),
        ("own/weights", "int4", "weights"),
    ],
)
def test_a_row_has_the_profile_of_its_own_precision(
    tmp_path: Path, model: str, precision: str, name: str
) -> None:
    (row,), _ = read(tmp_path, {"model": model, "precision": precision})
    assert profile_name(row) == name


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ((16, "", 4, 4), (4, 4, 1, True)),
        ((2, "", 4, 1), (2, 2, 2, False)),
        ((4, 4, 1, 16), (4, 1, 4, True)),
        ((8, "", 8, 1), (8, 8, 1, False)),
    ],
)
def test_ranks_and_degrees_agree_with_the_gpus_of_experts(
    tmp_path: Path, given: tuple[int, object, int, int], layout: tuple[int, int, int, bool]
) -> None:
    cells = dict(zip(("tp", "attention_dp", "moe_tp", "moe_ep"), given, strict=True))
    path = limited(tmp_path / "rows.csv", {"model": "MiniMaxAI/MiniMax-M2.5", **cells})
    (row,), _ = read_serving_rows([path])
    assert (row.tp, row.rank_tp, row.dp, row.expert_parallel) == layout


def test_limits_of_sglang_are_its_own(tmp_path: Path) -> None:
    r1 = {"backend": "sglang", "model": "deepseek-ai/DeepSeek-R1", "gpu": "b200_sxm",
          "precision": "fp8", "tp": 8, "concurrency": 64}  # fmt: skip
    (stated,), _ = read(tmp_path, r1)
    own = stated.limits
    assert (own.batched_tokens, own.receive_every, own.max_running) == (32768, 30, 128)
    (usual,), _ = read(tmp_path, {"backend": "sglang", "gpu": "b200_sxm"})
    assert (usual.limits.batched_tokens, usual.limits.receive_every) == (16384, 1)


# -- limits of engines -----------------------------------------------------------------------------

GPT_OSS = {
    "model": "openai/gpt-oss-120b",
    "gpu": "h100_sxm",
    "precision": "fp4",
    "backend_version": "0.11.2",
    "input_tokens": 8192,
    "output_tokens": 1024,
    "concurrency": 512,
    "measured": "2025-12-08",
}


def limited(path: Path, cells: dict[str, Any]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, list(ROW | cells))
        out.writeheader()
        out.writerow(ROW | cells)
    return path


def test_a_least_batch_makes_fewer_sequences_take_its_time(tmp_path: Path) -> None:
    qwen = {"model": "Qwen/Qwen3-235B-A22B-FP8", "gpu": "h200_sxm", "precision": "fp8", "tp": 2}
    (old,), _ = read(tmp_path, qwen | {"backend_version": "0.12.0"})
    (new,), _ = read(tmp_path, qwen | {"backend_version": "0.19.0"})
    assert (old.limits.least_batch, new.limits.least_batch) == (32, 1)
    profile = load_profile("qwen3-235b-a22b-fp8", "h200")
    table = expand(profile, 2, host=NO_HOST)
    held = with_limits(table, profile, old.limits)
    assert held.base_s[0] == table.base_s[0]
    assert set(held.base_s[1:33]) == {table.base_s[32]}
    assert list(held.base_s[33:]) == list(table.base_s[33:])
    assert list(with_limits(table, profile, new.limits).base_s) == list(table.base_s)
    with pytest.raises(PublishedRowsError, match="least_batch is '500', not a whole number below"):
        read_serving_rows([limited(tmp_path / "rows.csv", qwen | {"least_batch": 500})])


def test_a_row_without_a_recipe_names_what_is_assumed(tmp_path: Path) -> None:
    (row,), _ = read(tmp_path, {})
    own = row.limits
    assert (own.max_running, own.requests, own.batched_tokens) == (16, 160, 8192)
    assert (own.memory_share, own.kv_dtype) == (0.9, "")
    assert len(own.assumed) == 7


def test_a_recipe_states_the_limits_of_its_runs_and_a_row_those_of_its_own(tmp_path: Path) -> None:
    path = limited(tmp_path / "rows.csv", GPT_OSS)
    own = read_serving_rows([path])[0][0].limits
    assert (own.max_running, own.requests, own.kv_dtype) == (64, 640, "bf16")
    assert own.assumed == ("speculation",)
    path = limited(tmp_path / "rows.csv", GPT_OSS | {"max_num_seqs": 32})
    assert read_serving_rows([path])[0][0].limits.max_running == 32


def test_a_recipe_is_of_its_dates() -> None:
    known = {"backend": "vllm", "model": "gpt-oss-120b", "gpu": "b200", "precision": "fp4"}
    known |= {"tp": "2", "inputs": "1024/1024", "clients": "8", "versions": ""}
    assert recipe_of(known | {"date": "2025-11-02"})["kv_dtype"] == "bf16"
    assert recipe_of(known | {"date": "2026-02-25"})["kv_dtype"] == "fp8"
    assert recipe_of(known | {"date": "", "model": "other"}) == {}


def test_every_recipe_can_be_read_and_has_a_source() -> None:
    for recipe in recipes():
        limits(recipe, clients=8, input_tokens=1024)
        assert "InferenceX" in recipe["source"] or "by T" in recipe["source"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"max_num_seqs": "all"}, r"rows\.csv:2: max_num_seqs is 'all', not a whole number, or"),
        (
            {"memory_share": "90"},
            r"rows\.csv:2: memory_share is '90', not a number above 0, at most 1",
        ),
        ({"kv_dtype": "int8"}, r"rows\.csv:2: kv_dtype is 'int8', not one of fp8, bf16"),
    ],
)
def test_a_bad_limit_names_file_line_and_column(
    tmp_path: Path, cells: dict[str, Any], said: str
) -> None:
    with pytest.raises(PublishedRowsError, match=said):
        read_serving_rows([limited(tmp_path / "rows.csv", cells)])


def test_speculation_is_left_out_by_name(tmp_path: Path) -> None:
    kept, out = read_serving_rows([limited(tmp_path / "rows.csv", {"speculation": "eagle3"})])
    assert not kept
    assert out[0].rule == "speculative decoding (eagle3): its acceptance is not published"


def test_memory_share_and_kv_precision_change_the_kv_of_a_table() -> None:
    profile = load_profile("qwen3-8b", "h100")
    table = expand(profile, 2, host=NO_HOST)

    def with_cells(**cells: str) -> LatencyTable:
        own = limits(cells, clients=8, input_tokens=1024)
        return with_limits(table, profile, own)

    # 2 GPUs of 79.2 GiB hold 147,456 bytes of a token together.
    more = with_cells(memory_share="0.95").kv_capacity_tokens - table.kv_capacity_tokens
    assert more == pytest.approx(0.05 * 2 * 79.2 * 2**30 / 147_456, abs=1)
    half = with_cells(kv_dtype="fp8")
    assert half.kv_capacity_tokens == 2 * table.kv_capacity_tokens
    assert half.per_context_s[8] == pytest.approx(table.per_context_s[8] / 2)
