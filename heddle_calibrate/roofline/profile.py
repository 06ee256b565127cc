"""Profiles from a roofline: times of operators at the points of the tables, and the same fit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
import pandas as pd

from heddle_calibrate.fit.from_aiconfigurator import HOST_OF, with_carried_host
from heddle_calibrate.fit.kernel_profile import ModelSpec, fit_kernels
from heddle_calibrate.fit.kernel_tables import KernelTables
from heddle_calibrate.fit.package_tables import BATCHES, CONTEXTS, PROMPTS
from heddle_calibrate.roofline.efficiency import seconds, shipped_efficiencies
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES, REFUSED_CLASSES, GpuClass
from heddle_calibrate.roofline.memory import (
    blocks_fault,
    kv_capacity_tokens,
    weight_bytes_per_gpu,
    weights_read_bytes,
)
from heddle_calibrate.roofline.operators import (
    Floats,
    Iterations,
    LayoutError,
    check_layout,
    decode_iterations,
    operators,
    prefill_iterations,
)
from heddle_calibrate.roofline.pairs import least_pairs_s
from heddle_compiled import installed_version
from heddle_core.ids import EngineShape
from heddle_sim.model_shape import ModelShape
from heddle_sim.profile_files import Profile, layout_name, load_profile
from heddle_sim.profile_parts import HostFit, ProfileSource

DERIVED = (
    "a roofline of each operator by the data sheet of the class, with efficiencies fitted on "
    "kernel times of other models"
)


EXPERTS_HOST = HostFit(per_step_s=0.8e-3, per_running_s=15e-6, per_prefill_s=1.5e-3)
"""Of models with experts."""
EXPERTS_RUNS = (
    "577 published runs of gpt-oss-120b, MiniMax-M2.5, Kimi-K2.5 and Qwen3-235B-A22B with vLLM; on "
    "592, these among them, TPOT of a layout is 12 % off in the median, of one in ten over 27 %"
)
LATENT, HOPPER_FP8 = (0.75, 1.0), (1.25, 1.3)
"""Measured over roofline times of decoding and of prompts, by the same runs: latent attention, and
experts in FP8 on Hopper."""
HOPPER_4BIT_PROMPTS = 1.8
"""The same of prompts with experts of 4 bits on Hopper, which widens them before a product.
With the model left out, TTFT of gpt-oss-120b and Kimi-K2.5 is 9 and 18 % off instead of 34 and 40.
One factor of all experts does not pay: TTFT 33 % instead of 32, TPOT 14 instead of 12."""
HOPPER = ("h100", "h200", "h800", "h20")


class RooflineError(ValueError):
    """A GPU class without a data sheet here, or a model that fits on none of the layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatement:
    """Cross-validated errors: of models left out on a class with tables, else of classes left
    out."""

    left_out: str
    mean_pct: float
    median_pct: float
    p90_pct: float
    class_pct: float | None
    """Mean on the same class; None for a class without tables."""
    prompt_mean_pct: float
    """Of prompts alone, as the next two; those above are of decode steps."""
    prompt_median_pct: float
    prompt_p90_pct: float


def gpu_class(name: str) -> GpuClass:
    """Return a class by its name; RooflineError names those there are."""
    found = GPU_CLASSES.get(name.lower().removesuffix("_sxm"))
    if why := REFUSED_CLASSES.get(name.lower()):
        raise RooflineError(f"{name} is not modelled: {why}; measure it (heddle profile measure)")
    if found is None:
        raise RooflineError(
            f"no data sheet of the GPU class {name!r}. Known: {', '.join(GPU_CLASSES)}; for "
            "another, measure an engine on it (heddle profile measure)"
        )
    return found


def layouts(
    model: ModelShape, gpu: str, tps: Sequence[int], *, attention_dp: int = 1
) -> list[EngineShape]:
    """List the layouts of these TP degrees: experts cut and, where there are several GPUs and
    experts, spread too."""
    found = []
    for tp in tps:
        found.append(EngineShape(gpu, tp, dp=attention_dp))
        if model.experts is not None and tp * attention_dp > 1:
            found.append(EngineShape(gpu, tp, ep=tp * attention_dp, dp=attention_dp))
    return found


