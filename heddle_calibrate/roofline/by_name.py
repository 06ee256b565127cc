"""The profile of a model by any name of it: the shipped one, else a roofline's of its shape."""

import difflib
import re
from dataclasses import replace
from functools import cache

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES, REFUSED_CLASSES
from heddle_calibrate.roofline.kv_precision import WITHOUT_SCALES, kv_dtype_of, with_kv_dtype
from heddle_calibrate.roofline.memory import blocks_fault
from heddle_calibrate.roofline.pairs import shape_of
from heddle_core.ids import EngineShape
from heddle_sim.known_models import listed_config
from heddle_sim.model_config import MEASURE, REFUSED
from heddle_sim.model_names import from_config_command, known_model, listed_models, nearest_ids
from heddle_sim.profile_files import Profile, ProfileError, known_profiles, load_profile
from heddle_sim.profile_parts import read_layout

_SCALED_KV = re.compile(r"[^/]*$|nvidia/|.*[-_]kv", re.I)
"""Names of profiles, and repositories that have scales of KV."""


def profile_by_name(model: str, gpu: str = "") -> Profile:
    """Load the shipped profile of a model on a GPU class, or make the roofline's.

    The roofline's is of a model whose shape `models.json` of heddle_sim has, where no shipped
    profile has its precision and class; `source.note` says so, and where scales or KV of the
    repository are others than those of a shipped profile. `model` may be a profile file.

    Raises:
        ProfileError: there is neither; with the nearest ids.
    """
    if model.endswith(".json"):
        return load_profile(model)
    gpu = "-".join(gpu.lower().split())
    try:
        return _with_differences(_as_repository(load_profile(model, gpu), model), model)
    except ProfileError as error:
        known = known_model(model) is not None
        if known and gpu in (*GPU_CLASSES, *REFUSED_CLASSES):
            return _with_differences(_roofline(model, gpu), model)
        if why := _unknown_class(gpu) if known else _unknown_shape(model, gpu):
            raise ProfileError(f"{model}: {why}") from None
        near = [] if known else nearest_ids(model)
        hint = f"; ids of repositories like it: {', '.join(near)}" if near else ""
        raise ProfileError(f"{error}{hint}") from None


def _unknown_class(gpu: str) -> str:
    near = [name for name in GPU_CLASSES if gpu.startswith(name)]
    near = near or difflib.get_close_matches(gpu, GPU_CLASSES, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    named = f"unknown GPU {gpu!r}{hint} Known" if gpu else "name a GPU class after the model"
    return f"{named}: {', '.join(GPU_CLASSES)}; for another, {MEASURE}"


def _unknown_shape(model: str, gpu: str) -> str:
    """Say what is missing of a listed repository; empty for another."""
    if model.lower() not in (each.lower() for each in listed_models()["ids"]):
        return ""
    letters = re.sub(r"[^a-z0-9]", "", model.lower().rpartition("/")[2])
    refused = (why for each, why in REFUSED.items() if letters.startswith(each.lower()))
    if why := next(refused, ""):
        return f"it has {why}, which is not modelled; {MEASURE}"
    return (
        "its config.json is not shipped: download it from the model's page, and "
        f"{from_config_command('CONFIG.json', gpu)}"
    )


def _as_repository(profile: Profile, model: str) -> Profile:
    """Return a shipped profile with the KV of a repository; its note names what else differs."""
    without = WITHOUT_SCALES.match(model)
    profile = with_kv_dtype(_with_reasons(profile), "bf16" if without else "auto")
    source = profile.source
    if kv_dtype_of(profile) == "fp8" and not _SCALED_KV.match(model):
        source = source.noted(
            "KV is taken in fp8, as NVIDIA's repositories have it: set cluster.kv_dtype = bf16 "
            "where config.json has no kv_cache_scheme"
        )
    scales = re.search(r"(^nvidia/.*)fp8$|fp8[-_](static|per-?tensor|dynamic)", model.lower())
    if scales is not None:
        in_blocks = "weight_block_size" in str(listed_config(profile.model))
        has = "blocks of 128" if in_blocks else "a tensor"
        theirs = "channels and tokens" if scales[2] == "dynamic" else "a tensor"
        if has != theirs:
            source = source.noted(
                f"kernel times are of FP8 with scales of {has}, and not of {theirs}"
            )
    return replace(profile, source=source)


def _with_differences(profile: Profile, model: str) -> Profile:
    """Say what a quantised repository has beside its weights that these times do not."""
    source, gpu = profile.source, GPU_CLASSES.get(profile.gpu)
    if re.search("fp4-?a16", model, re.I) and gpu is not None and gpu.fp4:
        source = source.noted(
            "activations of the repository have 16 bits: prompts take longer than these, which are "
            "multiplied in FP4 or FP8"
        )
    unscaled = kv_dtype_of(profile) == "bf16" and "KV in" not in source.note
    if model.lower().startswith("nvidia/") and source.precision != "bfloat16" and unscaled:
        source = source.noted(
            "KV is taken in bf16: set cluster.kv_dtype = fp8 where hf_quant_config.json has "
            "kv_cache_quant_algo, as NVIDIA's repositories mostly do"
        )
    return replace(profile, source=source)


def _with_reasons(profile: Profile) -> Profile:
    """Say of experts in FP8 that cannot be cut why that is: they have scales for blocks of 128."""
    shape = shape_of(profile) if profile.experts and profile.source.precision == "fp8" else None
    if shape is None:
        return profile
    refused = dict(profile.refused)
    for name in refused:
        tp, dp, ep = read_layout(name)
        layout = EngineShape(profile.gpu, tp, dp=dp, ep=ep)
        refused[name] = blocks_fault(shape, layout) or refused[name]
    return replace(profile, refused=refused)


@cache
def _roofline(model: str, gpu: str) -> Profile:
    # Only here, because it takes a second to import.
    from heddle_calibrate.roofline.from_config import ConfigRequest, profile_from_config
    from heddle_calibrate.roofline.profile import RooflineError
    from heddle_sim.config_fields import ModelConfigError

    known = known_model(model)
    assert known is not None
    classes = [each for name, each in known_profiles() if name == known.profile]
    shipped = f", but on {', '.join(classes)}" if classes else ""
    none = f"no shipped profile of {known.shape} in {known.precision} on {gpu}{shipped}"
    scaled = bool(_SCALED_KV.match(model)) and not WITHOUT_SCALES.match(model)
    kv = {kv_dtype_of(load_profile(known.profile, each)) for each in classes if scaled}
    request = ConfigRequest(model=model, gpu=gpu, source="roofline", fp8_kv="fp8" in kv)
    try:
        made = profile_from_config(request)
    except (ModelConfigError, RooflineError) as error:
        raise ProfileError(f"{model}: {none}, and no roofline: {error}") from None
    note = "; ".join([f"{none}: made of its shape by the roofline", *made.shape.notes])
    return replace(made.profile, source=replace(made.profile.source, note=note))
