"""Fits of trainers and weight updates give back what made the rows; bad tables name the line."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from heddle_calibrate.serving.published_rows import PublishedRowsError
from heddle_sim.training import TrainingProfile
from heddle_sim.training_files import TRAINING_FILE, load_training
from heddle_sim.weight_update import UpdateMethod, WeightUpdateProfile
from tools.profiles.from_training_rows import command, make_training, make_updates
from tools.profiles.training_fit import fit_rows
from tools.profiles.training_rows import (
    COLUMNS,
    doubtful_documents,
    model_name,
    read_training_rows,
)
from tools.profiles.update_fit import fit_updates, predicted
from tools.profiles.update_rows import COLUMNS as UPDATE_COLUMNS
from tools.profiles.update_rows import UpdateRow, delta_rows, read_update_rows

PERF = Path(__file__).parents[4] / "shared" / "perf"
STEPS, SYNCS = PERF / "training_rows.csv", PERF / "weight_sync_rows.csv"
needs_tables = pytest.mark.skipif(
    not STEPS.is_file(), reason="the published training steps are not at ../shared/perf"
)

KNOWN = TrainingProfile(
    mfu={"megatron": {"dense-small": 0.4, "dense-mid": 0.3}, "fsdp": {"dense-small": 0.25}},
    gpu_efficiency={},
    forward_speedup={"megatron": 1.1, "fsdp": 1.3},
    fixed_s_per_billion={"fsdp": 0.3},
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
        np.full(1000, length), model=model, gpu="h100", gpus=gpus, backend=backend
    )
    return {
        "model": model,
        "gpu": "H100",
        "gpus": gpus,
        "parallelism": "Megatron" if backend == "megatron" else "FSDP2",
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
        for model in ("qwen3-8b", "qwen3-14b", *(["qwen3-32b"] if backend == "megatron" else []))
        for gpus in (8, 32, 128)
        for length in (500, 4000)
        for source in ("one", "two")
    ]


def test_the_fit_gives_back_what_made_the_steps(tmp_path: Path) -> None:
    rows, out = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, made_steps()))
    assert len(rows) == 60
    assert out == []
    fitted = fit_rows(rows)
    for backend, by_class in KNOWN.mfu.items():
        for name, value in by_class.items():
            assert fitted.mfu[backend][name] == pytest.approx(value, rel=0.03)
    assert fitted.fixed_s_per_billion["fsdp"] == pytest.approx(0.3, rel=0.03)


def test_the_fit_gives_back_what_made_the_updates() -> None:
    known = WeightUpdateProfile(
        methods={
            "nccl": UpdateMethod(
                setup_s=2.0,
                prepare_bytes_per_s=5e9,
                wire_bytes_per_s=400e9,
                gpu_exponent=0.5,
                pause_share=1.0,
            )
        }
    )
    rows = [
        UpdateRow(
            line=k,
            source="made",
            method="nccl",
            size_bytes=size,
            gpus=gpus,
            seconds=known.time(size, "nccl", gpus=gpus, bytes_per_parameter=1).total_s,
        )
        for k, (size, gpus) in enumerate((s, g) for s in (5e9, 5e10, 5e11) for g in (8, 64, 256))
    ]
    fitted = fit_updates(rows)
    assert all(predicted(row, fitted) == pytest.approx(row.seconds, rel=0.06) for row in rows)
    assert fitted.methods["nccl"].prepare_bytes_per_s == pytest.approx(5e9, rel=0.06)


def test_nemo_rl_lengths_gain_their_prompt(tmp_path: Path) -> None:
    row = step("qwen3-8b", 8, "megatron", 880, source="doc@1") | {"framework": "NeMo-RL 0.3"}
    rows, _ = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [row]))
    assert (rows[0].length, rows[0].tokens) == (1000, pytest.approx(1e6))
    assert rows[0].source == "doc"


def test_rl_rows_that_hold_more_than_training_are_doubtful(tmp_path: Path) -> None:
    sft = step("qwen3-8b", 8, "fsdp", 4000, source="one") | {"phase": "sft_full"}
    slow = step("qwen3-8b", 8, "fsdp", 4000, source="one")
    slow["step_s"] = 2 * float(str(slow["step_s"]))
    other = step("qwen3-8b", 8, "fsdp", 4000, source="two")
    rows, _ = read_training_rows(write(tmp_path / "steps.csv", COLUMNS, [sft, slow, other]))
    assert doubtful_documents(rows) == {"one"}
    assert fit_rows(rows).mfu == fit_rows([rows[0], rows[2]]).mfu


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"phase": "gen"}, "the phase is not training time"),
        ({"phase": "rl_step_on_policy"}, "the phase is not training time"),
        ({"phase": "train_lora16"}, "an adapter is trained"),
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
    assert model_name("Qwen3-Coder-30B") is None


def test_delta_updates_have_a_size() -> None:
    assert all(row.size_bytes > 1e10 and row.gpus == 1 for row in delta_rows())


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
    made, _ = make_training(STEPS)
    assert close(made.errors, shipped["training"]["errors"])
    assert close(made.source, shipped["training"]["source"])
    for backend, row in made.mfu.items():
        assert row == pytest.approx(shipped["training"]["mfu"][backend], rel=0.01)
    updates, _ = make_updates(SYNCS)
    assert close(updates.errors, shipped["weight_update"]["errors"])
    for name, one in updates.methods.items():
        found = load_training().weight_update.methods[name]
        assert one.prepare_bytes_per_s == pytest.approx(found.prepare_bytes_per_s, rel=0.02)


@needs_tables
def test_errors_of_the_shipped_file_are_not_larger_than_stated() -> None:
    file = load_training()
    groups = file.training.errors["groups"]
    assert groups["dense megatron"]["seen"] <= 8
    assert groups["dense megatron"]["unseen"] <= 14
    assert groups["dense fsdp"]["seen"] <= 5
    everything = file.weight_update.errors["groups"]["all"]
    assert everything["seen"] >= 0.8
    assert everything["row_unseen"] >= 0.8


@needs_tables
def test_the_command_prints_the_table_and_writes_the_file(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "made.json"
    arguments = ["--training", str(STEPS), "--updates", str(SYNCS), "--out", str(out), "--rows"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert "dense megatron" in done.output
    assert load_training(out).training.mfu.keys() == load_training().training.mfu.keys()
    docs = Path(__file__).parents[3] / "docs"
    table = CliRunner().invoke(command, arguments[:4]).output
    assert (docs / "tables" / "training_errors.txt").read_text(encoding="utf-8") == table
    assert '--8<-- "docs/tables/training_errors.txt"' in (docs / "training-time.md").read_text()
