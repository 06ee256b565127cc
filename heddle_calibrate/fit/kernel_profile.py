"""A profile from kernel times: a fit of every TP degree, then the host time that tables lack.

Used for all sources of kernel times: published tables, AIConfigurator's package, the roofline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from heddle_calibrate.fit.curves import table_entry, with_times
from heddle_calibrate.fit.kernel_tables import (
    KernelTables,
    decode_errors,
    fit_decode,
    fit_estimate,
    fit_prefill,
    prefill_errors,
)
from heddle_calibrate.roofline.gpu_classes import GpuClass
from heddle_sim.profile_files import Profile
from heddle_sim.profile_parts import Host, HostFit, ProfileSource, Roofline, TpTable, Transfer

TPS = (1, 2, 4, 8)
MEASURED_ON = (
    "Qwen3-32B on H100 SXM, vLLM 0.12.0, TP 2 and 4, precision unlabelled (bf16 assumed), "
    "client time included"
)
NO_MEMORY = "its weights leave no memory for KV (capacity 0 tokens)"
NO_ROWS = "the source has no kernel times for this layout"
NO_HOST = Host(
    per_step_s=0.0, per_running_s=0.0, per_prefill_s=0.0, measured_on="", carried_over=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTables:
    """Where the kernel times of a GPU class are; `GPU_CLASSES` has its data sheet."""

    file: str
    """Its name in the tables."""
    derived: str = ""
    """How the tables of the class were computed from another's; empty where its kernels were
    measured."""
    table: str = ""
    """What the names of its CSV files begin with, where that is not ``aiconfigurator_<file>``."""
    base: str = ""
    """The class that it was computed from."""
    link_factor: float = 1.0
    """Time of an all-reduce over that of `base`."""


GPUS = {
    "h100": GpuTables(file="h100_sxm"),
    "h200": GpuTables(file="h200_sxm"),
    "a100": GpuTables(file="a100_sxm"),
    "l40s": GpuTables(file="l40s"),
    "b200": GpuTables(file="b200_sxm"),
    "b300": GpuTables(file="b300_sxm"),
    "gb200": GpuTables(file="gb200"),
    "h800": GpuTables(
        file="h100_sxm",
        derived=(
            "the kernel times of H100, with every all-reduce 2.25 times as long: "
            "NVLink of 400 instead of 900 GB/s"
        ),
        base="h100",
        link_factor=900 / 400,
    ),
    "h20": GpuTables(
        file="h20_derived",
        derived=(
            "the kernel times of H200, each times its roofline time on H20 over that on H200: 148 "
            "instead of 989 bf16 TFLOP/s, 4.0 instead of 4.8 TB/s, 95.1 GiB"
        ),
        base="h200",
        table="derived_h20",
    ),
}
"""H800 and H20 have no tables of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model: name in the tables, and what its configuration states."""

    table: str
    vocabulary: int
    hidden: int
    kv_heads: int
    """KV heads of a layer; 1 where all heads share one latent vector (MLA)."""
    experts: int = 0
    """Routed experts of a layer; 0: dense."""
    active_bytes: int = 0
    """Weight bytes that one token reads of a model with experts."""
    precision: str = "bfloat16"
    kv_share: float = 1.0
    """Share of the layers that hold the KV of all tokens; the others attend to a short window."""


KV_BYTES = (147_456, 163_840, 262_144)
MIGRATION_CODING_S = (0.26, 0.27, 0.35)
MIGRATION_MATH_S = (0.24, 0.25, 0.33)
"""Heddle paper (arXiv 2603.28101v1), table 1: seconds per migration for Qwen3-8B, 14B and 32B."""
TRANSFER_BYTES_PER_S = 25e9
"""Half of a 400 Gb/s link. Table 1 gives only tokens moved over bandwidth, 7.9e-7 s per (byte per
token): at line rate every move would be of 39,500 tokens, the length limit; at half, of 19,800."""


def migration_transfer(seconds: Sequence[float]) -> Transfer:
    """Fixed time of a migration: the intercept of the paper's seconds over KV bytes per token."""
    _, fixed_s = np.polyfit(KV_BYTES, seconds, 1)
    return Transfer(fixed_s=round(float(fixed_s), 3), bytes_per_s=TRANSFER_BYTES_PER_S)


