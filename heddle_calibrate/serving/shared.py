"""Closed loops of a sweep as rows that `check` and the fit of shipped profiles read.

A row has what these columns name and nothing else of the sweep: no host, path, command or note, and
of models the name of a known shape alone.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from heddle_calibrate.fit.from_sweep import FitError, fit_sweep
from heddle_calibrate.serving.errors import PredictedRun, Profiles, predict_rows
from heddle_calibrate.serving.rows import COLUMNS, UNNAMED, profile_name, read_serving_rows
from heddle_calibrate.sweeps import ServedTrial, Sweep
from heddle_sim.model_names import known_model

LIMITS = ("max_num_seqs", "requests", "max_num_batched_tokens", "memory_share")
COLUMNS_SHARED = (*COLUMNS, "backend_version", "measured", *LIMITS, "gpu_name", "driver")


def shared_rows(sweep: Sweep) -> bytes:
    """Format the closed loops of a sweep as CSV."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS_SHARED, lineterminator="\n")
    table.writeheader()
    table.writerows(_row(sweep, trial) for trial in sweep.served)
    return text.getvalue().encode()


def _row(sweep: Sweep, trial: ServedTrial) -> dict[str, object]:
    known, precision = known_model(sweep.model), sweep.precision
    if known is not None and known.precision != "bf16":
        precision = known.precision  # a sweep has the precision that its engine computes in
    gpus: list[str] = sweep.hardware.get("gpus") or [""]
    gpu, _, more = gpus[0].partition(", ")
    driver = more.partition(", ")[0]
    return {
        "backend": sweep.engine,
        "backend_version": sweep.versions.get(sweep.engine, ""),
        "model": UNNAMED if known is None else known.profile,
        "gpu": sweep.gpu,
        "precision": precision,
        "tp": trial.tp,
        "input_tokens": trial.input_tokens,
        "output_tokens": trial.output_tokens,
        "concurrency": trial.concurrency,
        "requests": trial.requests,
        "TTFT_ms": f"{trial.ttft_s * 1e3:.4f}",
        "TPOT_ms": f"{trial.tpot_s * 1e3:.4f}",
        "measured": sweep.made.partition("T")[0],
        "max_num_seqs": sweep.max_running,
        "max_num_batched_tokens": sweep.max_batched_tokens,
        "memory_share": sweep.settings.get("gpu_memory_share", ""),
        "gpu_name": gpu,
        "driver": driver,
    }


def before_and_after(sweep: Sweep, rows: Path, *, worst_pct: float) -> list[str]:
    """Say how far off the shared rows are by the known profile, and by one fitted to the sweep,
    of which the rows are no part."""
    found = ["before, by the known profile: " + _errors(rows, {})]
    try:
        fitted = fit_sweep(sweep, file="sweep", worst_pct=worst_pct)
    except FitError as error:
        return [*found, f"after: no profile of the sweep: {error}"]
    read, _ = read_serving_rows([rows])
    own = {(profile_name(row), row.gpu): fitted for row in read}
    return [*found, "after, by a profile of the sweep: " + _errors(rows, own)]


def _errors(rows: Path, profiles: Profiles) -> str:
    report = predict_rows([rows], profiles)
    if not report.runs:
        return "no answer: " + "; ".join(dict.fromkeys(left.rule for left in report.left_out))
    return f"TPOT {_mean(report.runs, 'tpot'):.1f} % off, TTFT {_mean(report.runs, 'ttft'):.1f} %"


def _mean(runs: Sequence[PredictedRun], name: str) -> float:
    return 100 * float(sum(abs(getattr(run, name)) for run in runs)) / len(runs)
