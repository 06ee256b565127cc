"""Profiles from a roofline: times of operators at the points of the tables, and the same fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from heddle_calibrate.fit.curves import table_entry
from heddle_calibrate.fit.from_aiconfigurator import BATCHES, CONTEXTS, HOST_OF, PROMPTS
from heddle_calibrate.fit.host import NO_HOST, HostFit
from heddle_calibrate.fit.kernel_profile import (
    MIGRATION_CODING_S,
    MIGRATION_MATH_S,
    migration_transfer,
    with_host,
)
from heddle_calibrate.fit.kernel_tables import (
    KernelTables,
    decode_errors,
    fit_decode,
    fit_estimate,
    fit_prefill,
    prefill_errors,
)
from heddle_calibrate.roofline.efficiency import Efficiency, seconds, shipped_efficiencies
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES, GpuClass
from heddle_calibrate.roofline.memory import kv_capacity_tokens, weights_read_bytes
from heddle_calibrate.roofline.model_shape import ModelShape
from heddle_calibrate.roofline.operators import (
    Iterations,
    LayoutError,
    decode_iterations,
    operators,
    prefill_iterations,
)
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, layout_name, load_profile
from heddle_sim.profile_parts import ProfileSource, Roofline, TpTable

NO_MEMORY = "its weights leave no memory for KV"


class RooflineError(ValueError):
    """A GPU class without a data sheet here, or a model that fits on none of the layouts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStatement:
    """Cross-validated error of decode steps: of a class with tables, else of classes left out."""

    left_out: str
    mean_pct: float
    median_pct: float
    p90_pct: float
    class_pct: float | None
    """Mean on the same class; None for a class without tables."""


