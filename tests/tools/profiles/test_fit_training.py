"""Fits of trainers and weight updates give back what made the rows; bad tables name the line."""

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from heddle_calibrate.serving.published_rows import LeftOut, PublishedRowsError
from heddle_sim.training import TrainingProfile, TrainLayout
from heddle_sim.training_files import TRAINING_FILE, load_training
from heddle_sim.weight_update import UpdateMethod, WeightUpdateProfile
from tools.profiles.from_training_rows import command, make_training, make_updates
from tools.profiles.training_fit import fit_rows
from tools.profiles.training_gpus import WITHOUT_ROWS, derived_efficiency
from tools.profiles.training_rows import (
    COLUMNS,
    TrainerFit,
    model_name,
    predicted_over_published,
    read_training_rows,
)
from tools.profiles.update_actor import colocated_pairs, read_actor_rows, same_batches
from tools.profiles.update_fit import fit_updates, predicted
from tools.profiles.update_rows import COLUMNS as UPDATE_COLUMNS
from tools.profiles.update_rows import UpdateRow, further_rows, read_update_rows

PERF = Path(__file__).parents[4] / "shared" / "perf"
STEPS = [PERF / f"training_rows{date}.csv" for date in ("", "_2026_11")]
SYNCS = [PERF / f"weight_sync_rows{date}.csv" for date in ("", "_2026_11")]
needs_tables = pytest.mark.skipif(
    not STEPS[0].is_file(), reason="the published training steps are not at ../shared/perf"
)

KNOWN = TrainingProfile(
    matmul={"megatron": 0.42, "fsdp": 0.25},
    attention={"megatron": 0.48, "fsdp": 0.36},
    low_precision_share=0.86,
    gpu_efficiency={},
    link_efficiency=0.6,
    expert_layer_s=2e-6,
    colocated_efficiency={},
)


def write(path: Path, columns: tuple[str, ...], rows: list[dict[str, object]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        table.writerows(rows)
    return path


def step(model: str, gpus: int, backend: str, length: int, *, source: str) -> dict[str, object]:
    """A row as KNOWN would have it."""
    time = KNOWN.step_time(
        np.full(1000, length),
        model=model,
        gpu="h100",
        gpus=gpus,
        backend=backend,
        layout=TrainLayout() if backend == "megatron" else None,
    )
    return {
        "model": model,
        "gpu": "H100",
        "gpus": gpus,
        "parallelism": "Megatron TP1" if backend == "megatron" else "FSDP2",
        "seq_len": length,
        "tokens_per_step": 1000 * length,
        "step_s": time.train_s + time.fixed_s,
        "phase": "train",
        "precision": "bf16",
        "framework": "made",
        "source": source,
    }


def made_steps() -> list[dict[str, object]]:
    return [
        step(model, gpus, backend, length, source=source)
        for backend in ("megatron", "fsdp")
        for model in ("qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")
        for gpus in (8, 32, 128)
        for length in (500, 4000, 32_000)
        for source in ("one", "two")
    ]


def test_the_fit_gives_back_what_made_the_steps(tmp_path: Path) -> None:
    rows, out = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, made_steps()))
    assert len(rows) == 108
    assert out == []
    fit = fit_rows(rows)
    for backend in ("megatron", "fsdp"):
        assert fit.profile.matmul[backend] == pytest.approx(KNOWN.matmul[backend], rel=0.05)
        assert fit.profile.attention[backend] == pytest.approx(KNOWN.attention[backend], rel=0.05)
    assert fit.profile.link_efficiency == pytest.approx(KNOWN.link_efficiency, rel=0.05)
    assert fit.profile.expert_layer_s == pytest.approx(KNOWN.expert_layer_s, rel=0.1)
    assert all(predicted_over_published(row, fit) == pytest.approx(1, abs=0.06) for row in rows)


def test_the_fit_gives_back_what_made_the_updates() -> None:
    one = UpdateMethod(setup_s=2.0, tensor_s=2e-4, bytes_per_s=5e9, pause_share=1.0)
    known = WeightUpdateProfile(methods={"nccl": one})
    plain = UpdateRow(line=0, source="made", method="nccl", size_bytes=1, tensors=0, seconds=1)
    rows = [
        replace(row, seconds=predicted(row, known))
        for size in (5e9, 5e10, 5e11)
        for tensors in (500, 20_000, 80_000)
        for row in [replace(plain, size_bytes=size, tensors=tensors)] * 3
    ]
    fitted = fit_updates(rows)
    assert all(predicted(row, fitted) == pytest.approx(row.seconds, rel=0.06) for row in rows)
    assert fitted.methods["nccl"].bytes_per_s == pytest.approx(5e9, rel=0.06)
    assert fitted.methods["nccl"].tensor_s == pytest.approx(2e-4, rel=0.06)


