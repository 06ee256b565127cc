"""The fit of serving runs gives back what made the rows, and its errors on the published ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from heddle_calibrate.fit.kernel_profile import GPUS, NO_HOST
from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.serving.constants import ServingConstants, constants_of
from heddle_calibrate.serving.errors import (
    by_profile,
    median_of_groups,
    predict_rows,
    shipped_profiles,
)
from heddle_calibrate.serving.limits import limits
from heddle_calibrate.serving.rows import ServingRow
from heddle_calibrate.serving.samples import ServingSample, samples
from heddle_sim.profile_files import (
    Profile,
    ProfileError,
    expand,
    known_profiles,
    load_profile,
    read_profile,
)
from heddle_sim.profile_parts import Host, KernelFactors
from tools.profiles.serving import (
    FittedServing,
    fit_rows,
    fitted_profiles,
    left_out_errors,
    release_trend,
)
from tools.profiles.serving_fit import PRIOR, ServingFit, fit_serving, fits_without
from tools.profiles.serving_profile import inherited, stated_before, with_serving, without_host

PERF = Path(__file__).parents[4] / "shared" / "perf"
TABLES = [PERF / "measured_serving.csv", PERF / "measured_hopper_dense.csv"]
LATER = PERF / "measured_serving_2026_11.csv"
# One process makes the fit of all published runs, which takes long.
pytestmark = pytest.mark.xdist_group("serving fit")
needs_rows = pytest.mark.skipif(
    not all(path.is_file() for path in (*TABLES, LATER)),
    reason="the published serving runs are not at ../shared/perf",
)

KNOWN = ServingConstants(
    decode=1.1,
    doubling=-0.03,
    prefill=1.4,
    per_step=1.5e-3,
    per_running=20e-6,
    per_prefill=1e-3,
    per_request=15e-3,
)
QWEN = {("qwen3-8b", gpu): load_profile("qwen3-8b", gpu) for gpu in ("h100", "h200")}


def made() -> list[ServingSample]:
    """Runs whose times are those of KNOWN."""
    rows = [
        ServingRow(
            line=1, engine="vllm", version="1.0", model="qwen3-8b", precision="bf16", gpu=gpu,
            tp=tp, rank_tp=tp, dp=1, expert_parallel=False, input_tokens=prompt, output_tokens=256,
            concurrency=concurrency, ttft_s=60.0, tpot_s=1.0,
            limits=limits({}, clients=concurrency, input_tokens=prompt),
        )
        for gpu in ("h100", "h200")
        for tp in (1, 2, 4)
        for prompt in (1024, 4096)
        for concurrency in (4, 16, 64)
    ]  # fmt: skip
    found, out = samples(rows, QWEN)
    assert not out
    return [
        replace(s, row=replace(s.row, tpot_s=KNOWN.tpot_s(s), ttft_s=KNOWN.ttft_s(s)))
        for s in found
    ]


@pytest.fixture(scope="module")
def known() -> list[ServingSample]:
    return made()


def test_a_fit_gives_back_the_times_that_it_was_made_from(known: list[ServingSample]) -> None:
    fit = fit_serving(known)
    for sample in known:
        constants = fit.constants(f"qwen3-8b.{sample.row.gpu}", "1.0")
        assert constants.tpot_s(sample) == pytest.approx(sample.row.tpot_s, rel=0.02)
        assert constants.ttft_s(sample) == pytest.approx(sample.row.ttft_s, rel=0.06)


def test_a_group_left_out_is_predicted_from_the_others(known: list[ServingSample]) -> None:
    without = fits_without(known)
    assert len(without) == 6
    for sample in known:
        fit = without[sample.row.group]
        constants = fit.constants(f"qwen3-8b.{sample.row.gpu}", "1.0")
        assert constants.tpot_s(sample) == pytest.approx(sample.row.tpot_s, rel=0.04)


def test_the_group_of_a_run_does_not_change_its_fit(known: list[ServingSample]) -> None:
    group = known[0].row.group
    changed = [
        replace(s, row=replace(s.row, tpot_s=2 * s.row.tpot_s)) if s.row.group == group else s
        for s in known
    ]
    names = "qwen3-8b.h100", "1.0"
    assert fits_without(changed)[group].constants(*names) == fits_without(known)[group].constants(
        *names
    )
    assert fit_serving(changed).constants(*names) != fit_serving(known).constants(*names)


def test_without_rows_the_prior_holds() -> None:
    constants = fit_serving([]).constants("model.gpu", "")
    assert constants == ServingConstants(**PRIOR)


def test_no_constant_of_a_fit_is_negative(known: list[ServingSample]) -> None:
    hurried = [
        replace(s, row=replace(s.row, tpot_s=s.row.tpot_s / 4, ttft_s=s.row.ttft_s / 20))
        for s in known
    ]
    constants = fit_serving(hurried).constants("qwen3-8b.h100", "1.0")
    assert min(constants.per_step, constants.per_running, constants.per_request) >= 0


def test_impossible_runs_are_left_out(known: list[ServingSample]) -> None:
    many = limits({}, clients=64, input_tokens=4096)
    row = replace(known[0].row, limits=many)
    fast = replace(row, concurrency=64, input_tokens=4096, ttft_s=0.05, tpot_s=0.002)
    waiting = replace(row, concurrency=64, ttft_s=500.0, tpot_s=0.02)
    found, out = samples([fast, waiting], QWEN)
    assert not found
    assert "more than one engine" in out[0].rule
    assert "a limit that is not published" in out[1].rule
    found, out = samples([fast, waiting], QWEN, every=True)
    assert [sample.row for sample in found] == [fast, waiting]
    assert not out


@pytest.mark.parametrize(("runs", "left"), [(3, 0), (4, 3)])
def test_a_third_of_impossible_runs_leaves_out_the_others(runs: int, left: int) -> None:
    row = replace(made()[0].row, line=0)
    several = replace(row, concurrency=64, input_tokens=4096, ttft_s=0.05, tpot_s=0.002)
    several = replace(several, limits=limits({}, clients=64, input_tokens=4096))
    rows = [several, *(replace(row, line=line) for line in range(1, runs))]
    found, out = samples(rows, QWEN)
    assert (len(found), len(out)) == (left, runs - left)


# -- profiles --------------------------------------------------------------------------------------


@pytest.fixture
def fitted(known: list[ServingSample]) -> Profile:
    own = [s for s in known if s.row.gpu == "h100"]
    fit = fit_serving(known)
    return with_serving(
        QWEN["qwen3-8b", "h100"], fit, fit, own, {"runs": len(own), "tpot_mean_abs_pct": 1.0}
    )


def test_a_profile_states_the_constants_of_its_runs(
    fitted: Profile, known: list[ServingSample]
) -> None:
    stated = constants_of(fitted, "1.0")
    for sample in known:
        if sample.row.gpu == "h100":
            assert stated.tpot_s(sample) == pytest.approx(sample.row.tpot_s, rel=0.02)
    assert not fitted.host.carried_over
    assert fitted.host.measured_on == "18 runs of this model and GPU class with vllm (1.0)"


def test_simulated_iterations_have_host_time_and_factors(fitted: Profile) -> None:
    bare = without_host(QWEN["qwen3-8b", "h100"])
    kernels, table = expand(bare, 2, host=NO_HOST), fitted.table(2)
    assert fitted.kernel_factors is not None
    decode = fitted.kernel_factors.decode + fitted.kernel_factors.decode_per_doubling
    host = fitted.host
    for batch in (0, 1, 7, 300):
        expected = decode * kernels.base_s[batch] + host.per_step_s + batch * host.per_running_s
        assert table.base_s[batch] == pytest.approx(expected)
    assert table.prefill_s(5000, 0) == pytest.approx(
        fitted.kernel_factors.prefill * kernels.prefill_s(5000, 0)
    )


def test_the_cost_estimate_has_host_time_and_factors(fitted: Profile) -> None:
    bare, entry = without_host(QWEN["qwen3-8b", "h100"]).at(1).belief, fitted.at(1).belief
    constants = constants_of(fitted, "1.0")
    assert entry.t0_s == pytest.approx(constants.decode * bare.t0_s + constants.per_step, rel=1e-3)
    assert entry.prefill_s == pytest.approx(constants.prefill * bare.prefill_s, rel=1e-3)


def test_a_second_fit_starts_from_kernel_times(fitted: Profile, known: list[ServingSample]) -> None:
    own = [s for s in known if s.row.gpu == "h100"]
    fit = fit_serving(known)
    again = with_serving(fitted, fit, fit, own, {"runs": len(own), "tpot_mean_abs_pct": 1.0})
    assert again.host == fitted.host
    assert again.kernel_factors == fitted.kernel_factors
    assert again.at(1).belief.t0_s == pytest.approx(fitted.at(1).belief.t0_s, abs=2e-7)


def test_a_file_of_constants_is_read_back(fitted: Profile, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(encode_profile(fitted))
    assert read_profile(path) == fitted


# -- a fit of few runs, after another --------------------------------------------------------------


def of_fp8(profile: Profile) -> Profile:
    """The same profile as one that serving runs are fitted to; dense models in bfloat16 are not."""
    return replace(profile, source=replace(profile.source, precision="fp8", files=()))


def test_constants_of_profiles_are_the_prior_of_a_fit(
    fitted: Profile, known: list[ServingSample]
) -> None:
    fit = fit_serving([], stated_before([fitted]))
    for version in ("1.0", "2.0"):
        assert fit.constants("qwen3-8b.h100", version) == constants_of(fitted, version)
    assert fit.constants("qwen3-8b.h200", "1.0") == ServingConstants(**PRIOR)
    one = known[1]
    exact = replace(one, row=replace(one.row, tpot_s=constants_of(fitted, "1.0").tpot_s(one)))
    again = fit_serving([exact] * 6, stated_before([fitted])).constants("qwen3-8b.h100", "1.0")
    assert again.tpot_s(exact) == pytest.approx(exact.row.tpot_s, rel=0.01)
    assert again.prefill == pytest.approx(constants_of(fitted, "1.0").prefill, abs=0.05)
    alone = fit_serving([exact] * 6).constants("qwen3-8b.h100", "1.0")
    assert abs(alone.prefill - again.prefill) > 0.1


def test_few_runs_change_their_own_profile_alone(known: list[ServingSample]) -> None:
    fit = fit_serving(known)
    before = {
        names: with_serving(
            of_fp8(profile), fit, fit, [s for s in known if s.row.gpu == names[1]], {}
        )
        for names, profile in QWEN.items()
    }
    more = [
        replace(s, row=replace(s.row, version="2.0", tpot_s=1.05 * s.row.tpot_s))
        for s in known
        if s.row.gpu == "h100"
    ]
    written, kept = fitted_profiles(before, more, [], [], from_scratch=False)
    assert [(p.model, p.gpu) for p in written] == [("qwen3-8b", "h100")]
    assert kept == {"qwen3-8b.h200": "no runs of it"}
    (after,) = written
    assert list(after.host_versions or {}) == ["1.0", "2.0"]
    assert after.host.measured_on.endswith(
        "; before: " + before["qwen3-8b", "h100"].host.measured_on
    )
    for sample in more:
        seconds = constants_of(after, "2.0").tpot_s(sample)
        assert seconds == pytest.approx(sample.row.tpot_s, rel=0.03)
    # From the prior that is the same for all, the profile without runs loses its constants.
    everything, _ = fitted_profiles(before, more, [], [], from_scratch=True)
    assert {p.gpu for p in everything} == {"h100", "h200"}
    (other,) = [p for p in everything if p.gpu == "h200"]
    assert other.host.carried_over
    assert not before["qwen3-8b", "h200"].host.carried_over


def test_too_few_runs_change_nothing(known: list[ServingSample]) -> None:
    profiles = {names: of_fp8(profile) for names, profile in QWEN.items()}
    written, kept = fitted_profiles(profiles, known[:11], [], [], from_scratch=False)
    assert not written
    assert kept["qwen3-8b.h100"] == "11 runs of the model; a fit needs 12"


def test_a_derived_class_takes_the_constants_of_its_base(known: list[ServingSample]) -> None:
    base = of_fp8(QWEN["qwen3-8b", "h100"])
    derived = of_fp8(load_profile("qwen3-8b", "h800"))
    profiles = {("qwen3-8b", "h800"): derived, ("qwen3-8b", "h100"): base}
    on_base = [s for s in known if s.row.gpu == "h100"]
    (slow, fast), _ = fitted_profiles(profiles, on_base, [], [], from_scratch=False)
    assert (slow.gpu, slow.derived) == ("h800", derived.derived)
    assert slow.kernel_factors == fast.kernel_factors
    assert slow.host_versions == fast.host_versions
    assert slow.host.carried_over
    assert slow.host.measured_on == f"as on h100: {fast.host.measured_on}"
    assert slow.tables["8"].decode == derived.tables["8"].decode
    assert slow.tables["8"].belief.t0_s > fast.tables["8"].belief.t0_s


@pytest.mark.parametrize("names", [n for n in known_profiles() if n[1] in ("h800", "h20")])
def test_shipped_derived_classes_have_the_constants_of_their_base(names: tuple[str, str]) -> None:
    model, gpu = names
    derived, base = load_profile(*names), load_profile(model, GPUS[gpu].base)
    assert derived.kernel_factors == base.kernel_factors
    assert derived.host_versions == base.host_versions
    expected = inherited(derived, base) if base.kernel_factors else derived
    assert (derived.host.per_step_s, derived.host.per_running_s) == (
        base.host.per_step_s,
        base.host.per_running_s,
    )
    for layout, entry in expected.tables.items():
        assert derived.tables[layout].belief.t0_s == pytest.approx(entry.belief.t0_s, abs=3e-7)


def test_profiles_with_host_time_of_their_own_are_refused() -> None:
    other = Host(
        per_step_s=2e-3, per_running_s=0, per_prefill_s=0, measured_on="mine", carried_over=False
    )
    with pytest.raises(ValueError, match="fitted to kernel times alone"):
        without_host(replace(QWEN["qwen3-8b", "h100"], host=other))


def test_faulty_factors_in_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    faulty = replace(
        QWEN["qwen3-8b", "h100"], kernel_factors=KernelFactors(decode=0.1, decode_per_doubling=-0.1)
    )
    path.write_bytes(encode_profile(faulty))
    with pytest.raises(ProfileError, match="kernel_factors must be finite and above 0"):
        read_profile(path)


# -- the published rows ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published() -> FittedServing:
    return fit_rows(TABLES, shipped_profiles(), from_scratch=True)


@pytest.mark.soak
@needs_rows
def test_published_runs_are_predicted(published: FittedServing) -> None:
    assert median_of_groups(published.seen, "vllm") < 4.0
    assert median_of_groups(published.unseen["layout"], "vllm") < 5.0
    assert len([run for run in published.seen.runs if run.row.engine == "vllm"]) > 600


@pytest.mark.soak
@needs_rows
def test_less_is_known_of_a_model_or_engine_version_that_no_fit_has_seen(
    published: FittedServing,
) -> None:
    rows = {row["part"]: row for row in left_out_errors(published) if row["engine"] == "vllm"}
    assert list(rows) == ["nothing", "layout", "engine version", "model"]
    for part in ("layout", "engine version", "model"):
        for figure in ("TPOT median", "TPOT P90", "TTFT median"):
            assert rows["nothing"][figure] < rows[part][figure]
        assert len(published.unseen[part].runs) == len(published.seen.runs)


def test_a_model_left_out_leaves_nothing_of_it(known: list[ServingSample]) -> None:
    without = fits_without(known, part="model")
    assert list(without) == ["qwen3-8b"]
    assert without["qwen3-8b"].constants("qwen3-8b.h100", "1.0") == ServingConstants(**PRIOR)


# Models and GPU classes that another TP degree or class tells enough about.
WITH_RELATIVES = ("gpt-oss-120b h200", "llama-3.1-70b-fp8 b200", "llama-3.1-70b-fp8 h100",
        "llama-3.1-70b-fp8 h200", "llama-3.1-70b-nvfp4 b200", "minimax-m2.5 b300",
        "minimax-m2.5-nvfp4 b200", "qwen3-32b h100")  # fmt: skip


@pytest.mark.soak
@needs_rows
@pytest.mark.parametrize("part", WITH_RELATIVES)
def test_models_and_classes_are_predicted_without_their_group(
    published: FittedServing, part: str
) -> None:
    seen, unseen = (
        next(p for p in report.parts(by_profile, "vllm") if p.part == part)
        for report in (published.seen, published.unseen["layout"])
    )
    assert seen.tpot < 6.0
    assert unseen.tpot < 6.5
    assert seen.ttft < 25.0


@pytest.mark.soak
@needs_rows
def test_shipped_profiles_predict_published_runs() -> None:
    report = predict_rows(TABLES, shipped_profiles())
    assert median_of_groups(report, "vllm") < 4.5
    later = predict_rows([LATER], shipped_profiles())
    assert median_of_groups(later, "vllm") < 8.0


def test_a_trend_by_release_is_the_line_of_its_terms() -> None:
    names = {f"0.{minor}.0": 1e-3 + 2e-4 * minor for minor in range(11, 19)}
    terms = {("per_step", "version", name): value for name, value in names.items()}
    terms |= {("per_step", "version", "nightly"): 9.0, ("per_step", "family", ""): 9.0}
    terms |= {("prefill", "version", name): 1e-3 * value for name, value in names.items()}
    for quantity, rise in (("per_step", 0.2), ("prefill", 2e-7)):
        slope, error, spread = release_trend(ServingFit(terms=terms), quantity)
        assert slope == pytest.approx(rise)
        assert max(error, spread) < 1e-9
