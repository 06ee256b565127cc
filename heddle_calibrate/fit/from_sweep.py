"""From a sweep of a real engine to a profile.

Ground truth is fitted on the cells of the sweep's grid. The cost estimate is fitted on the held-out
cells, which lie between, so the two share no measurement; the ground truth is checked on them.
Loops combine decoding, prompts and prefix cache. No fit uses them: they check the whole profile.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from heddle_calibrate.fit.costs import fit_costs, fit_transfer
from heddle_calibrate.fit.curves import (
    DecodeFit,
    EstimateFit,
    Floats,
    decode_curve,
    plane,
    spread,
    table_entry,
)
from heddle_calibrate.fit.loops import loop_errors
from heddle_calibrate.fit.prompts import PromptFit, fit_prompts, prompt_iterations
from heddle_calibrate.sweeps import DecodeTrial, PrefillTrial, Sweep, Trial
from heddle_sim.profile_files import Profile, expand
from heddle_sim.profile_parts import MEASURED, EngineSettings, Host, ProfileSource, TpTable

T = TypeVar("T", bound=Trial)

LEAST_BATCHES, LEAST_CONTEXTS, LEAST_PROMPTS = 2, 2, 3
LEAST_UNSEEN, LEAST_UNSEEN_PROMPTS = 3, 2
"""Fewer cells do not determine a fit, or leave none for the check."""


class FitError(ValueError):
    """A sweep that gives no profile; the message states what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cells:
    """One TP degree: the median trial of each cell, on the grid and held out."""

    decode: Sequence[DecodeTrial]
    unseen_decode: Sequence[DecodeTrial]
    prefill: Sequence[PrefillTrial]
    unseen_prefill: Sequence[PrefillTrial]


def fit_sweep(sweep: Sweep, *, file: str, worst_pct: float = 25.0) -> Profile:
    """Fit a profile; `file` is the source that it names.

    Raises:
        FitError: too few measurements; or a median error above `worst_pct` on the fitted cells,
            as from a machine with other work.
    """
    cells = {tp: _cells(sweep, tp) for tp in sweep.tps}
    decode = {tp: _fit_decode(at.decode) for tp, at in cells.items()}
    budget = sweep.max_batched_tokens
    # A profile has one host time of a prompt: fit it at each degree, fix it, fit the rest again.
    alone = [fit_prompts(at.prefill, decode[tp], budget) for tp, at in cells.items()]
    per_prompt_s = median(fit.per_prompt_s for fit in alone)
    entries = {}
    for tp, at in cells.items():
        prompts = fit_prompts(at.prefill, decode[tp], budget, per_prompt_s=per_prompt_s)
        estimate = _fit_estimate(at)
        errors = _errors(sweep, tp, at, decode[tp], prompts, estimate)
        for name in ("decode_fitted", "prefill_fitted"):
            if errors[name]["median_pct"] > worst_pct:
                raise FitError(
                    f"{file}: at TP {tp} even what was fitted is off by "
                    f"{errors[name]['median_pct']:g} % ({name}, median): these times are not an "
                    f"engine's; measure again on a quiet machine, or allow it with "
                    "profile.max_fit_error"
                )
        capacity = sweep.kv_capacity_tokens[str(tp)]
        entry = table_entry(decode[tp], prompts.curve, estimate, capacity)
        entries[str(tp)] = replace(entry, errors=errors)
    profile = _profile(sweep, entries, per_prompt_s, file)
    assert profile.costs is not None
    tables = {tp: expand(profile, tp, host=profile.host) for tp in profile.tps}
    measured = loop_errors(sweep, tables, profile.costs.dispatch_s)
    return replace(profile, errors={"measured": measured, "drift_pct": _drift_pct(sweep)})


def _cells(sweep: Sweep, tp: int) -> _Cells:
    decode = [_typical(trials, "step_s") for trials in _by_cell(sweep.decode, tp, _decode_cell)]
    prefill = [
        _typical(trials, "prefill_s") for trials in _by_cell(sweep.prefill, tp, _prefill_cell)
    ]
    cells = _Cells(
        decode=[trial for trial in decode if not trial.held_out],
        unseen_decode=[trial for trial in decode if trial.held_out],
        prefill=[trial for trial in prefill if not trial.held_out],
        unseen_prefill=[trial for trial in prefill if trial.held_out],
    )
    batches = {trial.batch for trial in cells.decode}
    contexts = {trial.context for trial in cells.decode}
    computed = {trial.prompt - trial.cached for trial in cells.prefill}
    for what, number, least in (
        ("batch sizes (decode)", len(batches), LEAST_BATCHES),
        ("contexts (decode)", len(contexts), LEAST_CONTEXTS),
        ("prompt lengths (prefill)", len(computed), LEAST_PROMPTS),
        ("held-out cells (decode)", len(cells.unseen_decode), LEAST_UNSEEN),
        ("held-out cells (prefill)", len(cells.unseen_prefill), LEAST_UNSEEN_PROMPTS),
    ):
        if number < least:
            raise FitError(
                f"at TP {tp} the sweep has {number} {what}, a fit needs {least}: measure again "
                f"with a larger profile.max_context or --max-running"
            )
    return cells


def _by_cell(trials: Sequence[T], tp: int, cell: Callable[[T], Hashable]) -> Iterable[Sequence[T]]:
    found: dict[Hashable, list[T]] = {}
    for trial in trials:
        if trial.tp == tp:
            found.setdefault(cell(trial), []).append(trial)
    return found.values()


def _decode_cell(trial: DecodeTrial) -> Hashable:
    return trial.held_out, trial.batch, trial.context


