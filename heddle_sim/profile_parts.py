"""The sections of a profile file, with the file's field names; described in
`heddle_sim/profiles/README.md`. And the names of its tables."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import log2
from typing import Annotated, Any, Final, Literal, TypeAlias

from heddle_core.bounds import Bounds
from heddle_core.estimate.cost import FillingCost
from heddle_core.ids import EngineShape

LONGEST_S: Final = 3600
"""No time that a profile states is longer; a simulation with one that is would not end."""
LARGEST: Final = 1e15
"""No size that a profile states is larger, in tokens, bytes or GPUs: no float would hold sums."""
Seconds: TypeAlias = Annotated[float, Bounds(0, LONGEST_S)]
SecondsOrNone: TypeAlias = Annotated[float | None, Bounds(0, LONGEST_S)]
BytesPerS: TypeAlias = Annotated[float, Bounds(above=0)]
Size: TypeAlias = Annotated[int, Bounds(1, LARGEST)]
SizeOrNone: TypeAlias = Annotated[int, Bounds(0, LARGEST)]

_LAYOUT = re.compile(r"([1-9]\d*)(?:dp([1-9]\d*))?(?:ep([1-9]\d*))?")

_RELEASE = re.compile(
    r"v?(\d{1,9}(?:\.\d{1,9}){0,2})(?:\.\d+)*(?:\.?[a-z].*|[+-].*)?", re.ASCII | re.IGNORECASE
)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, as of ``0.12.0`` or ``v0.12.0``; () of one that is not given
    or no release."""
    found = _RELEASE.fullmatch(version.strip())
    return tuple(map(int, found[1].split("."))) if found else ()


