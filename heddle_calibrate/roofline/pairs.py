"""The least time of attention's (query, key) pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from heddle_calibrate.roofline.gpu_classes import GpuClass
from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.operators import (
    LayoutError,
    Operator,
    operators,
    prefill_iterations,
)
from heddle_core.ids import EngineShape
from heddle_sim.config_fields import ModelConfigError
from heddle_sim.model_shape import ModelShape
from heddle_sim.profile_files import Profile, layout_name

PROMPT, PREFIX = 512.0, 32_256.0
"""Tokens whose pairs with a prefix are counted."""


def least_pair_s(model: ModelShape, layout: EngineShape, gpu: GpuClass) -> float:
    """Seconds of one more (query, key) pair at the peak arithmetic of a GPU, over all layers.

    Attention multiplies in FP8 where KV has one byte, and in bfloat16 otherwise. Layers with a
    sliding window do not count. Raises LayoutError where the model cannot be cut so.
    """
    tokens, cached = np.array([PROMPT, PROMPT]), np.array([0.0, PREFIX])
    found = operators(model, layout, prefill_iterations(tokens, cached))
    near, far = sum((_flops(operator) for operator in found), np.zeros(2))
    peak = gpu.fp8_flops if model.kv_element_bytes == 1 else gpu.bf16_flops
    return float((far - near) / (PROMPT * PREFIX) / peak)


def _flops(operator: Operator) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    full = operator.name == "attention"
    return operator.count * operator.flops if full else np.zeros(2)


def least_pairs_s(
    model: ModelShape, layouts: Sequence[EngineShape], gpu: GpuClass | None
) -> Mapping[str, float]:
    """Return `least_pair_s` by the names of layouts; without those that the model cannot be cut in,
    and none for a class without a data sheet."""
    found = {}
    for layout in layouts if gpu is not None else ():
        assert gpu is not None
        try:
            found[layout_name(layout)] = least_pair_s(model, layout, gpu)
        except LayoutError:
            continue
    return found


def shape_of(profile: Profile) -> ModelShape | None:
    """Return the shape of a profile's model with the precision of its KV; None if it is unknown."""
    try:
        model, _ = find_model(profile.model)
    except ModelConfigError:
        return None
    return with_kv_of(model, profile.kv_bytes_per_token, 1)


def with_kv_of(model: ModelShape, bytes_per_token: float, tp: int) -> ModelShape:
    """Return the model with the precision of KV that these bytes of a token on a GPU come to."""
    elements = model.kv_bytes_per_token(tp) / model.kv_element_bytes
    return replace(model, kv_element_bytes=1 if bytes_per_token < 1.5 * elements else 2)
