"""A sweep of an engine that is known tells what is known of it."""

from collections.abc import Awaitable
from dataclasses import replace

import msgspec
import pytest

from heddle_calibrate.measure.cells import (
    SIZES,
    DecodeCell,
    Limits,
    PrefillCell,
    SizeName,
    between,
    decode_cells,
    loop_scripts,
    prefill_cells,
)
from heddle_calibrate.measure.probe import EngineProbe, MeasureError, StepSample
from heddle_calibrate.measure.session import Measurements
from heddle_calibrate.measure.trials import decode_trial, prefill_trials
from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import EngineClient, StepRequest, StepResult
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import load_profile
from tests.calibrate.fake_sweep import (
    BLOCK_TOKENS,
    START_S,
    TRANSFER_BYTES_PER_S,
    TRANSFER_FIXED_S,
    sweep_of,
    sweep_spec,
)

PROFILE = load_profile("qwen3-8b", "h200")
LIMITS = Limits(max_running=32, max_context=8192, kv_capacity_tokens=60_000)


@pytest.fixture(scope="module")
def measured() -> Measurements:
    return sweep_of(PROFILE.table, sweep_spec())


def step_s(table: LatencyTable, batch: int, context: float) -> float:
    return table.base_s[batch] + table.per_context_s[batch] * context


def test_decode_trials_are_the_iteration_times_of_the_engine(measured: Measurements) -> None:
    table = PROFILE.table(1)
    assert {trial.batch for trial in measured.decode} >= {1, 2, 4, 8, 16}
    for trial in measured.decode:
        assert trial.mean_batch == pytest.approx(trial.batch)
        expected_s = step_s(table, trial.batch, trial.mean_context)
        assert trial.step_s == pytest.approx(expected_s, rel=1e-9)


def test_prefill_trials_are_what_a_prompt_adds_to_an_iteration(measured: Measurements) -> None:
    table = PROFILE.table(1)
    seen = {"alone": 0, "beside": 0, "cached": 0, "together": 0}
    for trial in measured.prefill:
        new = trial.prompt - trial.cached
        if new * trial.together + trial.batch > 2048:
            continue  # several iterations
        seen["beside" if trial.batch else "alone"] += 1
        seen["cached"] += trial.cached > 0
        seen["together"] += trial.together > 1
        pairs = trial.together * new * (trial.cached + new / 2)
        expected_s = (
            step_s(table, trial.batch, trial.mean_context)
            + table.prefill_s(new * trial.together, pairs)
            + table.host_per_prefill_s * trial.together
        )
        assert trial.prefill_s == pytest.approx(expected_s, rel=1e-4)
        assert trial.cached % BLOCK_TOKENS == 0
        assert trial.wall_s == pytest.approx(trial.queued_s + trial.prefill_s)
    assert min(seen.values()) > 10, seen


def test_moves_starts_and_aborts_are_measured(measured: Measurements) -> None:
    by_kv = [move for move in measured.moves if move.way == "kv"]
    assert {move.batch for move in by_kv} == {0, 4}
    for move in by_kv:
        assert move.kv_bytes == move.kv_tokens * PROFILE.kv_bytes_per_token
        took_s = TRANSFER_FIXED_S + move.kv_bytes / TRANSFER_BYTES_PER_S
        assert move.export_s + move.place_s == pytest.approx(took_s)
    assert [life.start_s for life in measured.lives] == pytest.approx([START_S] * 3)
    assert sorted(life.others for life in measured.lives) == [0, 0, 1]
    assert measured.aborts
    for abort in measured.aborts:
        assert abort.prompt - abort.cached <= BLOCK_TOKENS
        assert abort.resume_s < 0.1
    assert "sleep and wake-up" in "".join(measured.notes)


def test_nothing_that_is_held_out_is_a_batch_and_context_of_the_grid() -> None:
    for size in SIZES.values():
        cells = decode_cells(size, LIMITS)
        grid = [(c.batch, c.context) for c in cells if not c.held_out]
        held = [(c.batch, c.context) for c in cells if c.held_out]
        assert len(held) >= 5
        assert not set(grid) & set(held)
        prompts = [c for c in prefill_cells(size, LIMITS) if c.held_out]
        assert any(c.batch for c in prompts)
        assert any(not c.batch for c in prompts)
        assert {c.together for c in prompts} == {1, 3}, "between those that are fitted"


@pytest.mark.parametrize("capacity", [600, 3000, 10**6])
@pytest.mark.parametrize("max_running", [1, 2, 5, 64])
def test_every_cell_fits_into_the_engine(capacity: int, max_running: int) -> None:
    limits = Limits(max_running=max_running, max_context=16384, kv_capacity_tokens=capacity)
    size = SIZES["small"]
    for d in decode_cells(size, limits):
        assert d.batch <= max_running
        assert d.batch * (d.context + size.output) <= capacity
    for p in prefill_cells(size, limits):
        assert p.batch + p.together <= max_running
        assert p.cached < p.prompt
        assert p.batch * p.context + p.together * p.prompt < capacity
    for clients in (limits.most(size.least_tokens), 1):
        scripts = loop_scripts(1, clients, limits)
        ends = [s.steps[-1].prompt_tokens + s.steps[-1].output_tokens for s in scripts]
        assert sum(ends) <= capacity


