"""From tables of kernel times to decode and prefill curves, and to a policy's cost estimate.

Ground truth and cost estimate share no sample. Decode: ground truth takes the rows at contexts 1K,
8K and 32K, the estimate those at 4K and 16K. Prefill: ground truth takes mixed steps, prompts of
512, 2K and 8K without a cached prefix, and 512 tokens on a 32K prefix. The estimate takes 512
tokens on prefixes of 1.5K and 7.5K, and a whole 32K.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from heddle_calibrate.fit.curves import (
    DecodeFit,
    EstimateFit,
    PrefillFit,
    decode_curve,
    filling_cost,
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
IDLE_LEAST = 0.01
"""An iteration that only prefills takes at least this share of a decode step: none is free."""
LONG = 32768
"""The longest prompt: beside four of a quarter, it shows the pairs where `PAIR_ROW` does not."""
LEAST_GRID = 401
"""Values that are tried for the least time of an iteration that prefills."""
LINK_BATCH = 64
"""From here on an all-reduce grows with its bytes; below, it is mostly latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTables:
    """The rows of one GPU class, one backend; milliseconds as in the files.

    The column `layout` has names as in profiles (`layout_name`): "4", "4ep4", "1dp8ep8". Rows of a
    layout with data-parallel ranks are of one rank, with its batch and its KV.
    """

    decode: pd.DataFrame
    prefill: pd.DataFrame
    mixed: pd.DataFrame
    capacity: pd.DataFrame

    def of(self, model: str, layout: str) -> "KernelTables":
        """Rows of one model with one layout."""
        return self._each(
            lambda frame: (
                frame[(frame["model"] == model) & (frame["layout"] == layout)]
                if len(frame)
                else frame
            )
        )

    def with_slower_links(self, factor: float) -> "KernelTables":
        """Rows of a class that differs in its links alone: every all-reduce takes `factor` times.

        The tables state the all-reduce of decode steps only. That of a prompt follows the line over
        the batches from `LINK_BATCH`: an all-reduce moves the same bytes for each token.
        """
        frames = {name: self._slower(frame, name, factor) for name, frame in self._frames().items()}
        return KernelTables(**frames)

    def _slower(self, frame: pd.DataFrame, kind: str, factor: float) -> pd.DataFrame:
        if kind == "capacity" or not len(frame):
            return frame
        extra = factor - 1.0
        slower = frame.copy()
        if kind == "decode":
            slower["TPOT_ms"] += extra * slower["allreduce_ms"]
            return slower
        for (model, layout), rows in frame.groupby(["model", "layout"]):
            per_token, fixed = self._allreduce_line(str(model), str(layout))
            if kind == "prefill":
                tokens = rows["prompt_tokens"] - rows["prefix_cached_tokens"]
                slower.loc[rows.index, "prefill_ms"] += extra * (fixed + per_token * tokens)
                continue
            alone = fixed + per_token * rows["decode_batch"]
            slower.loc[rows.index, "decode_only_ms"] += extra * alone
            more = alone + per_token * rows["prefill_chunk_tokens"]
            slower.loc[rows.index, "step_ms"] += extra * more
        return slower

    def _allreduce_line(self, model: str, layout: str) -> tuple[float, float]:
        """Milliseconds per token and per step."""
        rows = self.of(model, layout).decode
        rows = rows[rows["batch"] >= LINK_BATCH]
        per_token, fixed = np.polyfit(rows["batch"], rows["allreduce_ms"], 1)
        return max(0.0, float(per_token)), max(0.0, float(fixed))

    def _frames(self) -> dict[str, pd.DataFrame]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _each(self, change: Callable[[pd.DataFrame], pd.DataFrame]) -> "KernelTables":
        return KernelTables(**{name: change(frame) for name, frame in self._frames().items()})


def fit_decode(rows: pd.DataFrame) -> DecodeFit:
    """Least relative squares, affine in context at each batch size of the table.

    Both coefficients grow with the batch (as sums of nonnegative increments), so no step gets
    faster when a sequence of the same length joins. Small dips of the source are smoothed.
    """
    chosen = rows[rows["context"].isin(GROUND_TRUTH_CONTEXTS)]
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