def test_nemo_rl_lengths_gain_their_prompt(tmp_path: Path) -> None:
    row = step("qwen3-8b", 8, "megatron", 880, source="doc@1") | {"framework": "NeMo-RL 0.3"}
    rows, _ = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [row]))
    assert (rows[0].length, rows[0].tokens) == (1000, pytest.approx(1e6))
    assert rows[0].source == "doc"


@pytest.mark.parametrize(
    ("change", "doubt"),
    [
        ({"phase": "train_lora16"}, "an adapter"),
        ({"phase": "sft (upper bound: full rows)"}, "an upper bound"),
        ({"gpu": "B200", "framework": "prime-rl"}, "FlashAttention 2"),
    ],
)
def test_doubtful_rows_are_shown_and_not_fitted(
    tmp_path: Path, change: dict[str, str], doubt: str
) -> None:
    good = step("qwen3-8b", 8, "fsdp", 4000, source="one")
    odd = good | change | {"step_s": 1e3}
    rows, _ = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [good, odd]))
    assert doubt in rows[1].doubt
    assert fit_rows(rows) == fit_rows(rows[:1])


def test_weights_that_a_trainer_writes_are_apart(tmp_path: Path) -> None:
    row = step("qwen3-8b", 8, "fsdp", 4000, source="one")
    written = row | {"framework": "prime-rl", "phase": "rl_train_full"}
    rows, _ = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [row, written]))
    fit = TrainerFit(profile=KNOWN, written_s_per_billion=0.5)
    plain, more = (predicted_over_published(one, fit) * one.seconds for one in rows)
    assert more - plain == pytest.approx(0.5 * 8.191)


def test_experts_of_recipes_have_their_published_degree_of_tp(tmp_path: Path) -> None:
    row = step("deepseek-v3", 1024, "megatron", 4096, source="one") | {
        "parallelism": "-",
        "framework": "Megatron-Bridge 25.09",
        "phase": "pretrain",
    }
    path = write(tmp_path / "steps.csv", COLUMNS, [row, row | {"gpu": "GB200"}])
    rows, _ = read_training_rows(path)
    assert [one.layout and one.layout.tp for one in rows] == [2, 1]


def test_a_one_step_off_run_trains_on_half_of_its_gpus(tmp_path: Path) -> None:
    row = step("qwen3-8b", 16, "megatron", 2000, source="one") | {
        "phase": "rl_step_1_off",
        "parallelism": "gen TP1; train TP2CP1EP1PP1; GBS 2048",
    }
    rows, out = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [row]))
    assert (rows[0].kind, rows[0].gpus, rows[0].layout) == ("step", 8, TrainLayout(tp=2))
    assert rows[0].doubt.startswith("a whole step")
    hidden = row | {"parallelism": "gen TP1; train -; GBS 2048"}
    _, out = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [hidden]))
    assert out[0].rule.endswith("its layout is not published")


@pytest.mark.parametrize(
    ("text", "precision"),
    [("bf16", "bf16"), ("fp8", "fp8"), ("FP8-MX mxfp8", "mxfp8"), ("NVFP4", "nvfp4")],
)
def test_rows_have_the_precision_that_they_state(tmp_path: Path, text: str, precision: str) -> None:
    row = step("qwen3-8b", 8, "fsdp", 4000, source="one") | {"precision": text, "gpu": "GB200"}
    rows, _ = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [row]))
    assert rows[0].precision == precision
    assert math.isfinite(predicted_over_published(rows[0], fit_rows([])))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"phase": "gen"}, "a phase of the rollout"),
        ({"phase": "rl_step_on_policy"}, "a whole step with its rollout"),
        ({"phase": "weight_sync"}, "a weight update"),
        ({"phase": "lunch"}, "the phase is not training time"),
        ({"tokens_per_step": ""}, "neither tokens nor MFU"),
        ({"gpu": "not named"}, "the GPU is not named"),
        ({"model": "Other-9B"}, "the shape of the model"),
        ({"parallelism": "token drop"}, "tokens are dropped"),
        ({"seq_len": ""}, "the length of samples"),
    ],
)
def test_rows_are_left_out_by_rules(tmp_path: Path, change: dict[str, str], rule: str) -> None:
    row = step("qwen3-8b", 8, "megatron", 1000, source="one") | change
    rows, out = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [row]))
    assert rows == []
    assert out[0].line == 2
    assert out[0].rule.startswith(rule)


