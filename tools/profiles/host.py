"""Host overhead: the time that kernel tables lack, from measured closed-loop serving runs.

Three numbers, the same for every model and GPU: seconds per step, per running sequence and step,
and per sequence in prefill. They minimise the relative error of TPOT when the runs are replayed
(`closed_loop`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from heddle_calibrate.fit.kernel_profile import NO_HOST
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import MAX_BATCH, Profile, expand
from heddle_sim.profile_parts import HostFit
from tools.profiles.closed_loop import ClosedLoop, LoopResult, replay

MEASURED_FILE = "measured_hopper_dense.csv"
FIT_TPS = (2, 4)
"""Runs at other degrees are never fitted; they serve as a check."""
ROBUST = 0.05
"""Relative errors beyond this count linearly: one outlier must not determine three numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One published serving run and the times of its client."""

    tp: int
    loop: ClosedLoop
    ttft_s: float
    tpot_s: float


def measured_runs(perf: Path) -> list[MeasuredRun]:
    """Read the vLLM runs of Qwen3-32B on H100 without precision label (bf16 assumed), in a fixed
    order."""
    rows = pd.read_csv(perf / MEASURED_FILE)
    rows = rows[
        (rows["gpu"] == "h100_sxm")
        & (rows["backend"] == "vllm")
        & (rows["model"] == "Qwen/Qwen3-32B")
        & (rows["precision"] == "unlabelled")
    ].sort_values(["tp", "input_tokens", "output_tokens", "concurrency"])
    return [
        MeasuredRun(
            tp=int(r["tp"]),
            loop=ClosedLoop(
                input_tokens=int(r["input_tokens"]),
                output_tokens=int(r["output_tokens"]),
                concurrency=int(r["concurrency"]),
            ),
            ttft_s=float(r["TTFT_ms"]) / 1e3,
            tpot_s=float(r["TPOT_ms"]) / 1e3,
        )
        for r in rows.to_dict("records")
    ]


def halves(runs: Sequence[MeasuredRun]) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """Split the runs at `FIT_TPS` alternately: for the ground truth and for the estimate."""
    fit = [r for r in runs if r.tp in FIT_TPS]
    return fit[::2], fit[1::2]


TablesFor = Callable[[HostFit, Sequence[int]], Mapping[int, LatencyTable]]
"""Latency tables at these TP degrees under a host overhead."""


def ground_truth_tables(
    profile: Profile, host: HostFit, tps: Sequence[int]
) -> Mapping[int, LatencyTable]:
    """The ground truth at these degrees under another host overhead."""
    tried = replace(NO_HOST, **asdict(host))
    return {tp: expand(profile, tp, host=tried) for tp in tps}


def estimate_tables(
    profile: Profile, host: HostFit, tps: Sequence[int]
) -> Mapping[int, LatencyTable]:
    """The cost estimate in the form of a table, so that a closed loop can be replayed on it."""
    reach = 8192
    tables = {}
    for tp in tps:
        b = profile.at(tp).belief
        t0_s, t1_s = b.t0_s + host.per_step_s, b.t1_s + host.per_running_s
        tables[tp] = LatencyTable(
            model=profile.model,
            gpu=profile.gpu,
            tp=tp,
            base_s=[t0_s + t1_s * n for n in range(MAX_BATCH + 1)],
            per_context_s=[b.t2_s] * (MAX_BATCH + 1),
            prefill_tokens=(0, reach),
            prefill_knots_s=(0.0, reach * b.prefill_s),
            prefill_pair_s=0.0,
            host_per_prefill_s=0.0,
            kv_capacity_tokens=b.kv_capacity_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
        )
    return tables


def replayed(runs: Sequence[MeasuredRun], tables: Mapping[int, LatencyTable]) -> list[LoopResult]:
    """Replay each run on the table of its TP degree."""
    return [replay(tables[r.tp], r.loop) for r in runs]


def tpot_errors(
    runs: Sequence[MeasuredRun], tables: Mapping[int, LatencyTable]
) -> NDArray[np.float64]:
    """Relative errors of the replayed TPOT, signed; same order as `runs`."""
    results = replayed(runs, tables)
    return np.array([x.tpot_s / r.tpot_s - 1 for x, r in zip(results, runs, strict=True)])


def fit_host(
    runs: Sequence[MeasuredRun], tables: TablesFor, *, per_prefill: bool = True
) -> HostFit:
    """Least squares of relative TPOT error, none negative; rounded to 10, 0.1 and 10 us.

    `per_prefill=False` leaves the third number at 0, for a cost estimate, which has no such term.
    """
    tps = sorted({r.tp for r in runs})
    free = 3 if per_prefill else 2

    def host(x: NDArray[np.float64]) -> HostFit:
        return HostFit(
            per_step_s=float(x[0]) / 1e3,
            per_running_s=float(x[1]) / 1e3,
            per_prefill_s=float(x[2]) / 1e3 if free == 3 else 0.0,
        )

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return tpot_errors(runs, tables(host(x), tps))

    found = least_squares(
        residuals,
        [1.0, 0.05, 5.0][:free],
        bounds=(0.0, np.inf),
        x_scale=[1.0, 0.05, 5.0][:free],
        diff_step=[1e-2] * free,
        loss="soft_l1",
        f_scale=ROBUST,
        xtol=1e-5,
        ftol=1e-6,
    )
    best = host(found.x)
    return HostFit(
        per_step_s=round(best.per_step_s, 5),
        per_running_s=round(best.per_running_s, 7),
        per_prefill_s=round(best.per_prefill_s, 5),
    )


def measured_errors(
    parts: Sequence[tuple[str, Sequence[MeasuredRun]]], tables: Mapping[int, LatencyTable]
) -> dict[str, Any]:
    """Errors of replayed TPOT and TTFT against measured runs, per named part."""
    report: dict[str, Any] = {}
    for name, runs in parts:
        results = replayed(runs, tables)
        pairs = list(zip(results, runs, strict=True))
        tpot = np.array([x.tpot_s / r.tpot_s - 1 for x, r in pairs])
        ttft = np.array([x.ttft_s / r.ttft_s - 1 for x, r in pairs])
        report[name] = {
            "runs": len(runs),
            "tpot_mean_abs_pct": round(float(np.abs(tpot).mean()) * 100, 2),
            "tpot_worst_pct": round(float(np.abs(tpot).max()) * 100, 2),
            "ttft_mean_abs_pct": round(float(np.abs(ttft).mean()) * 100, 1),
        }
    return report