@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize(("max_running", "max_context"), [(1, 200), (2, 230), (6, 400), (9, 1000)])
def test_no_step_exceeds_the_longest_context(
    monkeypatch: pytest.MonkeyPatch, size: SizeName, max_running: int, max_context: int
) -> None:
    requested: list[int] = []
    begin = EngineProbe.begin

    def noted(
        self: EngineProbe, client: EngineClient, request: StepRequest
    ) -> Awaitable[StepSample]:
        requested.append(request.prompt_tokens + request.max_tokens)
        assert request.max_tokens > 0
        return begin(self, client, request)

    monkeypatch.setattr(EngineProbe, "begin", noted)
    wanted = sweep_spec(max_running=max_running, max_context=max_context)
    measured = sweep_of(PROFILE.table, replace(wanted, size=size))
    assert max(requested) <= max_context
    assert measured.decode
    assert bool(measured.aborts) is (max_running > 1)


def test_the_order_is_drawn_by_the_seed_and_repeats_are_spread_over_it(
    measured: Measurements,
) -> None:
    def orders(measured: Measurements) -> list[tuple[int, int, int]]:
        return [(t.order, t.batch, t.context) for t in measured.decode]

    again = sweep_of(PROFILE.table, sweep_spec())
    other = sweep_of(PROFILE.table, sweep_spec(seed=2))
    assert orders(again) == orders(measured)
    assert orders(other) != orders(measured)
    spans = []
    for cell in {(t.batch, t.context) for t in measured.decode}:
        places = [t.order for t in measured.decode if (t.batch, t.context) == cell]
        assert len(places) == 3
        spans.append(max(places) - min(places))
    assert sum(spans) / len(spans) > 50


def test_progress_counts_up_to_what_there_was() -> None:
    calls: list[tuple[int, int]] = []
    sweep_of(PROFILE.table, sweep_spec(), on_progress=lambda done, of, _: calls.append((done, of)))
    assert [done for done, _ in calls] == list(range(len(calls)))
    assert calls[-1][1] == len(calls)


def test_an_engine_that_dies_ends_the_sweep_with_its_name() -> None:
    with pytest.raises(MeasureError, match="engine m1 failed: injected fault"):
        sweep_of(PROFILE.table, sweep_spec(), faults=[(START_S * 2 + 5.0, "m1")])


def test_trials_with_preemptions_are_counted_and_left_out() -> None:
    end = StepResult(
        trajectory=TrajectoryId("a"), tokens=10, finished=True, prefill_s=0.1, decode_s=1.0
    )
    sample = StepSample(0.0, 1.1, end)
    cell = DecodeCell(1, 100, False)
    assert decode_trial([sample], cell, order=1, tp=1) is not None
    taken = sample._replace(end=msgspec.structs.replace(end, recomputes=1))
    assert decode_trial([sample, taken], cell, order=1, tp=1) is None
    prompt = PrefillCell(1, 100, 64, 0, False)
    assert prefill_trials([[sample]], [taken], prompt, order=1, tp=1) == []


def test_a_batch_that_begins_raggedly_counts_as_what_it_was_on_average() -> None:
    """Three steps of ten iterations; the last begins two iterations later than the others."""
    ends = [
        StepResult(
            trajectory=TrajectoryId(str(i)), tokens=11, finished=True, prefill_s=0.1, decode_s=1.0
        )
        for i in range(3)
    ]
    late = msgspec.structs.replace(ends[2], queued_s=0.2)
    samples = [
        StepSample(0.0, 1.1, ends[0]),
        StepSample(0.0, 1.1, ends[1]),
        StepSample(0.0, 1.3, late),
    ]
    trial = decode_trial(samples, DecodeCell(3, 50, False), order=1, tp=1)
    assert trial is not None
    assert trial.step_s == pytest.approx(0.1)
    assert trial.mean_batch == pytest.approx(1 + 2 * 0.8)
    assert trial.mean_context == pytest.approx(trial.mean_batch * 55.5)


def test_prompts_that_joined_too_early_or_too_late_are_no_measurement() -> None:
    decoding = StepSample(
        0.0,
        2.0,
        StepResult(
            trajectory=TrajectoryId("d"),
            tokens=11,
            finished=False,
            queued_s=0.5,
            prefill_s=0.5,
            decode_s=1.0,
        ),
    )
    joined = [
        [
            StepSample(
                at,
                at + 0.2,
                StepResult(
                    trajectory=TrajectoryId("j"),
                    tokens=1,
                    finished=True,
                    queued_s=0.1,
                    prefill_s=0.1,
                ),
            )
        ]
        for at in (0.5, 1.2, 1.85)
    ]
    trials = prefill_trials(joined, [decoding], PrefillCell(1, 50, 64, 0, False), order=1, tp=1)
    assert len(trials) == 1
    assert trials[0].mean_context == pytest.approx(50 + 1 + 0.3 * 10)


def test_geometric_means_lie_between() -> None:
    assert between([1, 2, 4, 8, 100]) == [3, 6, 28]
    assert between([5]) == []


def test_an_engine_with_too_little_kv_is_refused_with_the_option_to_change() -> None:
    small = replace(PROFILE.table(1), kv_capacity_tokens=16)
    with pytest.raises(MeasureError, match=r"holds 16 tokens of KV .* measuring takes 160 or more"):
        sweep_of(lambda _: small, sweep_spec())


def test_prompts_of_two_iterations_are_no_prefill_together() -> None:
    end = StepResult(trajectory=TrajectoryId("j"), tokens=1, finished=True, prefill_s=0.5)
    cell = PrefillCell(0, 0, 64, 0, False, 2)
    close, apart = (
        [
            StepSample(0.0, 0.5, end),
            StepSample(0.0, 1.0, msgspec.structs.replace(end, prefill_s=0.5 + later)),
        ]
        for later in (0.001, 0.2)
    )
    assert len(prefill_trials([close, apart], [], cell, order=1, tp=1)) == 1
    mixed = [close[0], StepSample(0.0, 0.5, msgspec.structs.replace(end, cached_tokens=16))]
    assert prefill_trials([mixed], [], cell, order=1, tp=1) == []
