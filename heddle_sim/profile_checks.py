"""What is wrong with a profile file, beyond the types of its fields."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING

from heddle_sim.profile_layouts import ProfileError, read_layout
from heddle_sim.profile_parts import Costs, KernelFactors, TpTable

if TYPE_CHECKING:
    from heddle_sim.profile_files import Profile


def faults_of(profile: "Profile") -> list[str]:
    """Faults, each with its field and what it must be; none in a good file."""
    faults: list[str] = []
    if not profile.tables:
        faults.append("tables: at least one TP degree is needed")
    faults.extend(_model_faults(profile))
    host = profile.host
    for name, value in (
        ("host.per_step_s", host.per_step_s),
        ("host.per_running_s", host.per_running_s),
        ("host.per_prefill_s", host.per_prefill_s),
        ("transfer.fixed_s", profile.transfer.fixed_s),
        ("belief_transfer.fixed_s", profile.belief_transfer.fixed_s),
    ):
        if not (math.isfinite(value) and value >= 0):
            faults.append(f"{name} must be a finite number of at least 0, not {value}")
    faults.extend(_measured_faults(profile))
    for where in ("transfer", "belief_transfer"):
        rate: float = getattr(profile, where).bytes_per_s
        if not (math.isfinite(rate) and rate > 0):
            faults.append(f"{where}.bytes_per_s must be a positive finite number, not {rate}")
    if profile.engine is not None:
        for name, size in asdict(profile.engine).items():
            if size < 1:
                faults.append(f"engine.{name} must be 1 or more, not {size}")
    for name, value in _seconds(profile.costs):
        if not (math.isfinite(value) and value >= 0):
            faults.append(f"costs.{name} must be a finite number of at least 0, not {value}")
    for tp, entry in profile.tables.items():
        faults += [f"tables.{tp}.{fault}" for fault in _table_faults(tp, entry)]
    return faults


def _model_faults(profile: "Profile") -> Iterator[str]:
    for name, text in (("model", profile.model), ("gpu", profile.gpu)):
        if not text.strip():
            yield f"{name} must be a name"
    for name, number, least in (
        ("kv_bytes_per_token", profile.kv_bytes_per_token, 1),
        ("kv_heads", 1 if profile.kv_heads is None else profile.kv_heads, 1),
        ("experts", profile.experts, 0),
        ("attention_dp", profile.attention_dp, 1),
    ):
        if number < least:
            yield f"{name} must be {least} or more, not {number}"


def _measured_faults(profile: "Profile") -> Iterator[str]:
    for version, times in (profile.host_versions or {}).items():
        for name, value in asdict(times).items():
            if not (math.isfinite(value) and value >= 0):
                where = f"host_versions.{version}.{name}"
                yield f"{where} must be a finite number of at least 0, not {value}"
    factors = profile.kernel_factors or KernelFactors()
    smallest = min(factors.decode_on(1), factors.decode_on(64), factors.prefill)
    if not (math.isfinite(factors.decode_on(64)) and 0 < smallest < math.inf):
        yield "kernel_factors must be finite and above 0, on 1 to 64 GPUs"


def _seconds(costs: Costs | None) -> Iterator[tuple[str, float]]:
    """Every number under `costs`, by its name there."""
    if costs is None:
        return
    for name, value in (("dispatch_s", costs.dispatch_s), ("abort_s", costs.abort_s)):
        if value is not None:
            yield name, value
    for tp, lifetimes in costs.engines.items():
        for name, value in asdict(lifetimes).items():
            if value is not None:
                yield f"engines.{tp}.{name}", value
    if costs.reprefill is not None:
        for name, value in asdict(costs.reprefill).items():
            yield f"reprefill.{name}", value


def _table_faults(tp: str, entry: TpTable) -> list[str]:
    faults: list[str] = []
    d, p, b, f = entry.decode, entry.prefill, entry.belief, entry.belief.filling
    try:
        read_layout(tp)
    except ProfileError as error:
        faults.append(str(error))
    if entry.kv_capacity_tokens <= 0:
        faults.append("kv_capacity_tokens must be positive; leave a degree out that does not fit")
    for name, x, columns in (
        ("decode.batch", d.batch, (d.base_ms, d.context_us)),
        ("prefill.tokens", p.tokens, (p.ms,)),
    ):
        if len(x) < 2 or x[0] != 0 or any(hi <= lo for lo, hi in pairwise(x)):
            faults.append(f"{name} must ascend from 0 and have at least two entries")
        if any(len(c) != len(x) for c in columns):
            faults.append(f"{name} and its columns differ in length")
    for name, values in (
        ("decode.base_ms", d.base_ms),
        ("decode.context_us", d.context_us),
        ("prefill.ms", p.ms),
        ("prefill.pair_ns", (p.pair_ns,)),
        ("belief", (b.t0_s, b.t1_s, b.t2_s, b.prefill_s)),
        ("belief.filling", () if f is None else (f.t0_s, f.fill_s, f.t1_s, f.t2_s)),
    ):
        if not all(math.isfinite(v) and v >= 0 for v in values):
            faults.append(f"{name} must hold finite numbers of at least 0")
    if f is not None and f.knee < 1:
        faults.append(f"belief.filling.knee must be 1 or more, not {f.knee}")
    if d.base_ms and d.base_ms[0] <= 0:
        faults.append("decode.base_ms must be above 0: no step is free")
    return faults
