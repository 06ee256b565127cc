"""Precision of the KV: that of a profile, that of a repository, and a change of it."""

import re
from dataclasses import replace
from typing import Final

from heddle_calibrate.roofline.pairs import shape_of
from heddle_sim.model_shape import KvDtype
from heddle_sim.profile_files import Profile, ProfileError
from heddle_sim.profile_parts import TpTable

KV_BYTES: Final = {"fp8": 1, "bf16": 2}
KV_NAMES: Final = {size: name for name, size in KV_BYTES.items()}
WITHOUT_SCALES: Final = re.compile(r"(redhatai|neuralmagic)/(?!.*kv)|.*fp8[-_]dynamic", re.I)
"""Repositories by llm-compressor, whose schemes leave the KV in bf16: vLLM 0.11 printed 1,429,856
tokens for RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic on four H200, half of those with FP8 KV."""


def kv_dtype_of(profile: Profile) -> str:
    """Return ``bf16`` or ``fp8``; empty for a model of unknown shape."""
    shape = shape_of(profile)
    return "" if shape is None else KV_NAMES[shape.kv_element_bytes]


def with_kv_dtype(profile: Profile, dtype: KvDtype) -> Profile:
    """Return a profile with KV of this precision; capacity and the time of a token of context go
    with its bytes.

    Raises:
        ProfileError: the shape of its model is unknown.
    """
    if dtype == "auto":
        return profile
    shape = shape_of(profile)
    if shape is None:
        raise ProfileError(
            f"the shape of {profile.model} is unknown, so that its KV cannot change to {dtype}: "
            "leave cluster.kv_dtype out, or make the profile with profile.kv_precision"
        )
    notes = [part for part in profile.source.note.split("; ") if not part.startswith("KV ")]
    source = replace(profile.source, note="; ".join(notes))
    if shape.kv_element_bytes == KV_BYTES[dtype]:
        return replace(profile, source=source)
    wanted = replace(shape, kv_element_bytes=KV_BYTES[dtype]).kv_bytes_per_token()
    ratio = wanted / shape.kv_bytes_per_token()
    return replace(
        profile,
        kv_bytes_per_token=wanted,
        tables={name: _scaled(entry, ratio) for name, entry in profile.tables.items()},
        source=source.noted(
            f"KV in {dtype}: capacity and times of context are the tables' by its bytes"
        ),
    )


def _scaled(entry: TpTable, ratio: float) -> TpTable:
    estimate, filling = entry.belief, entry.belief.filling
    return replace(
        entry,
        kv_capacity_tokens=int(entry.kv_capacity_tokens / ratio),
        decode=replace(
            entry.decode, context_us=tuple(ratio * each for each in entry.decode.context_us)
        ),
        belief=replace(
            estimate,
            kv_capacity_tokens=int(estimate.kv_capacity_tokens / ratio),
            t2_s=ratio * estimate.t2_s,
            filling=filling and replace(filling, t2_s=ratio * filling.t2_s),
        ),
    )