def fit_kernels(
    tables: KernelTables,
    names: tuple[str, str],
    spec: ModelSpec,
    card: GpuClass | None,
    *,
    version: str,
    share: float | None,
    files: Sequence[str],
    layouts: Sequence[str] = tuple(map(str, TPS)),
    backend: str = "vllm",
    note: str = "",
    derived: str = "",
    least_pair_s: Mapping[str, float] = MappingProxyType({}),
) -> Profile:
    """Fit every layout of one model on one GPU class, which are called `names`; host time 0.

    `card` is None for a class without a data sheet; `derived`: see `Profile`. `least_pair_s`
    bounds the time of a (query, key) pair from below, by layout.
    """
    model, gpu = names
    entries: dict[str, TpTable] = {}
    refused: dict[str, str] = {}
    for layout in layouts:
        t = tables.of(spec.table, layout)
        capacity = 0 if t.capacity.empty else int(t.capacity["kv_capacity_tokens"].iloc[0])
        if capacity <= 0 or t.decode.empty:
            refused[layout] = NO_ROWS if capacity > 0 or t.capacity.empty else NO_MEMORY
            continue
        decode = fit_decode(t.decode)
        least_s = least_pair_s.get(layout, 0.0)
        prefill = fit_prefill(t, decode, share, experts=spec.experts > 0, least_pair_s=least_s)
        estimate = fit_estimate(t, experts=spec.experts > 0)
        entry = table_entry(decode, prefill, estimate, capacity)
        errors = {**decode_errors(t, decode, estimate), **prefill_errors(t, decode, prefill)}
        entries[layout] = replace(entry, errors=errors)
    rows = tables.capacity[
        (tables.capacity["model"] == spec.table) & (tables.capacity["kv_capacity_tokens"] > 0)
    ]
    first = rows.iloc[0]
    return Profile(
        schema="heddle.profile/1",
        model=model,
        gpu=gpu,
        source=ProfileSource(
            package="aiconfigurator-core",
            version=version,
            backend=backend,
            backend_version=str(first["backend_version"]),
            licence="Apache-2.0",
            precision=spec.precision,
            files=tuple(files),
            note=note,
        ),
        kv_bytes_per_token=round(
            int(first["kv_bytes_per_token_per_gpu"])
            * min(int(first["tp"]), spec.kv_heads)
            * spec.kv_share
        ),
        kv_heads=spec.kv_heads,
        derived=derived,
        experts=spec.experts,
        expert_parallel=_only_with_experts_spread(entries),
        roofline=_roofline(spec, card, int(first["mem_weights_bytes"]) * int(first["tp"])),
        host=NO_HOST,
        transfer=migration_transfer(MIGRATION_CODING_S),
        belief_transfer=migration_transfer(MIGRATION_MATH_S),
        tables=entries,
        refused=refused,
    )


def _only_with_experts_spread(entries: Mapping[str, TpTable]) -> bool:
    """Whether no layout without data-parallel ranks cuts the experts by TP."""
    plain = [name for name in entries if "dp" not in name]
    return bool(plain) and all("ep" in name for name in plain)


def _roofline(spec: ModelSpec, card: GpuClass | None, weights_bytes: int) -> Roofline | None:
    if card is None:
        return None
    dense_bytes = weights_bytes - 2 * spec.vocabulary * spec.hidden
    return Roofline(
        weights_read_bytes=spec.active_bytes if spec.experts else dense_bytes,
        bandwidth_bytes_per_s=card.peak_bandwidth,
        source=card.peak_source,
    )


def with_host(
    profile: Profile, host: HostFit, estimate_host: HostFit, measured: Mapping[str, Any]
) -> Profile:
    """Add both host overheads, and the errors against the measured runs where this profile has
    any."""
    here = (profile.model, profile.gpu) == ("qwen3-32b", "h100")
    entries = {
        tp: replace(
            e,
            belief=replace(
                e.belief,
                t0_s=round(e.belief.t0_s + estimate_host.per_step_s, 7),
                t1_s=round(e.belief.t1_s + estimate_host.per_running_s, 9),
                filling=with_times(
                    e.belief.filling,
                    per_step_s=estimate_host.per_step_s,
                    per_running_s=estimate_host.per_running_s,
                ),
            ),
        )
        for tp, e in profile.tables.items()
    }
    none = {"runs": 0, "note": "no measured bf16 vLLM runs of this model on this GPU"}
    return replace(
        profile,
        host=Host(**asdict(host), measured_on=MEASURED_ON, carried_over=not here),
        tables=entries,
        errors={"measured": dict(measured) if here else none},
    )
