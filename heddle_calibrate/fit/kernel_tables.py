"""From kernel-time tables to decode and prefill curves; and the coarser curves that policies
believe.

Truth and belief never share a sample. Decode: truth takes the rows at contexts 1K, 8K and 32K,
belief those at 4K and 16K. Prefill: truth takes mixed steps and prompts of 512, 2K and 8K without a
cached prefix, and 512 tokens on a 32K prefix; belief takes 512 tokens on 1.5K and 7.5K prefixes and
a whole 32K.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from heddle_sim.profile_parts import Belief, Decode, Prefill, TpTable

Floats = NDArray[np.float64]

TRUTH_CONTEXTS = (1024, 8192, 32768)
BELIEF_CONTEXTS = (4096, 16384)
BELIEF_MAX_BATCH = 128
"""Belief is one plane; beyond this batch few rows fit in memory and they would tilt it."""
UNREAL_WEIGHT = 0.25
"""Rows whose KV does not fit are extrapolations of the source: kept, at less weight."""
PREFILL_KNOTS = (128, 512, 2048, 8192)
PAIR_ROW = (32768, 32256)
"""512 tokens on a long prefix: the row that tells what a (query, key) pair costs."""
CHUNK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The rows of one GPU class, one backend; milliseconds as in the files."""

    decode: pd.DataFrame
    prefill: pd.DataFrame
    mixed: pd.DataFrame
    capacity: pd.DataFrame

    def of(self, model: str, tp: int) -> "Tables":
        """Rows of one model at one TP degree."""
        return Tables(
            **{
                name: frame[(frame["model"] == model) & (frame["tp"] == tp)]
                for name, frame in (
                    ("decode", self.decode),
                    ("prefill", self.prefill),
                    ("mixed", self.mixed),
                    ("capacity", self.capacity),
                )
            }
        )


def read_tables(perf: Path, gpu_file: str, backend: str = "vllm") -> Tables:
    """Read the four tables of a GPU class (``gpu_file`` as in the file names, ``h100_sxm``)."""

    def read(name: str) -> pd.DataFrame:
        frame = pd.read_csv(perf / name)
        return frame[(frame["backend"] == backend) & (frame["gpu"] == gpu_file)]

    return Tables(
        decode=read(f"aiconfigurator_{gpu_file}.csv"),
        prefill=read(f"aiconfigurator_{gpu_file}_prefill.csv"),
        mixed=read("aiconfigurator_mixed_step.csv"),
        capacity=read(f"aiconfigurator_{gpu_file}_kv_capacity.csv"),
    )


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


