"""How well a fit does: relative errors in percent, on rows it saw and on rows it did not."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heddle_calibrate.fit.host import MeasuredRun, replayed
from heddle_calibrate.fit.kernel_tables import (
    TRUTH_CONTEXTS,
    BeliefFit,
    DecodeFit,
    PrefillFit,
    Tables,
    prefill_rows,
)
from heddle_sim.latency import LatencyTable

LONGEST_STEP = 8192
"""A longer prompt is prefilled in chunks of this many tokens."""


def spread(errors: NDArray[np.float64] | Sequence[float]) -> dict[str, float | int]:
    """Median and worst absolute error in percent, and the number of points."""
    size = np.abs(np.asarray(errors, dtype=np.float64)) * 100
    if not size.size:
        return {"points": 0}
    return {
        "median_pct": round(float(np.median(size)), 2),
        "worst_pct": round(float(size.max()), 2),
        "points": int(size.size),
    }


def decode_errors(t: Tables, decode: DecodeFit, belief: BeliefFit) -> dict[str, Any]:
    """Errors of truth on its own and on unseen contexts, and of belief on the truth's rows.

    Only rows whose KV fits in memory count: the others cannot occur.
    """
    real = t.decode[t.decode["fits_kv"] == 1]
    batch = real["batch"].to_numpy(np.float64)
    context = real["context"].to_numpy(np.float64)
    seconds = real["TPOT_ms"].to_numpy(np.float64) / 1e3
    seen = real["context"].isin(TRUTH_CONTEXTS).to_numpy()
    error = decode.step_s(batch, context) / seconds - 1
    believed = belief.step_s(batch, context) / seconds - 1
    return {
        "decode_fitted": spread(error[seen]),
        "decode_unseen": spread(error[~seen]),
        "belief_unseen": spread(believed[seen]),
    }


def prefill_errors(t: Tables, decode: DecodeFit, prefill: PrefillFit) -> dict[str, Any]:
    """Errors on lone prompts and, where the source has them, on mixed steps."""

    def lone(prompt: int, cached: int) -> float:
        seconds = 0.0
        for start in range(cached, prompt, LONGEST_STEP):
            n = min(LONGEST_STEP, prompt - start)
            pairs = np.array(n * (start + n / 2))
            seconds += prefill.idle_s + float(prefill.added_s(np.array(float(n)), pairs))
        return seconds

    rows = prefill_rows(t.prefill)
    errors: dict[str, Any] = {
        "prefill": spread([lone(*row) / seconds - 1 for row, seconds in rows.items()])
    }
    if len(t.mixed):
        tokens = t.mixed["prefill_chunk_tokens"].to_numpy(np.float64)
        steps = decode.step_s(
            t.mixed["decode_batch"].to_numpy(np.float64),
            t.mixed["decode_context"].to_numpy(np.float64),
        ) + prefill.added_s(tokens, tokens**2 / 2)
        errors["mixed"] = spread(steps / (t.mixed["step_ms"].to_numpy(np.float64) / 1e3) - 1)
    return errors


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
