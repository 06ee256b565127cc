"""The iterations of the tables that efficiencies are fitted on, with their operators counted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from heddle_calibrate.fit.kernel_profile import GPUS
from heddle_calibrate.roofline.efficiency import least_times, nearest_key
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.operators import (
    BY_PHASE,
    Floats,
    Operator,
    decode_iterations,
    operators,
    prefill_iterations,
)
from heddle_core.ids import EngineShape
from heddle_sim.known_models import known_config
from heddle_sim.model_config import model_shape
from heddle_sim.model_shape import ModelShape, Precision
from heddle_sim.profile_files import known_profiles, load_profile, read_layout

TABLES = {gpu: GPUS[gpu].file for gpu in ("a100", "h100", "h200", "l40s", "b200", "gb200")}
CLASSES = (*TABLES, "b300")
PROFILES = {
    "llama-3.1-70b": ("Llama-3.1-70B", CLASSES),
    "llama-3.1-70b-fp8": ("Llama-3.1-70B", CLASSES),
    "llama-3.1-70b-nvfp4": ("Llama-3.1-70B", CLASSES),
    "kimi-k2.5": ("Kimi-K2.5", CLASSES),
    "minimax-m2.5-nvfp4": ("MiniMax-M2.5-NVFP4", CLASSES),
    "qwen3-30b-a3b": ("Qwen3-30B-A3B", ("l40s", "b300")),
    "qwen3-235b-a22b": ("Qwen3-235B-A22B", ("b300",)),
    "gpt-oss-120b": ("gpt-oss-120b", ("l40s", "b300")),
}
"""Shipped profiles whose kernel times are in no table: by name, the model and the classes taken."""
PROFILE_CONTEXTS = (1024, 8192, 32768)
GROUP = ["model", "gpu", "precision", "tp", "moe_ep", "attention_dp"]
PARTS = ("attention_ms", "allreduce_ms", "moe_ms", "rest_ms")
"""Parts of a decode step that the tables state; the rest is what the others leave."""
MOST_RANKS, MOST_GPUS = 8, 8
"""Rows beyond are estimates between nodes that are not credible."""
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Iterations of the tables, and their operators as parallel arrays."""

    rows: pd.DataFrame
    keys: tuple[str, ...]
    row: NDArray[np.int64]
    part: NDArray[np.int64]
    key: NDArray[np.int64]
    gpu: NDArray[np.int64]
    count: Floats
    moved_s: Floats
    computed_s: Floats

    @property
    def arithmetic(self) -> NDArray[np.int64]:
        """Key whose share of peak arithmetic each key has in the mean: one for both phases.

        Memory decides nearly all decode steps of the tables. A share of its own would fit other
        things there, and be wrong on a class with less arithmetic for its bandwidth.
        """
        of = []
        for key in self.keys:
            phases = key.split()[0] in BY_PHASE
            prompts = f"{key.removesuffix(' prefill')} prefill" if phases else key
            of.append(self.keys.index(nearest_key(prompts, self.keys) or key))
        return np.array(of)

    @property
    def seconds(self) -> Floats:
        """Time of each iteration in the tables."""
        return np.asarray(self.rows["ms"].to_numpy(np.float64) / 1e3)

    @property
    def decodes(self) -> Mask:
        """Which iterations decode; the others are prompts alone."""
        return np.asarray(self.rows["decode"].to_numpy(np.bool_))


# -- tables ----------------------------------------------------------------------------------------


def read_rows(perf: Path) -> pd.DataFrame:
    """Read the rows of all classes that are credible and fit in memory.

    vLLM's, but FP8 of Qwen3 from SGLang: the source's times of vLLM's FP8 products in blocks are
    not credible on Blackwell, where DeepSeek-V3 is left out for that reason.
    """
    frames = []
    for gpu, file in TABLES.items():
        for stem in (f"aiconfigurator_{file}", f"aiconfigurator_moe_{file}"):
            if (perf / f"{stem}.csv").is_file():
                frames += [_decodes(perf / f"{stem}.csv", gpu)]
                frames += [_prompts(perf / f"{stem}_prefill.csv", gpu)]
    rows = pd.concat(frames, ignore_index=True)
    qwen_fp8 = rows["model"].str.endswith("-FP8")
    credible = (rows["backend"] == "vllm") | ((rows["backend"] == "sglang") & qwen_fp8)
    credible &= (rows["attention_dp"] <= MOST_RANKS) & (rows["tp"] <= MOST_GPUS)
    blocks = (rows["model"] == "DeepSeek-V3") & rows["gpu"].isin(["b200", "gb200"])
    credible &= ~blocks
    every = pd.concat([rows[credible], _profile_rows()], ignore_index=True)
    return every.sort_values([*GROUP, "decode"], kind="stable").reset_index(drop=True)


