"""What every fit makes, from whatever source: decode and prefill curves, the plane of a cost
estimate, and the summary of their errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from heddle_core.estimate.cost import FillingCost
from heddle_sim.profile_parts import CostEstimate, Decode, Prefill, TpTable

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Kernel time of a decode step: ``base_s[k] + context_s[k] * x`` when each of `batch[k]` holds
    `x`."""

    batch: Floats
    base_s: Floats
    context_s: Floats

    def step_s(self, batch: Floats, context: Floats) -> Floats:
        """Seconds, linear in the batch between knots."""
        base = np.interp(batch, self.batch, self.base_s)
        return np.asarray(base + np.interp(batch, self.batch, self.context_s) * context)


def decode_curve(
    knots: Floats, batch: Floats, context: Floats, seconds: Floats, weight: Floats
) -> DecodeFit:
    """Weighted least squares with one base and one slope in context for each batch size in
    `knots`; both may only grow. Batches between knots, fractions too, count for both neighbours.
    """
    slopes = (context / 1024)[:, None]
    grown = _increments(knots, batch)
    solution, _ = nnls(np.hstack([grown, grown * slopes]) * weight[:, None], seconds * weight)
    return DecodeFit(
        batch=knots,
        base_s=np.cumsum(solution[: len(knots)]),
        context_s=np.cumsum(solution[len(knots) :]) / 1024,
    )


def _increments(knots: Floats, x: Floats) -> Floats:
    """Each row: how much of every increment between knots a curve has gained at `x`."""
    one_each = np.eye(len(knots))
    at = np.array([np.interp(x, knots, column) for column in one_each]).T
    return np.asarray(at @ np.tril(np.ones_like(one_each)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFit:
    """The time that prefill adds to a step, and the time of a step without decoding before it
    (`idle_s`)."""

    tokens: tuple[int, ...]
    knots_s: tuple[float, ...]
    pair_s: float
    idle_s: float

    def added_s(self, tokens: Floats, pairs: Floats) -> Floats:
        """Seconds added by `tokens` with `pairs` (query, key) pairs; the last slope continues."""
        x, y = np.array(self.tokens, float), np.array(self.knots_s)
        beyond = np.maximum(tokens - x[-1], 0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.asarray(np.interp(tokens, x, y) + beyond + self.pair_s * pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateFit:
    """The plane ``t0 + t1 * batch + t2 * (context tokens in the batch)`` and one prefill rate;
    kernels only."""

    t0_s: float
    t1_s: float
    t2_s: float
    prefill_s: float
    filling: FillingCost | None = None
    """Of a model with experts."""

    def step_s(self, batch: Floats, context: Floats) -> Floats:
        """Seconds by the plane when each sequence holds `context`."""
        return self.t0_s + self.t1_s * batch + self.t2_s * batch * context


def plane(
    batch: Floats, context: Floats, seconds: Floats, weight: Floats
) -> tuple[float, float, float]:
    """Weighted least squares of a decode step: per step, per sequence, per token of context; none
    negative.
    """
    kilo = batch * context / 1024
    design = np.column_stack([np.ones_like(batch), batch, kilo]) * weight[:, None]
    (t0, t1, t2), _ = nnls(design, seconds * weight)
    return float(t0), float(t1), float(t2) / 1024


def filling_cost(batch: Floats, context: Floats, seconds: Floats, weight: Floats) -> FillingCost:
    """Weighted least squares of a decode step of a model with experts; none negative.

    The knee is the batch of a row, but not the least or the largest, with the least squares.
    """
    kilo = batch * context / 1024

    def fit(knee: float) -> tuple[float, Floats]:
        columns = [np.ones_like(batch), np.minimum(batch, knee), batch, kilo]
        solution, off = nnls(np.column_stack(columns) * weight[:, None], seconds * weight)
        return float(off), solution

    fits = {int(knee): fit(float(knee)) for knee in np.unique(batch)[1:-1]}
    knee = min(fits, key=lambda knee: fits[knee][0])
    t0, fill, t1, t2 = fits[knee][1].tolist()
    return FillingCost(t0_s=t0, fill_s=fill, knee=knee, t1_s=t1, t2_s=t2 / 1024)


def rounded(filling: FillingCost | None) -> FillingCost | None:
    """As in a profile file."""
    if filling is None:
        return None
    return replace(
        filling,
        t0_s=round(filling.t0_s, 7),
        fill_s=round(filling.fill_s, 9),
        t1_s=round(filling.t1_s, 9),
        t2_s=float(f"{filling.t2_s:.6g}"),
    )


def with_times(
    filling: FillingCost | None, *, kernels: float = 1.0, per_step_s: float, per_running_s: float
) -> FillingCost | None:
    """Kernel times, times the factor `kernels`, and host time."""
    if filling is None:
        return None
    return rounded(
        FillingCost(
            t0_s=filling.t0_s * kernels + per_step_s,
            fill_s=filling.fill_s * kernels,
            knee=filling.knee,
            t1_s=filling.t1_s * kernels + per_running_s,
            t2_s=filling.t2_s * kernels,
        )
    )


def table_entry(
    decode: DecodeFit, prefill: PrefillFit, estimate: EstimateFit, capacity: int
) -> TpTable:
    """Make one TP degree's section of a profile, its errors apart.

    Rounded to what the file holds: 0.1 us, 10 fs per token, and 1 as per pair.
    """
    return TpTable(
        kv_capacity_tokens=capacity,
        decode=Decode(
            batch=(0, *(int(b) for b in decode.batch)),
            base_ms=tuple(round(s * 1e3, 4) for s in (prefill.idle_s, *decode.base_s)),
            context_us=(0.0, *(round(float(s) * 1e6, 8) for s in decode.context_s)),
        ),
        prefill=Prefill(
            tokens=prefill.tokens,
            ms=tuple(round(s * 1e3, 4) for s in prefill.knots_s),
            pair_ns=round(prefill.pair_s * 1e9, 6),
        ),
        belief=CostEstimate(
            t0_s=round(estimate.t0_s, 7),
            t1_s=round(estimate.t1_s, 9),
            t2_s=float(f"{estimate.t2_s:.6g}"),
            prefill_s=float(f"{estimate.prefill_s:.6g}"),
            kv_capacity_tokens=capacity,
            filling=rounded(estimate.filling),
        ),
    )


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
