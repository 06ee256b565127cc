"""A profile of any model: kernel times of AIConfigurator where it has them, else the roofline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heddle_calibrate.fit.from_aiconfigurator import EstimatorError, KernelSource, fit_shapes
from heddle_calibrate.roofline.draft_heads import mtp_head, read_eagle3_head
from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.profile import (
    RooflineError,
    gpu_class,
    layouts,
    profile_from_shape,
)
from heddle_core.ids import EngineShape
from heddle_sim.config_fields import ModelConfigError
from heddle_sim.model_shape import ModelShape, Precision
from heddle_sim.profile_files import Profile
from heddle_sim.profile_parts import DraftHead

Source = Literal["auto", "aiconfigurator", "roofline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """What a profile is wanted of."""

    model: str
    """A config.json, its folder, or a Hugging Face id."""
    gpu: str
    tps: Sequence[int] = (1, 2, 4, 8)
    expert_parallel: bool = False
    attention_dp: int = 1
    precision: Precision | None = None
    """Of the linear layers; None: that of the configuration."""
    fp8_kv: bool = False
    name: str | None = None
    head: str | None = None
    """Of an EAGLE-3 head: its config.json, folder or Hugging Face id."""
    source: Source = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigProfile:
    profile: Profile
    shape: ModelShape
    layouts: tuple[EngineShape, ...]
    source: Literal["aiconfigurator", "roofline"]
    why: str = ""
    """Why the source is the roofline, where AIConfigurator comes first."""


def profile_from_config(request: ConfigRequest) -> ConfigProfile:
    """Make the profile of a model from its configuration.

    Raises:
        ModelConfigError: the configuration is not found, not readable or not modelled.
        RooflineError: the class is unknown, or the model runs with none of the layouts.
        EstimatorError: with ``source="aiconfigurator"``, the package is missing or has no times.
    """
    request = replace(request, gpu="-".join(request.gpu.lower().split()))
    shape, file = find_model(request.model, precision=request.precision)
    shape = replace(
        shape,
        name=request.name or shape.name,
        kv_element_bytes=1 if request.fp8_kv else shape.kv_element_bytes,
    )
    _check_name(shape.name)
    _check_ranks(shape, request)
    shapes = layouts(shape, request.gpu, request.tps, attention_dp=request.attention_dp)
    why = ""
    heads = _heads(shape, request.head)
    if request.source != "roofline":
        try:
            profile = replace(_measured_kernels(request, shape, shapes), heads=heads)
            return ConfigProfile(
                profile=profile, shape=shape, layouts=tuple(shapes), source="aiconfigurator"
            )
        except EstimatorError as e:
            if request.source == "aiconfigurator":
                raise
            why = str(e)
    gpu = gpu_class(request.gpu)
    profile = profile_from_shape(
        shape,
        gpu,
        shapes,
        expert_parallel=request.expert_parallel,
        file=file.name if file is not None else "",
    )
    if not profile.tps:
        wanted = "with" if request.expert_parallel else "without"
        reasons = "; ".join(f"TP {name}: {text}" for name, text in profile.refused.items())
        raise RooflineError(
            f"{shape.name} on {gpu.name} does not run {wanted} expert_parallel ({reasons}); it "
            f"runs with the layouts {', '.join(profile.tables)}"
        )
    return ConfigProfile(
        profile=replace(profile, heads=heads),
        shape=shape,
        layouts=tuple(shapes),
        source="roofline",
        why=why,
    )


def _heads(shape: ModelShape, head: str | None) -> dict[str, DraftHead]:
    heads = {"mtp": mtp_head(shape)} if shape.mtp_layers else {}
    if head is not None:
        heads["eagle3"] = read_eagle3_head(head, shape)
    return heads


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ModelConfigError(
            f"the model's name {name!r} is not UTF-8 text: give it another one, as profile.name"
        ) from None


def _check_ranks(shape: ModelShape, request: ConfigRequest) -> None:
    if shape.experts is None and (request.expert_parallel or request.attention_dp > 1):
        raise RooflineError(
            f"{shape.name} is a dense model: leave expert_parallel and attention_dp out, and run "
            "more engines instead"
        )


def _measured_kernels(
    request: ConfigRequest, shape: ModelShape, shapes: Sequence[EngineShape]
) -> Profile:
    if request.precision is not None or request.fp8_kv:
        raise EstimatorError(
            "kernel times are queried at the configuration's own precision: leave "
            "profile.precision and profile.kv_precision out for them"
        )
    model = request.model.removesuffix("/config.json")
    profile = fit_shapes(model, request.gpu, shapes, KernelSource(), name=shape.name)
    found = replace(
        profile, expert_parallel=request.expert_parallel, attention_dp=request.attention_dp
    )
    if not found.tps:
        raise EstimatorError(
            f"{shape.name} on {request.gpu}: the package has times of the layouts "
            f"{', '.join(profile.tables)} alone"
        )
    return found