def _profile_rows() -> pd.DataFrame:
    """Decode steps of shipped profiles, without host time; profiles do not state their parts."""
    found = []
    for name, (model, classes) in PROFILES.items():
        for gpu in classes:
            if (name, gpu) not in known_profiles():
                continue
            profile = load_profile(name, gpu)
            for layout, entry in profile.tables.items():
                tp, dp, ep = read_layout(layout)
                if tp * dp > MOST_GPUS:
                    continue
                base = {
                    "model": model,
                    "gpu": gpu,
                    "backend": profile.source.backend,
                    "precision": profile.source.precision,
                    "tp": tp,
                    "moe_ep": ep,
                    "attention_dp": dp,
                    "kv_bytes_per_token": profile.kv_bytes_per_token,
                    "decode": True,
                }
                d = entry.decode
                found += [
                    {**base, "batch": b, "context": c, "ms": ms + us / 1e3 * c}
                    for b, ms, us in zip(d.batch, d.base_ms, d.context_us, strict=True)
                    for c in PROFILE_CONTEXTS
                    if b and b * c <= entry.kv_capacity_tokens
                ]
    return pd.DataFrame(found)


def _with_layout(frame: pd.DataFrame, gpu: str) -> pd.DataFrame:
    with_class = frame.assign(gpu=gpu)
    for column, value in (
        ("precision", "bfloat16"),
        ("moe_ep", 1),
        ("attention_dp", 1),
        ("moe_ms", 0.0),
    ):
        if column not in frame:
            with_class[column] = value
    return with_class


def _decodes(path: Path, gpu: str) -> pd.DataFrame:
    rows = _with_layout(pd.read_csv(path), gpu)
    rows = rows[rows["fits_kv"] == 1]
    rest = rows["TPOT_ms"] - rows[["attention_ms", "allreduce_ms", "moe_ms"]].sum(axis=1)
    return rows.assign(rest_ms=rest, ms=rows["TPOT_ms"], decode=True)


def _prompts(path: Path, gpu: str) -> pd.DataFrame:
    rows = _with_layout(pd.read_csv(path), gpu)
    return rows.assign(
        batch=rows["prompt_tokens"] - rows["prefix_cached_tokens"],
        context=rows["prefix_cached_tokens"],
        ms=rows["prefill_ms"],
        decode=False,
    )


def points(rows: pd.DataFrame) -> Points:
    """Count the operators of each row."""
    found: list[tuple[Any, ...]] = []
    keys: dict[str, int] = {}
    for _, group in rows.groupby([*GROUP, "decode"]):
        model, gpu, precision, tp, ep, dp, decode = group[[*GROUP, "decode"]].iloc[0].tolist()
        shape, card = table_shape(model, precision), GPU_CLASSES[gpu]
        stated = group["kv_bytes_per_token"].iloc[0]
        if stated == stated:  # of a profile; tables have none
            element = round(shape.kv_element_bytes * stated / shape.kv_bytes_per_token())
            shape = replace(shape, kv_element_bytes=element)
        layout = EngineShape(gpu, tp, ep=ep, dp=dp)
        batch, context = (group[c].to_numpy(np.float64) for c in ("batch", "context"))
        iterations = decode_iterations if decode else prefill_iterations
        for operator in operators(shape, layout, iterations(batch, context)):
            moved, computed = least_times(operator, card)
            same = np.ones(len(group))
            found.append(
                (
                    group.index.to_numpy(),
                    same * _part(operator, shape),
                    same * keys.setdefault(operator.key, len(keys)),
                    same * CLASSES.index(gpu),
                    same * operator.count,
                    moved * same,
                    computed * same,
                )
            )
    columns = map(np.concatenate, zip(*found, strict=True))
    row, part, key, gpu_index, count, moved_s, computed_s = columns
    return Points(
        rows=rows,
        keys=tuple(keys),
        row=row.astype(np.int64),
        part=part.astype(np.int64),
        key=key.astype(np.int64),
        gpu=gpu_index.astype(np.int64),
        count=count,
        moved_s=moved_s,
        computed_s=computed_s,
    )


def table_shape(model: str, precision: str) -> ModelShape:
    """Return a model of the tables; with FP8 weights their KV is FP8 too."""
    config = known_config(model)
    own = None if "quantization_config" in config else OVERRIDES.get(precision)
    shape = model_shape(config, place=model, name=model.lower(), precision=own)
    return replace(shape, kv_element_bytes=1) if precision.startswith("fp8") else shape


OVERRIDES: Mapping[str, Precision] = MappingProxyType({"fp8": "fp8", "nvfp4": "nvfp4"})


def _part(operator: Operator, shape: ModelShape) -> int:
    """Index in `PARTS`; the tables count all of latent attention, and experts that are shared."""
    latent = shape.attention is not None
    if operator.kind in ("attention", "latent-attention"):
        return 0
    if operator.kind in ("experts", "all-to-all"):
        return 2
    if operator.kind == "all-reduce":
        return 3 if latent else 2 if shape.experts is not None else 1
    if latent and operator.name in LATENT_BLOCK:
        return 0
    return 2 if latent and (operator.name == "router" or "shared" in operator.name) else 3


LATENT_BLOCK = (
    "query and KV in",
    "query",
    "key expansion",
    "value expansion",
    "norms and rotation of latents",
    "attention output",
)