def nearest_release(wanted: tuple[int, ...], known: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the release nearest to one: of an older series its newest, of a newer its oldest."""

    def apart(each: tuple[int, ...]) -> list[int]:
        moved = [a - b for a, b in zip_longest(each, wanted, fillvalue=0)]
        older = next(filter(None, moved), 0) < 0
        return [-part for part in moved] if older else moved

    return min(known, key=apart)


class ProfileError(ValueError):
    """A profile that does not exist, does not parse, or has no table for a TP degree."""


def layout_name(shape: EngineShape) -> str:
    """Name of an engine's parallelism in a profile: "8", "8ep8", "1dp8ep8"."""
    ranks = f"dp{shape.dp}" if shape.dp > 1 else ""
    return f"{shape.tp}{ranks}" + (f"ep{shape.ep}" if shape.ep > 1 else "")


def read_layout(name: str) -> tuple[int, int, int]:
    """Return TP degree, attention data-parallel ranks and GPUs of experts of a `layout_name`.

    Raises:
        ProfileError: it is none.
    """
    found = _LAYOUT.fullmatch(name)
    tp, dp, ep = (int(part or 1) for part in found.groups()) if found else (0, 0, 0)
    if found is None or ep not in (1, tp * dp):
        raise ProfileError(
            f"{name!r} is no layout of an engine: give a TP degree, and where they apply dp with "
            'ranks and ep with the GPUs that experts are spread over, all of them, as "1dp8ep8"'
        )
    return tp, dp, ep


MEASURED = "heddle calibrate"
"""Source of profiles whose steps the user measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSource:
    """Where the kernel times come from."""

    package: str
    version: str
    backend: str
    backend_version: str
    licence: str
    precision: str
    files: tuple[str, ...]
    note: str = ""
    """What a reader must know of these kernel times beside the errors of the fit."""

    @property
    def engine(self) -> str:
        """Name and version of the engine, and the precision where that is not bfloat16."""
        name = {"vllm": "vLLM", "sglang": "SGLang"}.get(self.backend, self.backend)
        precision = "" if self.precision == "bfloat16" else f", {self.precision}"
        return f"{name} {self.backend_version}{precision}"

    def noted(self, note: str) -> "ProfileSource":
        return replace(self, note="; ".join(filter(None, (self.note, note))))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Time that kernel tables lack (scheduler, sampler, launches, client), fitted on measured
    runs."""

    per_step_s: Seconds
    per_running_s: Seconds
    """Per running sequence and step."""
    per_prefill_s: Seconds
    """Per sequence in prefill and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(HostFit):
    """The same, and the runs."""

    measured_on: str
    carried_over: bool
    """True when the runs were of another model or GPU class than this profile's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes(HostFit):
    """Host time with one version of the engine."""

    per_request_s: Seconds
    """From sending a request to its first token, outside of iterations: client and front end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFactors:
    """Kernel times of measured serving runs over those of the tables."""

    decode: float = 1.0
    """On one GPU."""
    decode_per_doubling: float = 0.0
    """Added for each doubling of the GPUs of an engine."""
    prefill: float = 1.0

    def decode_on(self, gpus: int) -> float:
        """Return the factor of decoding on an engine of `gpus` GPUs."""
        return self.decode + self.decode_per_doubling * log2(gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Kernel time of a step: ``base_ms[k] + context_us[k] / 1000 * x`` when each of `batch[k]`
    holds `x`.

    Linear in the batch between knots; `batch` starts with 0, a step that only prefills.
    """

    batch: Annotated[tuple[int, ...], Bounds(0, LARGEST)]
    base_ms: Annotated[tuple[float, ...], Bounds(0, 1000 * LONGEST_S)]
    context_us: Annotated[tuple[float, ...], Bounds(0, 1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Time that a prefill adds to a step: a curve over tokens, and nanoseconds per (query, key)
    pair."""

    tokens: Annotated[tuple[int, ...], Bounds(0, LARGEST)]
    ms: Annotated[tuple[float, ...], Bounds(0, 1000 * LONGEST_S)]
    pair_ns: Annotated[float, Bounds(0, 1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """A policy's cost estimate: `heddle_core.estimate.cost.StepCost`, host time included."""

    t0_s: Seconds
    t1_s: Seconds
    t2_s: Seconds
    prefill_s: Seconds
    kv_capacity_tokens: SizeOrNone
    filling: FillingCost | None = None
    """None: a dense model, or not fitted."""

    def slower(self, step_s: float, running_s: float) -> "CostEstimate":
        """Return the estimate with so many seconds more of an iteration, and of each sequence."""
        made = replace(
            self, t0_s=max(0.0, self.t0_s + step_s), t1_s=max(0.0, self.t1_s + running_s)
        )
        f = self.filling
        if f is None:
            return made
        more = replace(f, t0_s=max(0.0, f.t0_s + step_s), t1_s=max(0.0, f.t1_s + running_s))
        return replace(made, filling=more)


@dataclass(frozen=True, slots=True, kw_only=True)
class TpTable:
    """Everything at one TP degree."""

    kv_capacity_tokens: SizeOrNone
    decode: Decode
    prefill: Prefill
    belief: CostEstimate
    errors: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Moving a KV prefix between engines."""

    fixed_s: Seconds
    bytes_per_s: BytesPerS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the measured engines that affect time."""

    block_tokens: Size
    max_batched_tokens: Size
    """The most tokens of one iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Times of engines of one TP degree beside iterations; medians."""

    start_s: Seconds
    stop_s: Seconds
    sleep_s: SecondsOrNone = None
    """Freeing GPU memory, with the weights in main memory; None if not measured."""
    wake_s: SecondsOrNone = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reprefill:
    """Moving a context to an engine by a prefill there: ``fixed_s + tokens * per_token_s``,
    beside a decoding batch."""

    fixed_s: Seconds
    per_token_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs measured beside iterations and transfers."""

    dispatch_s: Seconds
    """From a dispatch to the engine and back: the driver's path."""
    engines: dict[str, Lifetimes]
    """By TP degree, as text because JSON keys are text."""
    moves_by: Literal["kv", "prefill"] = "kv"
    """How contexts moved to another engine; a prefill occupies that engine."""
    abort_s: SecondsOrNone = None
    """From the abort of a running step until its end is reported."""
    reprefill: Reprefill | None = None
    beside: float | None = None
    """Factor on the time of an iteration while another engine runs on the same machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """A head that makes drafts: bytes over the engine."""

    read_bytes: float
    """Of weights that one pass reads."""
    weight_bytes: float
    """Of weights in GPU memory."""
    kv_bytes_per_token: float
    """Of its own KV."""
    repository: str = ""
    """What engines load it from; empty where it is part of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The least an iteration can take: these bytes and the KV, at peak bandwidth of each GPU."""

    weights_read_bytes: int
    """Over the engine: all weights but the input embedding, of which a step reads only rows."""
    bandwidth_bytes_per_s: float
    source: str