@pytest.mark.parametrize(
    ("column", "value"), [("step_s", "soon"), ("step_s", "-3"), ("gpus", "nan"), ("seq_len", "0")]
)
def test_a_bad_number_ends_in_one_message_with_its_line(
    tmp_path: Path, column: str, value: str
) -> None:
    good = step("qwen3-8b", 8, "megatron", 1000, source="one")
    steps = write(tmp_path / "steps.csv", COLUMNS, [good, good | {column: value}])
    syncs = write(tmp_path / "syncs.csv", UPDATE_COLUMNS, [])
    done = CliRunner().invoke(command, ["--training", str(steps), "--updates", str(syncs)])
    assert done.exit_code == 1
    said = f"Error: steps.csv:3: {column} is {value!r}, not a positive number"
    assert done.output.strip() == f"{said}; mend it, or leave the line out"


def test_a_table_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("model,gpu\na,b\n", encoding="utf-8")
    with pytest.raises(PublishedRowsError, match=r"rows\.csv:1: no column gpus, parallelism"):
        read_training_rows(path)
    path.write_text(",".join(UPDATE_COLUMNS) + "\na,b\n", encoding="utf-8")
    with pytest.raises(PublishedRowsError, match=r"rows\.csv:2: 2 cells under 8 columns"):
        read_update_rows(path)
    with pytest.raises(PublishedRowsError, match="cannot read"):
        read_update_rows(tmp_path / "none.csv")


def test_published_names_are_known_models() -> None:
    assert model_name("Qwen2.5-Math-7B (8192 samples)") == "qwen2.5-7b"
    assert model_name("Llama-3-70B") == model_name("Llama-3.1-70B") == "llama-3.1-70b"
    assert model_name("Qwen3-Coder-30B-A3B (agentic)") == "qwen3-30b-a3b"
    assert model_name("INTELLECT-3-106B-A12B") == "glm-4.5-air"
    assert model_name("Qwen3.5-9B") is None


def update(**change: str) -> dict[str, str]:
    return {
        "model": "Qwen3-30B-A3B",
        "params_b": "30.5",
        "dtype": "bf16",
        "method": "nccl full broadcast",
        "layout": "1+1 nodes",
        "seconds": "20",
        "what": "update, mid of range",
        "source": "doc",
        **change,
    }


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ({}, "nccl"),
        ({"method": "slime"}, "nccl"),
        ({"method": "nccl checkpoint engine (4 GB buckets)"}, "nccl_bucket"),
        ({"source": "verl issues 7262 / 7263"}, "nccl_bucket"),
        ({"source": "checkpoint-engine-refit.md"}, "nccl_sharded"),
        ({"method": "checkpoint-engine P2P"}, "checkpoint_engine"),
        ({"method": "delta_sharded (1-3 % of bytes)"}, "delta"),
        ({"method": "push+pull, overlapped"}, "store"),
    ],
)
def test_updates_have_the_method_of_their_text(
    tmp_path: Path, change: dict[str, str], method: str
) -> None:
    path = write(tmp_path / "syncs.csv", UPDATE_COLUMNS, [update(**change)])
    rows, out = read_update_rows(path)
    assert [row.method for row in rows] == [method]
    assert out == []
    assert rows[0].paused == ("overlapped" in change.get("method", ""))
    assert rows[0].tensors > 18_000


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"what": "metadata"}, "a part beside the update: metadata"),
        ({"what": "of which 1.1 s pause"}, "not the time of an update"),
        ({"method": "nccl, full experts instead of sharded"}, "a variant"),
        ({"model": "Unknown", "params_b": ""}, "the size of the model"),
        ({"seconds": "0.1"}, "less than 0.5 s"),
    ],
)
def test_updates_are_left_out_by_rules(tmp_path: Path, change: dict[str, str], rule: str) -> None:
    path = write(tmp_path / "syncs.csv", UPDATE_COLUMNS, [update(**change)])
    rows, out = read_update_rows(path)
    assert rows == []
    assert out[0].rule.startswith(rule)


