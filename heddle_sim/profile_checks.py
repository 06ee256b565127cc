"""What is wrong with a profile file, beyond the types of its fields."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from heddle_core.bounds import bound_faults
from heddle_sim.profile_parts import (
    LARGEST,
    LONGEST_S,
    KernelFactors,
    ProfileError,
    TpTable,
    read_layout,
)

if TYPE_CHECKING:
    from heddle_sim.profile_files import Profile


DECODE_ERRORS = ("median_pct", "worst_pct")
LEFT_OUT = ("model", "class")
SERVING_ERRORS, APART = ("runs", "tpot_mean_abs_pct"), ("tpot_unseen_mean_abs_pct",)


def faults_of(profile: "Profile") -> Iterator[str]:
    """Faults, each with its field and what it must be; none in a good file."""
    if not profile.tables:
        yield "tables: at least one TP degree is needed"
    for name, text in (("model", profile.model), ("gpu", profile.gpu)):
        if not text.strip():
            yield f"{name} must be a name"
    yield from bound_faults(profile)
    factors = profile.kernel_factors or KernelFactors()
    smallest = min(factors.decode_on(1), factors.decode_on(64), factors.prefill)
    if not (math.isfinite(factors.decode_on(64)) and 0 < smallest < math.inf):
        yield "kernel_factors must be finite and above 0, on 1 to 64 GPUs"
    yield from _error_faults(profile)
    for tp, entry in profile.tables.items():
        yield from (f"tables.{tp}.{fault}" for fault in _table_faults(tp, entry))


def _error_faults(profile: "Profile") -> Iterator[str]:
    """Errors of the fit that are shown with every run."""
    for tp, entry in profile.tables.items():
        where = f"tables.{tp}.errors"
        yield from _object_faults(where, entry.errors, "decode_unseen", DECODE_ERRORS)
    errors, where = profile.errors, "errors.roofline"
    yield from _object_faults("errors", errors, "roofline")
    expected = _object(_object(errors, "roofline"), "expected")
    yield from _object_faults(
        where, _object(errors, "roofline"), "expected", ("mean_pct",), ("prompt_mean_pct",)
    )
    if expected and expected.get("left_out") not in LEFT_OUT:
        yield f"{where}.expected.left_out must be {' or '.join(LEFT_OUT)}"
    yield from _object_faults("errors", errors, "measured")
    measured = _object(errors, "measured")
    yield from _object_faults("errors.measured", measured, "unseen")
    if _object(measured, "unseen").get("runs"):
        yield from _object_faults("errors.measured", measured, "unseen", SERVING_ERRORS, APART)
    elif "unseen" not in measured and measured.get("runs"):
        yield from _object_faults("errors", errors, "measured", SERVING_ERRORS, APART)


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _object_faults(
    where: str,
    values: Mapping[str, Any],
    name: str,
    numbers: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> Iterator[str]:
    """Say what of an object, if it is there and not empty, is no number."""
    found = values.get(name, {})
    if not isinstance(found, Mapping):
        yield f"{where}.{name} must be an object"
    elif found:
        for each in (*numbers, *(each for each in optional if each in found)):
            value = found.get(each)
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield f"{where}.{name}.{each} must be a number, not {value!r}"
            elif not abs(value) <= LARGEST:
                yield f"{where}.{name}.{each} must be at most {LARGEST:g}, not {value!s:.40}"


def _table_faults(tp: str, entry: TpTable) -> list[str]:
    faults: list[str] = []
    d, p, f = entry.decode, entry.prefill, entry.belief.filling
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
    if f is not None and not all(0 <= v <= LONGEST_S for v in (f.t0_s, f.fill_s, f.t1_s, f.t2_s)):
        faults.append(f"belief.filling must hold numbers from 0 to {LONGEST_S}")
    if f is not None and not 1 <= f.knee <= LARGEST:
        faults.append(f"belief.filling.knee must be from 1 to {LARGEST:g}, not {f.knee!s:.40}")
    if d.base_ms and d.base_ms[0] <= 0:
        faults.append("decode.base_ms must be above 0: no step is free")
    return faults