def gpu_class(name: str) -> GpuClass:
    """Return a class by its name; RooflineError names those there are."""
    found = GPU_CLASSES.get(name.lower().removesuffix("_sxm"))
    if found is None:
        raise RooflineError(
            f"no data sheet of the GPU class {name!r}. Known: {', '.join(GPU_CLASSES)}; for "
            "another, measure an engine on it (heddle calibrate measure)"
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
    errors = fitted.errors[f"leave_one_{left_out}_out"]["decode"]
    return ErrorStatement(
        left_out=left_out,
        mean_pct=errors["mean_pct"],
        median_pct=errors["median_pct"],
        p90_pct=errors["p90_pct"],
        class_pct=errors["by_class_pct"].get(gpu) if left_out == "model" else None,
    )


def step_seconds(
    model: ModelShape, layout: EngineShape, gpu: GpuClass, work: Iterations
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Seconds of each operator in each iteration, without host time."""
    fitted = shipped_efficiencies().of(gpu.name)
    found: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
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
) -> Profile:
    """Make the profile of a model on a class, with host time and transfers carried over.

    Raises:
        RooflineError: no layout is possible; with the reason of each.
    """
    entries: dict[str, TpTable] = {}
    refused: dict[str, str] = {}
    for shape in shapes:
        try:
            entries[layout_name(shape)] = _entry(model, shape, gpu)
        except LayoutError as e:
            refused[layout_name(shape)] = str(e)
    if not entries:
        why = "; ".join(f"TP {name}: {text}" for name, text in refused.items())
        raise RooflineError(
            f"{model.name} on {gpu.name} runs with none of these layouts ({why}); try other TP "
            "degrees (--tp), a class with more memory (--gpu), or a narrower --precision"
        )
    kernels = Profile(
        schema="heddle.profile/1",
        model=model.name,
        gpu=gpu.name,
        source=_source(model, file),
        kv_bytes_per_token=model.kv_bytes_per_token(),
        roofline=Roofline(
            weights_read_bytes=weights_read_bytes(model),
            bandwidth_bytes_per_s=gpu.bandwidth,
            source=gpu.source,
        ),
        host=NO_HOST,
        transfer=migration_transfer(MIGRATION_CODING_S),
        belief_transfer=migration_transfer(MIGRATION_MATH_S),
        tables=entries,
        experts=model.experts.count if model.experts is not None else 0,
        expert_parallel=expert_parallel,
        attention_dp=shapes[0].dp,
        refused=refused,
    )
    reference = load_profile(*HOST_OF)
    host, measured = reference.host, reference.errors["measured"]
    carried = HostFit(
        per_step_s=host.per_step_s,
        per_running_s=host.per_running_s,
        per_prefill_s=host.per_prefill_s,
    )
    profile = with_host(kernels, carried, HostFit(**measured["belief_host"]), measured)
    roofline = {
        name: {phase: _without_models(errors[phase]) for phase in errors}
        for name, errors in shipped_efficiencies().errors.items()
    }
    return replace(profile, errors={**profile.errors, "roofline": roofline})


def _without_models(errors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in errors.items() if not isinstance(value, dict)}


def _source(model: ModelShape, file: str) -> ProfileSource:
    try:
        own = version("heddle")
    except PackageNotFoundError:
        own = "unknown"
    of = model.precisions
    widths = list(dict.fromkeys((of.experts if model.experts is not None else of.mlp, of.attention)))
    precision = "+".join("bfloat16" if name == "bf16" else name for name in widths)
    return ProfileSource(
        package="heddle roofline",
        version=own,
        backend="vllm",
        backend_version="0.24.0",
        licence="Apache-2.0",
        precision=precision,
        files=(file,) if file else (),
    )


def _entry(model: ModelShape, shape: EngineShape, gpu: GpuClass) -> TpTable:
    if shape.gpus > gpu.link_gpus:
        raise LayoutError(
            f"{shape.gpus} GPUs are more than the {gpu.link_gpus} of a {gpu.name} node; engines over "
            "several nodes are not modelled"
        )
    tables = _tables(model, shape, gpu)
    capacity = int(tables.capacity["kv_capacity_tokens"].iloc[0])
    if capacity <= 0:
        raise LayoutError(NO_MEMORY)
    decode = fit_decode(tables.decode)
    prefill = fit_prefill(tables, float(decode.base_s[0]), _idle_share())
    estimate = fit_estimate(tables)
    entry = table_entry(decode, prefill, estimate, capacity)
    errors = {**decode_errors(tables, decode, estimate), **prefill_errors(tables, decode, prefill)}
    return replace(entry, errors=errors)


def _idle_share() -> float:
    """Part of a one-sequence step that a prompt alone takes beside its tokens, of the profile with
    mixed steps."""
    tables = load_profile(*HOST_OF).tables.values()
    return median(entry.decode.base_ms[0] / entry.decode.base_ms[1] for entry in tables)


def _tables(model: ModelShape, shape: EngineShape, gpu: GpuClass) -> KernelTables:
    """Return the points that the tables of kernel times have, in their columns."""
    capacity = kv_capacity_tokens(model, shape, gpu)
    batch, context = (
        grid.ravel().astype(np.float64)
        for grid in np.meshgrid(np.array(BATCHES), np.array(CONTEXTS), indexing="ij")
    )
    prompt, cached = (np.array(column, np.float64) for column in zip(*PROMPTS, strict=True))
    decode = step_seconds(model, shape, gpu, decode_iterations(batch, context))
    prefill = step_seconds(model, shape, gpu, prefill_iterations(prompt - cached, cached))
    return KernelTables(
        decode=pd.DataFrame(
            {
                "batch": batch,
                "context": context,
                "TPOT_ms": np.sum(list(decode.values()), axis=0) * 1e3,
                "fits_kv": (batch * context <= capacity).astype(int),
            }
        ),
        prefill=pd.DataFrame(
            {
                "prompt_tokens": prompt,
                "prefix_cached_tokens": cached,
                "prefill_ms": np.sum(list(prefill.values()), axis=0) * 1e3,
            }
        ),
        mixed=pd.DataFrame(),
        capacity=pd.DataFrame({"kv_capacity_tokens": [capacity]}),
    )
