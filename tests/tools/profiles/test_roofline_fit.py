"""The fitted efficiencies against the tables of kernel times, and on models left out."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from heddle_calibrate.roofline.efficiency import seconds, shipped_efficiencies
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.memory import kv_capacity_tokens
from heddle_calibrate.roofline.operators import decode_iterations, operators
from heddle_core.ids import EngineShape
from tools.profiles.efficiencies import fit_classes, fit_mean, relative_errors
from tools.profiles.kernel_points import (
    CLASSES,
    TABLES,
    Points,
    points,
    read_rows,
    table_shape,
)

ROOT = Path(__file__).parents[3]
PERF = ROOT.parent / "shared" / "perf"
tables = pytest.mark.skipif(
    not PERF.is_dir(), reason="the performance tables (../shared/perf) are not here"
)


def test_the_stated_errors_of_models_left_out_are_within_the_target() -> None:
    errors = shipped_efficiencies().errors["leave_one_model_out"]["decode"]
    assert errors["mean_pct"] < 10
    assert errors["median_pct"] < 6
    assert errors["points"] > 10_000
    by_model = errors["by_model_pct"]
    assert len(by_model) > 10
    # Alone with their precision of experts: without them no row has those kernels.
    assert {name for name, e in by_model.items() if e > 15} <= {"gpt-oss-120b", "Kimi-K2.5"}
    assert max(by_model.values()) < 20


def test_the_page_of_measurements_has_the_figures_of_the_file() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    errors = shipped_efficiencies().errors
    for fit in ("fitted", "leave_one_model_out", "leave_one_class_out"):
        for error in (errors[fit]["decode"], errors[fit]["prefill"]):
            shown = (error["mean_pct"], error["median_pct"], error["p90_pct"])
            assert f"| {' | '.join(map(str, shown))} | {error['points']:,} |" in page
    model = errors["leave_one_model_out"]["decode"]["mean_pct"]
    assert f"{model} % off on a model" in (ROOT / "docs" / "profiles.md").read_text()


@pytest.fixture(scope="module")
def every() -> Points:
    return points(read_rows(PERF))


def stored(p: Points) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    fitted = shipped_efficiencies()
    return np.log(
        [
            [
                [e.launch_us, e.bandwidth, e.arithmetic]
                for e in (fitted.of(gpu)[key] for key in p.keys)
            ]
            for gpu in CLASSES
        ]
    )


@tables
def test_the_stored_efficiencies_have_the_stated_errors(every: Points) -> None:
    error = np.abs(relative_errors(every, stored(every))) * 100
    stated = shipped_efficiencies().errors["fitted"]
    assert error[every.decodes].mean() == pytest.approx(stated["decode"]["mean_pct"], abs=0.3)
    assert error[~every.decodes].mean() == pytest.approx(stated["prefill"]["mean_pct"], abs=0.3)


@tables
@pytest.mark.soak
@pytest.mark.parametrize(("left_out", "bound"), [("Qwen3-32B", 0.08), ("gpt-oss-120b", 0.25)])
def test_a_model_that_the_fit_never_saw_is_predicted(left_out: str, bound: float) -> None:
    rows = read_rows(PERF)
    some = points(rows.iloc[::9].reset_index(drop=True))
    model = some.rows["model"].to_numpy()
    seen = model != left_out
    numbers = fit_classes(some, seen, fit_mean(some, seen))
    error = np.abs(relative_errors(some, numbers))[(~seen) & some.decodes]
    assert len(error) > 50
    assert error.mean() < bound


@tables
def test_the_whole_of_an_iteration_is_the_sum_of_its_operators(every: Points) -> None:
    fitted, h200 = shipped_efficiencies().of("h200"), GPU_CLASSES["h200"]
    rows = every.rows
    at = rows[
        (rows["gpu"] == "h200") & (rows["model"] == "Qwen3-8B") & rows["decode"] & (rows["tp"] == 2)
    ].index
    work = decode_iterations(
        rows.loc[at, "batch"].to_numpy(float), rows.loc[at, "context"].to_numpy(float)
    )
    found = operators(table_shape("Qwen3-8B", "bfloat16"), EngineShape("h200", 2), work)
    summed = np.sum([seconds(o, h200, fitted) for o in found], axis=0)
    predicted = (relative_errors(every, stored(every)) + 1) * every.seconds
    assert predicted[at] == pytest.approx(summed, rel=1e-9)


@tables
def test_a_class_without_tables_is_near_the_one_derived_from_h200() -> None:
    rows = pd.read_csv(PERF / "derived_h20.csv")
    rows = rows[(rows["backend"] == "vllm") & (rows["fits_kv"] == 1)]
    errors = []
    for model, tp in rows[["model", "tp"]].drop_duplicates().itertuples(index=False):
        mine = rows[(rows["model"] == model) & (rows["tp"] == tp)]
        work = decode_iterations(mine["batch"].to_numpy(float), mine["context"].to_numpy(float))
        found = operators(table_shape(model, "bfloat16"), EngineShape("h20", int(tp)), work)
        fitted = shipped_efficiencies().of("h20")
        time_s = np.sum([seconds(o, GPU_CLASSES["h20"], fitted) for o in found], axis=0)
        errors += list(np.abs(time_s * 1e3 / mine["TPOT_ms"].to_numpy() - 1))
    assert len(errors) > 600
    assert np.mean(errors) < 0.1


@tables
@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200", "gb200", "l40s"])
def test_kv_capacity_is_near_the_tables(gpu: str) -> None:
    rows = pd.read_csv(PERF / f"aiconfigurator_{TABLES[gpu]}_kv_capacity.csv")
    rows = rows[(rows["backend"] == "vllm") & (rows["kv_capacity_tokens"] > 0)]
    for row in rows.to_dict("records"):
        layout = EngineShape(gpu, int(row["tp"]))
        model = table_shape(row["model"], "bfloat16")
        found = kv_capacity_tokens(model, layout, GPU_CLASSES[gpu])
        free = row["kv_capacity_tokens"] * row["kv_bytes_per_token_per_gpu"]
        mine = found * model.kv_bytes_per_token(layout.tp)
        assert abs(mine - free) < 0.04 * GPU_CLASSES[gpu].memory, row