def _prefill_cell(trial: PrefillTrial) -> Hashable:
    return trial.held_out, trial.batch, trial.together, trial.prompt, trial.cached


def _typical(trials: Sequence[T], name: str) -> T:
    """The median trial, so that an outlier does not count."""
    ordered = sorted(trials, key=lambda trial: float(getattr(trial, name)))
    middle: Any = ordered[(len(ordered) - 1) // 2]
    typical: T = replace(middle, **{name: median(getattr(trial, name) for trial in ordered)})
    return typical


def _columns(cells: Sequence[DecodeTrial]) -> tuple[Floats, Floats, Floats]:
    """Batch, context of each sequence, seconds."""
    batch = np.array([cell.mean_batch for cell in cells])
    context = np.array([cell.mean_context for cell in cells]) / batch
    return batch, context, np.array([cell.step_s for cell in cells])


def _fit_decode(cells: Sequence[DecodeTrial]) -> DecodeFit:
    batch, context, seconds = _columns(cells)
    knots = np.unique(np.array([float(cell.batch) for cell in cells]))
    return decode_curve(knots, batch, context, seconds, 1.0 / seconds)


def _fit_estimate(cells: _Cells) -> EstimateFit:
    """A plane, and the median rate of prompts, from cells that the ground truth does not use."""
    batch, context, seconds = _columns(cells.unseen_decode)
    t0_s, t1_s, t2_s = plane(batch, context, seconds, 1.0 / seconds)
    rates = [
        max(0.0, trial.prefill_s - t0_s - t1_s * trial.batch - t2_s * trial.mean_context)
        / ((trial.prompt - trial.cached) * trial.together)
        for trial in cells.unseen_prefill
    ]
    return EstimateFit(t0_s=t0_s, t1_s=t1_s, t2_s=t2_s, prefill_s=median(rates))


def _errors(
    sweep: Sweep,
    tp: int,
    cells: _Cells,
    decode: DecodeFit,
    prompts: PromptFit,
    estimate: EstimateFit,
) -> dict[str, Any]:
    """Relative errors of each part, on fitted and on held-out cells."""

    def decoding(part: Sequence[DecodeTrial], by: DecodeFit | EstimateFit) -> dict[str, Any]:
        batch, context, seconds = _columns(part)
        return spread(by.step_s(batch, context) / seconds - 1)

    def prompting(part: Iterable[PrefillTrial]) -> dict[str, Any]:
        budget = sweep.max_batched_tokens
        return spread(
            [prompts.seconds(prompt_iterations(t, decode, budget)) / t.prefill_s - 1 for t in part]
        )

    repeats = [
        getattr(trial, name) / getattr(_typical(trials, name), name) - 1
        for name, groups in (
            ("step_s", _by_cell(sweep.decode, tp, _decode_cell)),
            ("prefill_s", _by_cell(sweep.prefill, tp, _prefill_cell)),
        )
        for trials in groups
        for trial in trials
    ]
    return {
        "decode_fitted": decoding(cells.decode, decode),
        "decode_unseen": decoding(cells.unseen_decode, decode),
        "belief_unseen": decoding(cells.decode, estimate),
        "prefill_fitted": prompting(cells.prefill),
        "prefill_unseen": prompting(t for t in cells.unseen_prefill if not t.batch),
        "mixed_unseen": prompting(t for t in cells.unseen_prefill if t.batch),
        "repeats": spread(repeats),
    }


def _drift_pct(sweep: Sweep) -> float:
    """How much slower the end of the sweep is than its begin: one slope for all trials, each
    seen from the mean of its cell in time and place."""
    later, slower = [], []
    for tp in sweep.tps:
        for trials in _by_cell(sweep.decode, tp, _decode_cell):
            place = fmean(trial.order for trial in trials)
            usual_s = fmean(trial.step_s for trial in trials)
            later += [trial.order - place for trial in trials]
            slower += [trial.step_s / usual_s - 1 for trial in trials]
    if not any(later):
        return 0.0
    slope = float(np.dot(later, slower) / np.dot(later, later))
    orders = [trial.order for trial in sweep.decode]
    return round(slope * (max(orders) - min(orders)) * 100, 2)


def _profile(sweep: Sweep, entries: dict[str, TpTable], per_prompt_s: float, file: str) -> Profile:
    transfer = fit_transfer(sweep)
    return Profile(
        schema="heddle.profile/1",
        model=sweep.model,
        gpu=sweep.gpu,
        source=ProfileSource(
            package=MEASURED,
            version=sweep.versions.get("heddle", "unknown"),
            backend=sweep.engine,
            backend_version=sweep.versions.get(sweep.engine, "unknown"),
            licence="",
            precision=sweep.precision,
            files=(file,),
        ),
        kv_bytes_per_token=sweep.kv_bytes_per_token,
        host=Host(
            per_step_s=0.0,
            per_running_s=0.0,
            per_prefill_s=round(per_prompt_s, 7),
            measured_on="the sweep itself, whose iterations have host time in them",
            carried_over=False,
        ),
        transfer=transfer,
        belief_transfer=transfer,
        tables=entries,
        engine=EngineSettings(
            block_tokens=sweep.block_tokens, max_batched_tokens=sweep.max_batched_tokens
        ),
        costs=fit_costs(sweep),
        conditions={
            "made": sweep.made,
            "command": sweep.command,
            "size": sweep.size,
            "seed": sweep.seed,
            "max_running": sweep.max_running,
            "hardware": sweep.hardware,
            "versions": sweep.versions,
            "settings": sweep.settings,
            "model_config": sweep.model_config,
            "notes": list(sweep.notes),
        },
    )
