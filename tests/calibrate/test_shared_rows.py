"""Closed loops of a sweep as rows without a name of anybody's, read back by what predicts them."""

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from heddle_calibrate.serving.errors import predict_rows
from heddle_calibrate.serving.rows import profile_name, read_serving_rows
from heddle_calibrate.serving.shared import COLUMNS_SHARED, before_and_after, shared_rows
from heddle_calibrate.sweeps import Sweep, encode_sweep, read_sweep
from heddle_sim.profile_files import load_profile
from tests.calibrate.test_fit_sweep import sweep

H200 = load_profile("qwen3-8b", "h200")
PRIVATE = ("node17.example.org", "/models/alice", "alice", "s3cret", "my-experiment")


def of_vllm(found: Sweep, model: str = "qwen3-8b") -> Sweep:
    return replace(
        found,
        engine="vllm",
        model=model,
        gpu="h200",
        command="heddle profile measure --model-dir /models/alice/my-experiment",
        hardware={"gpus": ["NVIDIA H200, 570.86.15, 143771 MiB"], "host": "node17.example.org"},
        versions={"vllm": "0.19.0", "heddle": "0.1.0"},
        settings={"model_dir": "my-experiment", "gpu_memory_share": 0.9, "key": "s3cret"},
        notes=("no second engine on node17.example.org: /models/alice/log",),
    )


@pytest.fixture(scope="module")
def measured() -> Sweep:
    return of_vllm(sweep(H200.table, (1, 2), served=True))


def test_a_row_has_its_columns_and_nothing_private(measured: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(shared_rows(measured))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["tp"], row["concurrency"]) for row in rows] == [
        (tp, clients) for tp in "12" for clients in ("1", "8", "32")
    ]
    for row in rows:
        assert set(row) == set(COLUMNS_SHARED)
        assert all(row.values())
        assert int(row["requests"]) == 5 * int(row["concurrency"])
    assert (rows[0]["gpu_name"], rows[0]["driver"]) == ("NVIDIA H200", "570.86.15")
    for model in ("qwen3-8b", "alice/my-experiment"):
        said = shared_rows(replace(measured, model=model)).decode()
        assert not [name for name in PRIVATE if name in said]
    assert b",unnamed," in shared_rows(replace(measured, model="alice/my-experiment"))


def test_rows_of_quantised_weights_have_their_precision(measured: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(shared_rows(replace(measured, model="Qwen3-32B-FP8")))
    read, _ = read_serving_rows([path])
    assert {(row.precision, profile_name(row)) for row in read} == {("fp8", "qwen3-32b-fp8")}


def test_the_profile_that_engines_obey_predicts_their_rows(measured: Sweep, tmp_path: Path) -> None:
    """Without host time of a release, which simulated engines take from their profile."""
    path = tmp_path / "rows.csv"
    path.write_bytes(shared_rows(measured))
    read, out = read_serving_rows([path])
    assert len(read) == 6
    assert not out
    limits = read[0].limits
    assert (limits.max_running, limits.batched_tokens) == (32, measured.max_batched_tokens)
    assert set(limits.assumed) == {"kv_dtype", "async_scheduling", "speculation"}
    report = predict_rows([path], {("qwen3-8b", "h200"): H200})
    assert max(abs(run.tpot) for run in report.runs) < 0.03
    assert max(abs(run.ttft) for run in report.runs) < 0.2


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_before_and_after(
    slower: float, tmp_path: Path, error_of: Callable[[str], list[float]]
) -> None:
    """An engine slower than its known profile: that is off by as much, the sweep's own is not."""

    def table(tp: int):  # type: ignore[no-untyped-def]
        known = H200.table(tp)
        return replace(
            known,
            base_s=[slower * each for each in known.base_s],
            per_context_s=[slower * each for each in known.per_context_s],
        )

    found, path = of_vllm(sweep(table, served=True)), tmp_path / "rows.csv"
    path.write_bytes(shared_rows(found))
    before, after = (error_of(line) for line in before_and_after(found, path, worst_pct=25.0))
    assert before[0] == pytest.approx(100 * (1 - 1 / slower), abs=4.0)
    assert after[0] < 3.0
    assert after[1] < 15.0


@pytest.fixture
def error_of() -> Callable[[str], list[float]]:
    def read(line: str) -> list[float]:
        return [float(word) for word in line.replace("%", " ").split() if word[0].isdigit()]

    return read


def test_a_model_that_nobody_knows_has_no_error_before(measured: Sweep, tmp_path: Path) -> None:
    found, path = replace(measured, model="alice/my-experiment"), tmp_path / "rows.csv"
    path.write_bytes(shared_rows(found))
    before, after = before_and_after(found, path, worst_pct=25.0)
    assert "no profile of unnamed on h200" in before
    assert "TPOT" in after
    (said,) = before_and_after(found, path, worst_pct=0.0)[1:]
    assert said.startswith("after: no profile of the sweep: ")


def test_a_sweep_keeps_its_loops(measured: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_bytes(encode_sweep(measured))
    assert read_sweep(path).served == measured.served