def error_statement(gpu: str) -> ErrorStatement:
    """State the error to expect of a model that the efficiencies were not fitted on."""
    fitted = shipped_efficiencies()
    left_out = "model" if gpu in fitted.classes else "class"
    both = fitted.errors[f"leave_one_{left_out}_out"]
    errors, prompts = both["decode"], both["prefill"]
    return ErrorStatement(
        left_out=left_out,
        mean_pct=errors["mean_pct"],
        median_pct=errors["median_pct"],
        p90_pct=errors["p90_pct"],
        class_pct=errors["by_class_pct"].get(gpu) if left_out == "model" else None,
        prompt_mean_pct=prompts["mean_pct"],
        prompt_median_pct=prompts["median_pct"],
        prompt_p90_pct=prompts["p90_pct"],
    )


def step_seconds(
    model: ModelShape, layout: EngineShape, gpu: GpuClass, work: Iterations
) -> dict[str, Floats]:
    """Seconds of each operator in each iteration, without host time."""
    fitted = shipped_efficiencies().of(gpu.name)
    found: dict[str, Floats] = {}
    for operator in operators(model, layout, work):
        time_s = seconds(operator, gpu, fitted)
        found[operator.name] = found[operator.name] + time_s if operator.name in found else time_s
    return found


def profile_from_shape(
    model: ModelShape,
    gpu: GpuClass,
    shapes: Sequence[EngineShape],
    *,
    expert_parallel: bool = False,
    file: str = "",
    factors: tuple[float, float] | None = None,
) -> Profile:
    """Make the profile of a model on a class, with host time and transfers carried over.
    `factors` are on times of decoding and of prompts; None: `measured_factors`.

    Raises:
        RooflineError: no layout is possible; with the reason of each.
    """
    refused = {}
    tables = []
    for shape in shapes:
        why = impossible(model, shape, gpu)
        if why:
            refused[layout_name(shape)] = why
        else:
            tables.append(_tables(model, shape, gpu, factors or measured_factors(model, gpu.name)))
    if not tables:
        reasons = "; ".join(f"TP {name}: {why}" for name, why in refused.items())
        raise RooflineError(
            f"{model.name} on {gpu.name} runs with none of these layouts ({reasons}). Try other TP "
            "degrees (--tp), a class with more memory (--gpu), or a narrower profile.precision"
        )
    fitted = fit_kernels(
        _joined(tables),
        (model.name, gpu.name),
        _spec(model),
        gpu,
        version="",
        share=_idle_share(),
        files=(),
        derived=DERIVED,
        layouts=[name for shape in shapes if (name := layout_name(shape)) not in refused],
        least_pair_s=least_pairs_s(model, shapes, gpu),
    )
    profile = with_carried_host(
        replace(
            fitted,
            source=_source(model, file),
            kv_bytes_per_token=model.kv_bytes_per_token(),
            expert_parallel=expert_parallel,
            attention_dp=shapes[0].dp,
            refused={**refused, **fitted.refused},
        ),
        EXPERTS_HOST if model.experts is not None else None,
    )
    if model.experts is not None:
        profile = replace(profile, host=replace(profile.host, measured_on=EXPERTS_RUNS))
    none = {"runs": 0, "note": "kernel times are a roofline's: compared with no measured runs"}
    roofline = {"expected": asdict(error_statement(gpu.name)), **shipped_efficiencies().errors}
    return replace(profile, errors={"measured": none, "roofline": roofline})


def measured_factors(model: ModelShape, gpu: str) -> tuple[float, float]:
    """Return measured over roofline times of decoding and of prompts for a kind of model."""
    if model.experts is None:
        return 1.0, 1.0
    width, hopper = model.precisions.experts, gpu in HOPPER
    decode, prompts = LATENT if model.attention is not None else (1.0, 1.0)
    if hopper and width in ("mxfp4", "int4", "nvfp4"):
        return decode, HOPPER_4BIT_PROMPTS
    return HOPPER_FP8 if hopper and width == "fp8" and decode == 1.0 else (decode, prompts)