def fit_decode(rows: pd.DataFrame, contexts: tuple[int, ...] = TRUTH_CONTEXTS) -> DecodeFit:
    """Least relative squares over `contexts`, affine in context at each batch size of the table.

    Both coefficients are made to grow with the batch (as sums of increments that may not be
    negative), so no step gets faster when a sequence of the same length joins. The source's small
    dips are smoothed away.
    """
    chosen = rows[rows["context"].isin(contexts)]
    batch = chosen["batch"].to_numpy(np.float64)
    seconds = chosen["TPOT_ms"].to_numpy(np.float64) / 1e3
    return decode_curve(
        np.unique(batch),
        batch,
        chosen["context"].to_numpy(np.float64),
        seconds,
        np.where(chosen["fits_kv"].to_numpy() == 1, 1.0, UNREAL_WEIGHT) / seconds,
    )


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
    """What prefilling adds to a step, and what a step without decoding costs before it
    (`idle_s`)."""

    tokens: tuple[int, ...]
    knots_s: tuple[float, ...]
    pair_s: float
    idle_s: float

    def added_s(self, tokens: Floats, pairs: Floats) -> Floats:
        """Seconds added by `tokens` whose queries meet `pairs` keys; the last slope goes on."""
        x, y = np.array(self.tokens, float), np.array(self.knots_s)
        beyond = np.maximum(tokens - x[-1], 0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        return np.asarray(np.interp(tokens, x, y) + beyond + self.pair_s * pairs)


def prefill_rows(rows: pd.DataFrame) -> dict[tuple[int, int], float]:
    """(prompt tokens, cached tokens) -> seconds."""
    return {
        (int(prompt), int(cached)): float(ms) / 1e3
        for prompt, cached, ms in zip(
            rows["prompt_tokens"], rows["prefix_cached_tokens"], rows["prefill_ms"], strict=True
        )
    }


def fit_prefill(t: Tables, alone_s: float, idle_share: float | None) -> PrefillFit:
    """Fit the prefill curve; `alone_s` is the decode step of one sequence without context.

    Where the source has mixed steps, the curve is what a chunk was seen to add to a decode step
    (mean over decode batches: it hardly depends on them), and `idle_s` the median of what a lone
    prompt costs beyond that. Elsewhere `idle_s` is taken as `idle_share` of `alone_s`, and the
    curve from lone prompts.
    """
    lone = prefill_rows(t.prefill)
    pair_s = (lone[PAIR_ROW] - lone[CHUNK, 0]) / (CHUNK * PAIR_ROW[1])
    if len(t.mixed):
        added = (t.mixed["step_ms"] - t.mixed["decode_only_ms"]) / 1e3
        seen = added.groupby(t.mixed["prefill_chunk_tokens"]).mean()
        tokens: tuple[int, ...] = PREFILL_KNOTS
        total = [float(seen[n]) for n in tokens]
        beyond = [lone[n, 0] - s for n, s in zip(tokens, total, strict=True) if (n, 0) in lone]
        idle_s = min(alone_s, max(0.0, float(np.median(beyond))))
    else:
        assert idle_share is not None, "mixed tables are fitted first"
        tokens = PREFILL_KNOTS[1:]
        idle_s = idle_share * alone_s
        total = [lone[n, 0] - idle_s for n in tokens]
    knots = [s - pair_s * n * n / 2 for n, s in zip(tokens, total, strict=True)]
    return PrefillFit(
        tokens=(0, *tokens),
        knots_s=(0.0, *(float(s) for s in np.maximum.accumulate(np.maximum(knots, 0.0)))),
        pair_s=pair_s,
        idle_s=idle_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeliefFit:
    """The plane ``t0 + t1 * batch + t2 * (context tokens in the batch)`` and one prefill rate;
    kernels only."""

    t0_s: float
    t1_s: float
    t2_s: float
    prefill_s: float

    def step_s(self, batch: Floats, context: Floats) -> Floats:
        """Seconds when each sequence holds `context`."""
        return self.t0_s + self.t1_s * batch + self.t2_s * batch * context


def fit_belief(t: Tables) -> BeliefFit:
    """Least relative squares on the rows that the truth does not see."""
    rows = t.decode[
        t.decode["context"].isin(BELIEF_CONTEXTS) & (t.decode["batch"] <= BELIEF_MAX_BATCH)
    ]
    seconds = rows["TPOT_ms"].to_numpy(np.float64) / 1e3
    t0, t1, t2 = plane(
        rows["batch"].to_numpy(np.float64),
        rows["context"].to_numpy(np.float64),
        seconds,
        np.where(rows["fits_kv"].to_numpy() == 1, 1.0, UNREAL_WEIGHT) / seconds,
    )
    lone = prefill_rows(t.prefill)
    seen = [
        (2048 - 1536, lone[2048, 1536]),
        (8192 - 7680, lone[8192, 7680]),
        (32768, lone[32768, 0]),
    ]
    # The prompt shares its step with decoding, whose t0 is paid anyway.
    rate = float(np.median([max(0.0, s - t0) / n for n, s in seen]))
    return BeliefFit(t0_s=t0, t1_s=t1, t2_s=t2, prefill_s=rate)


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


def table_entry(
    decode: DecodeFit, prefill: PrefillFit, belief: BeliefFit, capacity: int
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
        belief=Belief(
            t0_s=round(belief.t0_s, 7),
            t1_s=round(belief.t1_s, 9),
            t2_s=float(f"{belief.t2_s:.6g}"),
            prefill_s=float(f"{belief.prefill_s:.6g}"),
            kv_capacity_tokens=capacity,
        ),
    )
