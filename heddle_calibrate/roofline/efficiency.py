"""Time of operators: data sheets, and efficiencies that were fitted on tables of kernel times."""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from heddle_calibrate.roofline.gpu_classes import GpuClass
from heddle_calibrate.roofline.operators import Floats, Operator

FILE = Path(__file__).with_name("efficiencies.json")
FP8_ARITHMETIC = ("fp8", "nvfp4")
"""Precisions of weights that are multiplied in FP8 or narrower; the others in bf16."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a kernel reaches of the data sheet."""

    launch_us: float
    """Fixed time of an execution."""
    bandwidth: float
    """Share of the peak, of memory or of links."""
    arithmetic: float
    """Share of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Fitted efficiencies by class and by `Operator.key`, and their errors."""

    classes: Mapping[str, Mapping[str, Efficiency]]
    mean: Mapping[str, Efficiency]
    """Fitted on all classes together; for those without tables."""
    errors: Mapping[str, Any]
    source: Mapping[str, Any]

    def of(self, gpu: str) -> Mapping[str, Efficiency]:
        """Return those of a class, or the mean."""
        return self.classes.get(gpu, self.mean)


@cache
def shipped_efficiencies() -> Efficiencies:
    """Read the file that `roofline.fit` makes."""
    values = json.loads(FILE.read_text(encoding="utf-8"))

    def each(rows: Mapping[str, Sequence[float]]) -> dict[str, Efficiency]:
        return {key: Efficiency(*row) for key, row in rows.items()}

    return Efficiencies(
        classes={gpu: each(rows) for gpu, rows in values["classes"].items()},
        mean=each(values["mean"]),
        errors=values["errors"],
        source=values["source"],
    )


def parent(key: str) -> str | None:
    """Name the efficiency that stands in where a key has none, and that a fit keeps it near."""
    kind, _, rest = key.partition(" ")
    precision = rest.removesuffix("prefill").strip()
    match kind, precision:
        case "latent-attention", _:
            return "attention"
        case "experts", "mxfp4":  # 4-bit weights that are widened before a product in bf16
            return key.replace("mxfp4", "int4")
        case (("gemm" | "experts"), "nvfp4"):
            return key.replace("nvfp4", "fp8")
        case (("gemm" | "experts"), ("fp8" | "mxfp4" | "int4")):
            return key.replace(precision, "bf16")
    return key.removesuffix(" prefill") if key.endswith(" prefill") else None


def efficiency(key: str, fitted: Mapping[str, Efficiency]) -> Efficiency:
    """Return the efficiency of a key, or its nearest parent's."""
    return fitted[nearest_key(key, fitted) or key]


def nearest_key(key: str, known: Container[str]) -> str | None:
    """Return the key, or the first of its parents, that is known."""
    found: str | None = key
    while found is not None and found not in known:
        found = parent(found)
    return found


def least_times(operator: Operator, gpu: GpuClass) -> tuple[Floats, Floats]:
    """Seconds of one execution at peak bandwidth, and at peak arithmetic."""
    if operator.kind in ("all-reduce", "all-to-all"):
        shared = operator.gpus if operator.gpus > 2 and not gpu.nvlink else 1
        moved = operator.bytes * (shared / gpu.link)
    else:
        moved = operator.bytes / gpu.bandwidth
    peak = gpu.fp8_flops if operator.precision in FP8_ARITHMETIC else gpu.bf16_flops
    return moved, operator.flops / peak


def seconds(operator: Operator, gpu: GpuClass, fitted: Mapping[str, Efficiency]) -> Floats:
    """Time of all executions of an operator in an iteration.

    The larger of both times decides; where they are alike, neither hides the other wholly.
    """
    if operator.precision == "nvfp4" and not gpu.fp4:
        operator = replace(operator, precision="int4")
    e = efficiency(operator.key, fitted)
    moved, computed = least_times(operator, gpu)
    each = e.launch_us / 1e6 + np.hypot(moved / e.bandwidth, computed / e.arithmetic)
    return np.asarray(operator.count * each)