def impossible(model: ModelShape, shape: EngineShape, gpu: GpuClass) -> str:
    """Say why a model does not run with a layout on a class; empty where it does."""
    try:
        check_layout(model, shape)
    except LayoutError as e:
        return str(e)
    if why := blocks_fault(model, shape):
        return why
    if shape.gpus > gpu.link_gpus:
        return (
            f"{shape.gpus} GPUs are more than the {gpu.link_gpus} that {gpu.name} links in a node; "
            "engines over several nodes are not modelled"
        )
    if kv_capacity_tokens(model, shape, gpu) <= 0:
        gigabytes = weight_bytes_per_gpu(model, shape) / 1e9
        return (
            f"its weights, {gigabytes:.1f} GB on each GPU of {gpu.memory / 1e9:.1f} GB, leave no "
            "memory for KV"
        )
    return ""


def _spec(model: ModelShape) -> ModelSpec:
    return ModelSpec(
        table=model.name,
        vocabulary=model.vocabulary,
        hidden=model.hidden,
        kv_heads=1 if model.attention is not None else model.kv_heads,
        experts=model.experts.count if model.experts is not None else 0,
        active_bytes=weights_read_bytes(model),
        precision=_precision(model),
    )


def _precision(model: ModelShape) -> str:
    of = model.precisions
    widths = (of.experts if model.experts is not None else of.mlp, of.attention)
    return "+".join("bfloat16" if name == "bf16" else name for name in dict.fromkeys(widths))


def _source(model: ModelShape, file: str) -> ProfileSource:
    return ProfileSource(
        package="heddle roofline",
        version=installed_version(),
        backend="vllm",
        backend_version="0.24.0",
        licence="Apache-2.0",
        precision=_precision(model),
        files=(file,) if file else (),
        note="; ".join(model.notes),
    )


def _idle_share() -> float:
    """Part of a one-sequence step that a prompt alone takes beside its tokens; of the shipped
    profile whose source has mixed steps."""
    tables = load_profile(*HOST_OF).tables.values()
    return median(entry.decode.base_ms[0] / entry.decode.base_ms[1] for entry in tables)


def _joined(tables: Sequence[KernelTables]) -> KernelTables:
    return KernelTables(
        decode=pd.concat([t.decode for t in tables]),
        prefill=pd.concat([t.prefill for t in tables]),
        mixed=pd.DataFrame(),
        capacity=pd.concat([t.capacity for t in tables]),
    )


def _tables(
    model: ModelShape, shape: EngineShape, gpu: GpuClass, factors: tuple[float, float]
) -> KernelTables:
    """Return the points that the tables of kernel times have, in their columns."""
    capacity = kv_capacity_tokens(model, shape, gpu)
    mine = {"model": model.name, "layout": layout_name(shape), "tp": shape.tp}
    batch, context = (
        grid.ravel().astype(np.float64)
        for grid in np.meshgrid(np.array(BATCHES), np.array(CONTEXTS), indexing="ij")
    )
    prompt, cached = (np.array(column, np.float64) for column in zip(*PROMPTS, strict=True))
    decode = step_seconds(model, shape, gpu, decode_iterations(batch, context))
    prefill = step_seconds(model, shape, gpu, prefill_iterations(prompt - cached, cached))
    decoded = {
        "batch": batch,
        "context": context,
        "TPOT_ms": np.sum(list(decode.values()), axis=0) * 1e3 * factors[0],
        "fits_kv": (batch * context <= capacity).astype(int),
    }
    prompts = {
        "prompt_tokens": prompt,
        "prefix_cached_tokens": cached,
        "prefill_ms": np.sum(list(prefill.values()), axis=0) * 1e3 * factors[1],
    }
    memory = {
        "backend_version": "0.24.0",
        "kv_capacity_tokens": capacity,
        "kv_bytes_per_token_per_gpu": model.kv_bytes_per_token(shape.tp),
        "mem_weights_bytes": int(weight_bytes_per_gpu(model, shape)),
    }
    return KernelTables(
        decode=pd.DataFrame({**decoded, **{name: [x] * len(batch) for name, x in mine.items()}}),
        prefill=pd.DataFrame({**prompts, **{name: [x] * len(prompt) for name, x in mine.items()}}),
        mixed=pd.DataFrame(),
        capacity=pd.DataFrame([{**mine, **memory}]),
    )
