"""From tables of kernel times to decode and prefill curves, and to a policy's cost estimate.

Ground truth and cost estimate share no sample. Decode: ground truth takes the rows at contexts 1K,
8K and 32K, the estimate those at 4K and 16K. Prefill: ground truth takes mixed steps, prompts of
512, 2K and 8K without a cached prefix, and 512 tokens on a 32K prefix. The estimate takes 512
tokens on prefixes of 1.5K and 7.5K, and a whole 32K.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from heddle_calibrate.fit.curves import (
    DecodeFit,
    EstimateFit,
    PrefillFit,
    decode_curve,
    plane,
    spread,
)

GROUND_TRUTH_CONTEXTS = (1024, 8192, 32768)
ESTIMATE_CONTEXTS = (4096, 16384)
ESTIMATE_MAX_BATCH = 128
"""The estimate is one plane; beyond this batch few rows fit in memory and they would tilt it."""
UNREAL_WEIGHT = 0.25
"""Rows whose KV does not fit are extrapolations of the source: kept, at less weight."""
PREFILL_KNOTS = (128, 512, 2048, 8192)
PAIR_ROW = (32768, 32256)
"""512 tokens on a long prefix: the row that determines the cost of a (query, key) pair."""
CHUNK = 512
LONGEST_STEP = 8192
"""A longer prompt is prefilled in chunks of this many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """The rows of one GPU class, one backend; milliseconds as in the files."""

    decode: pd.DataFrame
    prefill: pd.DataFrame
    mixed: pd.DataFrame
    capacity: pd.DataFrame

    def of(self, model: str, tp: int) -> "KernelTables":
        """Rows of one model at one TP degree."""
        return KernelTables(
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


def read_tables(perf: Path, gpu_file: str, backend: str = "vllm") -> KernelTables:
    """Read the four tables of a GPU class (``gpu_file`` as in the file names, ``h100_sxm``)."""

    def read(name: str) -> pd.DataFrame:
        frame = pd.read_csv(perf / name)
        return frame[(frame["backend"] == backend) & (frame["gpu"] == gpu_file)]

    return KernelTables(
        decode=read(f"aiconfigurator_{gpu_file}.csv"),
        prefill=read(f"aiconfigurator_{gpu_file}_prefill.csv"),
        mixed=read("aiconfigurator_mixed_step.csv"),
        capacity=read(f"aiconfigurator_{gpu_file}_kv_capacity.csv"),
    )


def fit_decode(rows: pd.DataFrame, contexts: tuple[int, ...] = GROUND_TRUTH_CONTEXTS) -> DecodeFit:
    """Least relative squares over `contexts`, affine in context at each batch size of the table.

    Both coefficients grow with the batch (as sums of nonnegative increments), so no step gets
    faster when a sequence of the same length joins. Small dips of the source are smoothed.
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


def prefill_rows(rows: pd.DataFrame) -> dict[tuple[int, int], float]:
    """(prompt tokens, cached tokens) -> seconds."""
    return {
        (int(prompt), int(cached)): float(ms) / 1e3
        for prompt, cached, ms in zip(
            rows["prompt_tokens"], rows["prefix_cached_tokens"], rows["prefill_ms"], strict=True
        )
    }


def fit_prefill(t: KernelTables, alone_s: float, idle_share: float | None) -> PrefillFit:
    """Fit the prefill curve; `alone_s` is the decode step of one sequence without context.

    Where the source has mixed steps, the curve is the time that a chunk adds to a decode step (mean
    over decode batches: it hardly depends on them), and `idle_s` is the median cost of a lone
    prompt beyond that. Elsewhere `idle_s` is `idle_share` of `alone_s`, and the curve comes from
    lone prompts.
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


def fit_estimate(t: KernelTables) -> EstimateFit:
    """Least relative squares on the rows that the ground truth does not use."""
    rows = t.decode[
        t.decode["context"].isin(ESTIMATE_CONTEXTS) & (t.decode["batch"] <= ESTIMATE_MAX_BATCH)
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
    # The prompt shares its step with decoding, which includes t0.
    rate = float(np.median([max(0.0, s - t0) / n for n, s in seen]))
    return EstimateFit(t0_s=t0, t1_s=t1, t2_s=t2, prefill_s=rate)


def decode_errors(t: KernelTables, decode: DecodeFit, estimate: EstimateFit) -> dict[str, Any]:
    """Errors of the ground truth on its own and on unseen contexts, and of the estimate on the
    rows of the ground truth.

    Only rows whose KV fits in memory count: the others cannot occur.
    """
    real = t.decode[t.decode["fits_kv"] == 1]
    batch = real["batch"].to_numpy(np.float64)
    context = real["context"].to_numpy(np.float64)
    seconds = real["TPOT_ms"].to_numpy(np.float64) / 1e3
    seen = real["context"].isin(GROUND_TRUTH_CONTEXTS).to_numpy()
    error = decode.step_s(batch, context) / seconds - 1
    estimated = estimate.step_s(batch, context) / seconds - 1
    return {
        "decode_fitted": spread(error[seen]),
        "decode_unseen": spread(error[~seen]),
        "belief_unseen": spread(estimated[seen]),
    }


def prefill_errors(t: KernelTables, decode: DecodeFit, prefill: PrefillFit) -> dict[str, Any]:
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