def fit_prefill(
    t: KernelTables,
    decode: DecodeFit,
    idle_share: float | None,
    *,
    experts: bool = False,
    least_pair_s: float = 0.0,
) -> PrefillFit:
    """Fit the prefill curve beside the decode steps of `decode`.

    Where the source has mixed steps, the curve is the time that a chunk adds to a decode step (mean
    over decode batches: it hardly depends on them), and `idle_s` is the median cost of a lone
    prompt beyond that. Elsewhere `idle_s` is `idle_share` of the step of one sequence without
    context, and the curve comes from lone prompts. `experts`: see `_least_of_a_prefill`. A (query,
    key) pair takes `least_pair_s` or more: of latent attention, the source has slower kernels for
    short prompts without a cached prefix, which hide the pairs of those with one.
    """
    lone = prefill_rows(t.prefill)
    alone_s = float(decode.base_s[0])
    pair_s = (lone[PAIR_ROW] - lone[CHUNK, 0]) / (CHUNK * PAIR_ROW[1])
    if pair_s <= 0.0:  # in the source a cached prefix costs less than none
        chunks = (lone[LONG, 0] - LONG // LONGEST_STEP * lone[LONGEST_STEP, 0]) * 2
        pair_s = chunks / (LONG * LONG - LONG * LONGEST_STEP)
    pair_s = max(least_pair_s, pair_s, 0.0)
    if len(t.mixed):
        tokens: tuple[int, ...] = PREFILL_KNOTS
        added = (t.mixed["step_ms"] - t.mixed["decode_only_ms"]) / 1e3
        if experts:
            idle_s, total = _least_of_a_prefill(t, decode, lone)
        else:
            seen = added.groupby(t.mixed["prefill_chunk_tokens"]).mean()
            total = [float(seen[n]) for n in tokens]
            beyond = [lone[n, 0] - s for n, s in zip(tokens, total, strict=True) if (n, 0) in lone]
            idle_s = min(alone_s, max(IDLE_LEAST * alone_s, float(np.median(beyond))))
    else:
        tokens = PREFILL_KNOTS[1:]
        if experts:
            rate = (lone[2048, 0] - lone[512, 0]) / (2048 - 512)
            most_s = float(decode.base_s[-1])
            idle_s = min(most_s, max(alone_s, lone[512, 0] - 512 * rate))
        else:
            assert idle_share is not None, "mixed tables are fitted first"
            idle_s = idle_share * alone_s
        total = [lone[n, 0] - idle_s for n in tokens]
    knots = [s - pair_s * n * n / 2 for n, s in zip(tokens, total, strict=True)]
    return PrefillFit(
        tokens=(0, *tokens),
        knots_s=(0.0, *(float(s) for s in np.maximum.accumulate(np.maximum(knots, 0.0)))),
        pair_s=pair_s,
        idle_s=idle_s,
    )


def _least_of_a_prefill(
    t: KernelTables, decode: DecodeFit, lone: Mapping[tuple[int, int], float]
) -> tuple[float, list[float]]:
    """Least time of an iteration that prefills, and what chunks of `PREFILL_KNOTS` tokens add.

    Of a model with experts, a chunk makes the iteration read all of them. Beside a small decode
    batch, which reads few, it therefore adds more than beside a large one, and most when alone. The
    least time is the one with the smallest squares of relative errors over all mixed steps and lone
    prompts; for each, the best curve is a weighted mean.
    """
    step_s = t.mixed["step_ms"].to_numpy(np.float64) / 1e3
    only_s = t.mixed["decode_only_ms"].to_numpy(np.float64) / 1e3
    batch = t.mixed["decode_batch"].to_numpy(np.float64)
    chunk = t.mixed["prefill_chunk_tokens"].to_numpy(np.int64)
    alone = [n for n in PREFILL_KNOTS if (n, 0) in lone]
    tokens = np.concatenate([chunk, alone])
    seconds = np.concatenate([step_s, [lone[n, 0] for n in alone]])
    before = np.concatenate([only_s, np.zeros(len(alone))])
    base = np.concatenate([np.interp(batch, decode.batch, decode.base_s), np.zeros(len(alone))])
    where = [tokens == n for n in PREFILL_KNOTS]

    def curve(least_s: float) -> tuple[float, list[float]]:
        added = seconds - before - np.maximum(0.0, least_s - base)
        best = [float(np.average(added[at], weights=seconds[at] ** -2)) for at in where]
        off = sum(
            float((((b - added[at]) / seconds[at]) ** 2).sum())
            for b, at in zip(best, where, strict=True)
        )
        return off, best

    grid = np.linspace(float(decode.base_s[0]), float(decode.base_s[-1]), LEAST_GRID)
    least_s = float(min(grid, key=lambda s: curve(float(s))[0]))
    return least_s, curve(least_s)[1]


def fit_estimate(t: KernelTables, *, experts: bool) -> EstimateFit:
    """Least relative squares on the rows that the ground truth does not use."""
    rows = t.decode[
        t.decode["context"].isin(ESTIMATE_CONTEXTS) & (t.decode["batch"] <= ESTIMATE_MAX_BATCH)
    ]
    seconds = rows["TPOT_ms"].to_numpy(np.float64) / 1e3
    batch = rows["batch"].to_numpy(np.float64)
    context = rows["context"].to_numpy(np.float64)
    weight = np.where(rows["fits_kv"].to_numpy() == 1, 1.0, UNREAL_WEIGHT) / seconds
    t0, t1, t2 = plane(batch, context, seconds, weight)
    filling = filling_cost(batch, context, seconds, weight) if experts else None
    lone = prefill_rows(t.prefill)
    seen = [
        (2048 - 1536, lone[2048, 1536]),
        (8192 - 7680, lone[8192, 7680]),
        (32768, lone[32768, 0]),
    ]
    # The prompt shares its step with decoding, which includes t0.
    rate = float(np.median([max(0.0, s - t0) / n for n, s in seen]))
    return EstimateFit(t0_s=t0, t1_s=t1, t2_s=t2, prefill_s=rate, filling=filling)


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
        batch = t.mixed["decode_batch"].to_numpy(np.float64)
        steps = decode.step_s(batch, t.mixed["decode_context"].to_numpy(np.float64))
        steps += np.maximum(0.0, prefill.idle_s - np.interp(batch, decode.batch, decode.base_s))
        steps += prefill.added_s(tokens, tokens**2 / 2)
        errors["mixed"] = spread(steps / (t.mixed["step_ms"].to_numpy(np.float64) / 1e3) - 1)
    return errors
