"""A sweep of a known engine gives its table back; what the fit cannot know shows in its errors."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from heddle_calibrate.fit.from_sweep import FitError, fit_sweep
from heddle_calibrate.fit.prompts import _iterations
from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.serving.sglang import of_sglang
from heddle_calibrate.sweeps import (
    DecodeTrial,
    MoveTrial,
    PrefillTrial,
    Sweep,
    SweepError,
    encode_sweep,
    read_sweep,
)
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile, load_profile, read_profile
from tests.calibrate.fake_sweep import (
    BLOCK_TOKENS,
    MAX_BATCHED_TOKENS,
    START_S,
    TRANSFER_BYTES_PER_S,
    TRANSFER_FIXED_S,
    sweep_of,
    sweep_spec,
)

H200 = load_profile("qwen3-8b", "h200")


def sweep(
    table: Callable[[int], LatencyTable], tps: tuple[int, ...] = (1,), *, served: bool = False
) -> Sweep:
    wanted = sweep_spec(tps=tps, max_running=32, max_context=8192, served=served)
    found = sweep_of(table, wanted)
    return Sweep(
        schema="heddle.sweep/1",
        made="2026-11-21T10:00:00Z",
        command="heddle profile measure",
        size=wanted.size,
        seed=wanted.seed,
        engine="fake",
        model="known",
        gpu="fake",
        model_config={"layers": 2},
        hardware={"cores": 2},
        versions={"heddle": "0.1.0", "fake": "1"},
        settings={},
        max_running=wanted.max_running,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        block_tokens=BLOCK_TOKENS,
        kv_bytes_per_token=table(tps[0]).kv_bytes_per_token,
        precision="bfloat16",
        kv_capacity_tokens={str(tp): n for tp, n in found.kv_capacity_tokens.items()},
        decode=tuple(found.decode),
        prefill=tuple(found.prefill),
        aborts=tuple(found.aborts),
        moves=tuple(found.moves),
        lives=tuple(found.lives),
        naps=tuple(found.naps),
        beside=tuple(found.beside),
        loops=tuple(found.loops),
        served=tuple(found.served),
        spoiled=found.spoiled,
        notes=tuple(found.notes),
    )


def drawn(seed: int) -> LatencyTable:
    """Any engine whose steps grow with what is in them; on CPU they grow fast."""
    rng = Random(seed)
    base_s = [rng.uniform(1e-3, 8e-3)]
    slope = rng.uniform(1e-4, 1e-3)
    for _ in range(64):
        base_s.append(base_s[-1] + slope)
    per_token_s = rng.uniform(2e-5, 4e-4)
    per_context_s = rng.uniform(2e-8, 2e-6)
    return LatencyTable(
        model="known",
        gpu="fake",
        tp=1,
        base_s=base_s,
        per_context_s=[per_context_s] * 65,
        prefill_tokens=(0, 8192),
        prefill_knots_s=(0.0, per_token_s * 8192),
        prefill_pair_s=rng.uniform(0.0, 1e-7),
        host_per_prefill_s=rng.uniform(0.0, 2e-3),
        kv_capacity_tokens=rng.randint(20_000, 200_000),
        kv_bytes_per_token=8192,
    )


@pytest.fixture(scope="module")
def known() -> Sweep:
    return sweep(H200.table, (1, 2))


@pytest.fixture(scope="module")
def fitted(known: Sweep) -> Profile:
    return fit_sweep(known, file="sweep.json")


def test_decode_times_come_back(fitted: Profile) -> None:
    for tp in (1, 2):
        truth, found = H200.table(tp), fitted.table(tp)
        for batch in (1, 3, 8, 23, 32):
            for context in (10, 1000, 100_000):
                expected_s = truth.base_s[batch] + truth.per_context_s[batch] * context
                found_s = found.base_s[batch] + found.per_context_s[batch] * context
                assert found_s == pytest.approx(expected_s, rel=1e-3), (tp, batch, context)


def test_prompt_times_come_back_as_well_as_the_errors_say(fitted: Profile) -> None:
    for tp in (1, 2):
        truth, found = H200.table(tp), fitted.table(tp)
        errors = fitted.at(tp).errors
        stated = max(errors[name]["worst_pct"] for name in ("prefill_unseen", "mixed_unseen"))
        assert stated < 3.0
        for n in (20, 100, 512, 1500):
            for start in (0, 4000):
                pairs = n * (start + n / 2)
                expected_s = truth.base_s[8] + truth.prefill_s(n, pairs) + truth.host_per_prefill_s
                found_s = found.base_s[8] + found.prefill_s(n, pairs) + found.host_per_prefill_s
                assert found_s == pytest.approx(expected_s, rel=1.5 * stated / 100), (tp, n)


def test_all_the_rest_comes_back(fitted: Profile, known: Sweep) -> None:
    assert fitted.host.per_prefill_s == pytest.approx(H200.host.per_prefill_s, rel=0.02)
    assert fitted.transfer.fixed_s == pytest.approx(TRANSFER_FIXED_S, rel=1e-3)
    assert fitted.transfer.bytes_per_s == pytest.approx(TRANSFER_BYTES_PER_S, rel=1e-3)
    assert fitted.engine is not None
    assert fitted.engine.block_tokens == BLOCK_TOKENS
    assert fitted.engine.max_batched_tokens == MAX_BATCHED_TOKENS
    assert fitted.costs is not None
    assert fitted.costs.engines["2"].start_s == pytest.approx(START_S)
    assert fitted.costs.beside == pytest.approx(1.0)
    assert fitted.costs.dispatch_s == 0.0
    assert fitted.at(2).kv_capacity_tokens == known.kv_capacity_tokens["2"]
    assert fitted.source.files == ("sweep.json",)
    assert fitted.conditions is not None
    assert fitted.conditions["hardware"] == {"cores": 2}


def test_loops_that_were_not_fitted_are_predicted(fitted: Profile) -> None:
    unseen = fitted.errors["measured"]["unseen"]
    assert unseen["runs"] == 4
    assert unseen["makespan_worst_pct"] < 1.0
    assert unseen["tpot_worst_pct"] < 2.0
    assert fitted.errors["drift_pct"] == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("seed", range(4))
def test_any_engine_of_this_form_comes_back(seed: int) -> None:
    table = drawn(seed)
    found = fit_sweep(sweep(lambda _: table), file="x")
    errors = found.at(1).errors
    for name in ("decode_fitted", "decode_unseen", "prefill_unseen", "mixed_unseen"):
        assert errors[name]["worst_pct"] < 1.0, name
    # Four numbers in a row decide a belief; the truth behind them has as many.
    assert errors["belief_unseen"]["worst_pct"] < 1.0
    assert found.errors["measured"]["unseen"]["makespan_worst_pct"] < 1.0
    assert found.host.per_prefill_s == pytest.approx(table.host_per_prefill_s, abs=2e-5)
    got = found.table(1)
    for batch in (1, 5, 32):
        assert got.base_s[batch] == pytest.approx(table.base_s[batch], rel=0.01)
        assert got.per_context_s[batch] == pytest.approx(table.per_context_s[batch], rel=0.01)


def bent(trials: tuple[DecodeTrial, ...], by: Callable[[DecodeTrial], float]) -> Sweep:
    """The known sweep with other decode times."""
    return replace(
        sweep(H200.table),
        decode=tuple(replace(trial, step_s=trial.step_s * by(trial)) for trial in trials),
    )


def test_what_is_not_affine_in_context_shows_in_the_held_out_error(known: Sweep) -> None:
    one = tuple(trial for trial in known.decode if trial.tp == 1)
    straight = fit_sweep(bent(one, lambda _: 1.0), file="x").at(1).errors
    curved = fit_sweep(bent(one, lambda t: 1.0 + 4.0 * (t.context / 8192) ** 0.5), file="x")
    assert straight["decode_unseen"]["median_pct"] < 0.1
    assert curved.at(1).errors["decode_unseen"]["median_pct"] > 2.0


def test_a_batch_that_is_slower_than_its_neighbours_shows_in_the_held_out_error(
    known: Sweep,
) -> None:
    one = tuple(trial for trial in known.decode if trial.tp == 1)
    slow = bent(one, lambda t: 1.2 if t.batch in (3, 6, 11, 23) else 1.0)
    errors = fit_sweep(slow, file="x").at(1).errors
    assert errors["decode_fitted"]["worst_pct"] < 0.1
    assert errors["decode_unseen"]["median_pct"] > 15.0


def test_prompts_that_come_to_life_between_the_knots_show_in_the_held_out_error(
    known: Sweep,
) -> None:
    slow = replace(
        known,
        prefill=tuple(
            replace(trial, prefill_s=trial.prefill_s * (1.3 if trial.held_out else 1.0))
            for trial in known.prefill
        ),
    )
    errors = fit_sweep(slow, file="x").at(1).errors
    assert errors["prefill_unseen"]["median_pct"] > 15.0
    assert errors["mixed_unseen"]["median_pct"] > 15.0


def test_loops_slower_than_their_parts_show_in_the_loop_error(known: Sweep) -> None:
    slow = replace(
        known, loops=tuple(replace(x, makespan_s=x.makespan_s * 1.25) for x in known.loops)
    )
    assert fit_sweep(slow, file="x").errors["measured"]["unseen"]["makespan_mean_abs_pct"] > 18.0


def test_a_machine_that_slows_down_shows_as_drift(known: Sweep) -> None:
    last = max(trial.order for trial in known.decode)
    slow = replace(
        known,
        decode=tuple(
            replace(trial, step_s=trial.step_s * (1 + 0.2 * trial.order / last))
            for trial in known.decode
        ),
    )
    assert fit_sweep(slow, file="x").errors["drift_pct"] == pytest.approx(18.0, abs=4.0)


def test_one_stray_repeat_changes_nothing(known: Sweep) -> None:
    seen: dict[object, int] = {}
    trials = []
    for trial in known.decode:
        cell = trial.tp, trial.batch, trial.context
        seen[cell] = seen.get(cell, 0) + 1
        trials.append(replace(trial, step_s=trial.step_s * (10 if seen[cell] == 2 else 1)))
    found = fit_sweep(replace(known, decode=tuple(trials)), file="x")
    assert found.at(1).errors["decode_unseen"]["worst_pct"] < 0.1
    assert found.at(1).errors["repeats"]["worst_pct"] > 800


def test_the_drivers_path_is_what_a_lone_prompt_takes_beyond_its_iterations(known: Sweep) -> None:
    late = replace(
        known,
        prefill=tuple(replace(trial, wall_s=trial.prefill_s + 0.004) for trial in known.prefill),
    )
    costs = fit_sweep(late, file="x").costs
    assert costs is not None
    assert costs.dispatch_s == pytest.approx(0.004)


def test_without_kv_to_move_the_transfer_is_a_prefill(known: Sweep) -> None:
    moves = tuple(
        MoveTrial(
            order=i,
            tp=1,
            target_tp=1,
            batch=batch,
            context=tokens,
            way="prefill",
            kv_tokens=tokens,
            kv_bytes=0,
            export_s=0.0,
            place_s=(0.1 if batch else 0.02) + tokens * 1e-4,
        )
        for i, (tokens, batch) in enumerate([(1000, 0), (4000, 4), (1000, 4), (8000, 0)])
    )
    found = fit_sweep(replace(known, moves=moves), file="x")
    assert found.costs is not None
    assert found.costs.reprefill is not None
    assert found.costs.reprefill.fixed_s == pytest.approx(0.1, rel=1e-3)
    assert found.costs.reprefill.per_token_s == pytest.approx(1e-4, rel=1e-3)
    moved_s = 4000 * known.kv_bytes_per_token / found.transfer.bytes_per_s
    assert found.transfer.fixed_s + moved_s == pytest.approx(0.5, rel=1e-3)


def test_measured_steps_stay_as_they_are_under_sglang(fitted: Profile) -> None:
    slow = replace(fitted, host=replace(fitted.host, per_step_s=0.05))
    made = of_sglang(slow, "0.5.9")
    assert (made.host, made.tables) == (slow.host, slow.tables)
    assert made.source.note.startswith(f"times are as measured with {slow.source.engine}:")
    own = replace(slow, source=replace(slow.source, backend="sglang"))
    assert of_sglang(own) == own


def test_a_profile_that_was_fitted_is_read_again(fitted: Profile, tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    path.write_bytes(encode_profile(fitted))
    assert read_profile(path) == fitted
    (cost,) = read_profile(path).cost_estimate((1,)).by_shape.values()
    assert cost.t0_s > 0


def test_too_few_points_are_counted_and_named(known: Sweep) -> None:
    grid = [trial for trial in known.decode if not trial.held_out]
    for kept, said in (
        ([t for t in known.decode if t.batch == 1], "1 batch sizes"),
        ([t for t in known.decode if t.held_out or t.context == grid[0].context], "1 contexts"),
        (grid, r"0 held-out cells \(decode\)"),
        ([], "0 batch sizes"),
    ):
        with pytest.raises(FitError, match=rf"at TP 1 the sweep has {said}.*profile.max_context"):
            fit_sweep(replace(known, decode=tuple(kept)), file="x")
    with pytest.raises(FitError, match="0 prompt lengths"):
        fit_sweep(replace(known, prefill=()), file="x")


def test_times_that_are_no_engines_are_refused_unless_allowed(known: Sweep) -> None:
    rng = Random(1)
    odd = replace(
        known,
        decode=tuple(replace(trial, step_s=rng.uniform(1e-3, 1.0)) for trial in known.decode),
    )
    with pytest.raises(FitError, match=r"sweep.json: at TP 1 .*_fitted, median.*max_fit_error"):
        fit_sweep(odd, file="sweep.json")
    assert fit_sweep(odd, file="x", worst_pct=1e6).at(1).errors["decode_unseen"]["median_pct"] > 25


# -- the file ----------------------------------------------------------------------------------


def test_a_sweep_is_read_as_it_was_written(known: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_bytes(encode_sweep(known))
    assert read_sweep(path) == known


def written(known: Sweep, path: Path, **changes: object) -> Path:
    path.write_bytes(encode_sweep(known))
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data))
    return path


def test_a_sweep_cut_short_is_refused(known: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_bytes(encode_sweep(known))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(SweepError, match=r"sweep.json: not JSON to its end .*cut short"):
        read_sweep(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "heddle.sweep/9"}, "its schema is 'heddle.sweep/9', not 'heddle.sweep/1'"),
        ({"schema": "heddle.profile/1"}, "give a file that `heddle profile measure`"),
        ({"max_running": 0}, "max_running must be 1 or more"),
        ({"block_tokens": "16"}, "Expected `int`"),
        ({"kv_capacity_tokens": {}}, "names no TP degree"),
        ({"kv_capacity_tokens": {"one": 5}}, "kv_capacity_tokens.one"),
        ({"decode": [{"order": 1}]}, "missing required field"),
        ({"decode": 5}, "Expected `array`"),
    ],
)
def test_a_sweep_that_is_none_names_the_field(
    known: Sweep, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    path = written(known, tmp_path / "sweep.json", **changes)
    with pytest.raises(SweepError, match=said) as caught:
        read_sweep(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "decode",
            {"step_s": 0.0},
            r"decode\[2\].step_s must be more than 0 and .* seconds, not 0",
        ),
        ("decode", {"step_s": -1.0}, r"decode\[2\].step_s"),
        ("decode", {"step_s": 1e308}, r"decode\[2\].step_s .* at most 1,000,000,000 seconds"),
        ("prefill", {"prompt": 10**12}, r"prefill\[2\].prompt must be from 0 to 1,000,000,000"),
        ("decode", {"tp": 3}, r"decode\[2\].tp is 3, which kv_capacity_tokens does not name"),
        ("prefill", {"cached": 10**9}, r"prefill\[2\].cached .* not below prompt"),
        ("prefill", {"together": 0}, r"prefill\[2\].together"),
        ("loops", {"clients": [[]]}, r"loops\[2\].clients has one without steps"),
        ("moves", {"place_s": -0.1}, r"moves\[2\].place_s must be from 0 to .* seconds, not -0.1"),
    ],
)
def test_times_that_cannot_be_are_named(
    known: Sweep, tmp_path: Path, kind: str, changes: dict[str, object], said: str
) -> None:
    path = tmp_path / "sweep.json"
    path.write_bytes(encode_sweep(known))
    data = json.loads(path.read_text())
    data[kind][2] |= changes
    path.write_text(json.dumps(data))
    with pytest.raises(SweepError, match=said):
        read_sweep(path)


def test_a_time_that_is_no_number_is_refused(known: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_bytes(encode_sweep(known))
    text = path.read_text()
    first = text.index('"step_s":') + len('"step_s":')
    path.write_text(text[:first] + "NaN" + text[text.index(",", first) :])
    with pytest.raises(SweepError, match=r"sweep\.json"):
        read_sweep(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"cannot read the sweep .*nowhere.json: No such file"):
        read_sweep(tmp_path / "nowhere.json")


def test_a_prompt_trial_is_one_of_its_cell(known: Sweep) -> None:
    assert all(isinstance(trial, PrefillTrial) for trial in known.prefill)
    cells = {(t.tp, t.batch, t.together, t.prompt, t.cached, t.held_out) for t in known.prefill}
    assert len(cells) > 60


@pytest.mark.parametrize(
    ("budget", "iterations"),
    [
        (150, [[(40, 60), (40, 60), (40, 30)], [(70, 30)]]),
        (60, [[(40, 60)], [(40, 60)], [(40, 60)]]),
        (25, [[(40, 25)], [(65, 25)], [(90, 10), (40, 15)], [(55, 25)], [(80, 20), (40, 5)]]),
    ],
)
def test_prompts_at_once_share_the_token_budget_of_an_iteration(budget, iterations):
    trial = PrefillTrial(
        order=0,
        tp=1,
        held_out=False,
        batch=0,
        mean_context=0.0,
        together=3,
        prompt=100,
        cached=40,
        prefill_s=1.0,
        queued_s=0.0,
        wall_s=1.0,
    )
    found = list(_iterations(trial, budget))
    assert found[: len(iterations)] == iterations
    assert sum(n for each in found for _, n in each) == 180
