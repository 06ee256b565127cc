"""The shipped profiles come out of the fit, and reproduce the measured runs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from heddle_calibrate.fit.kernel_profile import GPUS, NO_HOST
from heddle_calibrate.fit.kernel_tables import KernelTables
from heddle_calibrate.profiles import encode_profile
from heddle_sim.profile_files import PROFILE_FOLDER, expand, load_profile, read_layout
from tools.profiles.closed_loop import replay, replay_on_engine
from tools.profiles.from_tables import layouts_of, make_profiles, read_tables
from tools.profiles.host import measured_runs
from tools.profiles.serving_profile import inherited

PERF = Path(__file__).parents[4] / "shared" / "perf"
pytestmark = pytest.mark.skipif(
    not PERF.is_dir(), reason="the performance tables (../shared/perf) are not here"
)


@pytest.mark.soak
def test_the_fit_gives_the_shipped_files() -> None:
    def close(a: object, b: object) -> bool:
        match a, b:
            case dict(), dict():
                return a.keys() == b.keys() and all(close(a[k], b[k]) for k in a)
            case list(), list():
                return len(a) == len(b) and all(close(x, y) for x, y in zip(a, b, strict=True))
            case ((int() | float()), (int() | float())):
                return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)
            case _:
                return a == b

    for fitted in make_profiles(PERF):
        made = fitted
        if made.experts:  # after that, `serving` writes its constants
            made = inherited(made, load_profile(made.model, GPUS[made.gpu].base))
        shipped = (PROFILE_FOLDER / f"{made.model}.{made.gpu}.json").read_text()
        assert close(json.loads(encode_profile(made)), json.loads(shipped)), made.summary


def test_the_engine_reproduces_measured_tpot() -> None:
    p = load_profile("qwen3-32b", "h100")
    errors, apart = [], []
    for run in measured_runs(PERF):
        t = p.table(run.tp)
        on_engine = replay_on_engine(t, run.loop)
        errors.append(abs(on_engine.tpot_s / run.tpot_s - 1))
        apart.append(abs(on_engine.tpot_s / replay(t, run.loop).tpot_s - 1))
    assert sum(errors) / len(errors) <= 0.04
    assert max(apart) < 0.02


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200", "gb200"])
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "Qwen3-235B-A22B", "gpt-oss-120b"])
def test_profiles_of_models_with_experts_agree_with_tables_of_other_queries(
    model: str, gpu: str
) -> None:
    """They were made from the package; the tables were written by other queries of it."""
    if (model, gpu) == ("gpt-oss-120b", "a100"):
        pytest.skip("A100 has no MXFP4")
    if model == "gpt-oss-120b" and gpu in ("b200", "gb200"):
        pytest.skip("the profile has other kernels than the tables: activations in MXFP8")
    file = GPUS[gpu].file
    tables = read_tables(PERF, file, files=f"aiconfigurator_moe_{file}")
    profile = replace(load_profile(model.lower(), gpu), kernel_factors=None)
    compared = 0
    for layout in layouts_of(tables, model):
        if layout not in profile.tables:
            continue
        tp, dp, ep = read_layout(layout)
        laid_out = profile.laid_out("on" if ep > 1 else "off", attention_dp=dp)
        kernels = expand(laid_out, tp, host=NO_HOST)
        rows = tables.of(model, layout).decode
        errors = []
        for row in rows[rows["fits_kv"] == 1].to_dict("records"):
            batch = dp * int(row["batch"])
            held = batch * int(row["context"])
            if batch > 512:
                continue
            step_s = kernels.base_s[batch] + kernels.per_context_s[batch] * held
            errors.append(abs(step_s / (row["TPOT_ms"] / 1e3) - 1))
        assert sorted(errors)[len(errors) // 2] < 0.02, layout
        assert max(errors) < 0.1, layout
        compared += 1
    assert compared >= (2 if (model, gpu) != ("Qwen3-235B-A22B", "a100") else 1)


def test_slower_links_lengthen_all_reduces_alone() -> None:
    tables = read_tables(PERF, "h100_sxm")
    same, slow = tables.with_slower_links(1.0), tables.with_slower_links(2.25)
    for name in ("decode", "prefill", "mixed"):
        assert getattr(same, name).equals(getattr(tables, name))
    added = slow.decode["TPOT_ms"] - tables.decode["TPOT_ms"]
    assert added.to_numpy() == pytest.approx(1.25 * tables.decode["allreduce_ms"].to_numpy())

    def prompt_ms(t: KernelTables, tp: int) -> float:
        rows = t.of("Qwen3-8B", str(tp)).prefill
        found = rows[(rows["prompt_tokens"] == 2048) & (rows["prefix_cached_tokens"] == 0)]
        return float(found["prefill_ms"].iloc[0])

    assert prompt_ms(slow, 1) == prompt_ms(tables, 1)
    # The package times 6.74 ms of all-reduce in this prompt; the line over batches comes near.
    assert prompt_ms(slow, 8) - prompt_ms(tables, 8) == pytest.approx(1.25 * 6.744, rel=0.1)