def test_colocated_trainers_are_compared_by_gpu_seconds_of_equal_batches(tmp_path: Path) -> None:
    shared = step("qwen3-8b", 16, "fsdp", 1000, source="page") | {
        "phase": "update_actor",
        "parallelism": "colocate 16",
        "framework": "verl colocate FSDP2",
        "step_s": 300,
    }
    own = shared | {
        "parallelism": "12 train + 4 gen",
        "framework": "verl one-step-off FSDP2",
        "step_s": 360,
    }
    path = write(tmp_path / "steps.csv", COLUMNS, [shared, own])
    pairs = colocated_pairs(read_actor_rows(path), same_batches(path))
    assert pairs == {"fsdp": [360 * 12 / (300 * 16)]}
    other = write(
        tmp_path / "other.csv", COLUMNS, [shared, own | {"framework": "verl async FSDP2"}]
    )
    assert colocated_pairs(read_actor_rows(other), same_batches(other)) == {}


def test_further_updates_have_a_size() -> None:
    assert all(row.size_bytes > 1e10 and row.tensors > 100 for row in further_rows())


@needs_tables
def test_the_fit_gives_the_shipped_file() -> None:
    def close(a: object, b: object) -> bool:
        match a, b:
            case dict(), dict():
                return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
            case list() | tuple(), list():
                return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
            case ((int() | float()), (int() | float())):
                return math.isclose(a, b, rel_tol=0.02, abs_tol=0.2)
            case _:
                return a == b

    shipped = json.loads(TRAINING_FILE.read_text(encoding="utf-8"))
    made, _ = make_training(*STEPS)
    assert close(made.errors, shipped["training"]["errors"])
    assert close(made.source, shipped["training"]["source"])
    assert made.matmul == pytest.approx(shipped["training"]["matmul"], rel=0.01)
    updates, _ = make_updates(*SYNCS)
    assert close(updates.errors, shipped["weight_update"]["errors"])
    for name, one in updates.methods.items():
        found = load_training().weight_update.methods[name]
        assert one.bytes_per_s == pytest.approx(found.bytes_per_s, rel=0.02)


@needs_tables
def test_errors_of_the_shipped_file_are_not_larger_than_stated() -> None:
    file = load_training()
    groups, target = file.training.errors["groups"], file.training.errors["target_pct"]
    assert all(groups[name]["unseen"]["median"] <= most for name, most in target.items())
    everything = file.weight_update.errors["groups"]["all"]
    assert everything["seen"] >= 0.8
    assert everything["document_unseen"] >= 0.65


@needs_tables
@pytest.mark.parametrize(
    ("read", "paths"), [(read_training_rows, STEPS), (read_update_rows, SYNCS)]
)
def test_every_published_row_is_written_or_has_its_reason(
    read: Callable[..., tuple[list[object], list[LeftOut]]], paths: list[Path]
) -> None:
    rows, out = read(*paths)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) - 1 for path in paths)
    assert len(rows) + len(out) == lines
    assert all(one.rule for one in out)


@needs_tables
def test_the_command_prints_the_table_and_writes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "made.json"
    tables = [
        word
        for option, paths in (("--training", STEPS), ("--updates", SYNCS))
        for path in paths
        for word in (option, str(path))
    ]
    arguments = [*tables, "--out", str(out), "--rows"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert "training_rows_2026_11.csv:2 a whole step with its rollout" in done.output
    assert load_training(out).training.matmul == load_training().training.matmul
    docs = Path(__file__).parents[3] / "docs"
    table = CliRunner().invoke(command, tables).output
    assert (docs / "tables" / "training_errors.txt").read_text(encoding="utf-8") == table
    assert '--8<-- "docs/tables/training_errors.txt"' in (docs / "training-time.md").read_text()


def test_trainers_without_rows_are_those_of_hopper_with_their_kernels_and_memory():
    profile = load_training().training
    for gpu in WITHOUT_ROWS:
        derived = derived_efficiency(profile, gpu)
        assert profile.gpu_efficiency[gpu] == pytest.approx(derived, rel=1e-3)
    # Of B200 there are rows; Megatron-LM reaches 52 to 57 % of A100 (arXiv 2104.04473, 2205.05198).
    assert derived_efficiency(profile, "b200") == pytest.approx(
        profile.gpu_efficiency["b200"], rel=0.03
    )
    assert 0.52 < profile.gpu_efficiency["a100"] * profile.matmul["megatron"] < 0.58
