"""Profiles: measured latency of one model on one GPU class, read from small JSON files.

A profile file ("heddle.profile/1", described in `heddle_sim/profiles/README.md`) holds knots,
source and errors of a fit. This module expands knots to the lists that the engine indexes: the
ground truth. It also makes the cost estimate of a policy from the section `belief`, which was
fitted on other samples than the ground truth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from heddle_core.bounds import Bounds
from heddle_core.estimate.cost import CostModel, FillingCost, StepCost
from heddle_core.ids import EngineShape
from heddle_core.json_faults import NO_JSON
from heddle_sim.latency import LatencyTable
from heddle_sim.model_names import from_config_command, short_model_name, unknown_name
from heddle_sim.profile_checks import faults_of
from heddle_sim.profile_parts import (
    LARGEST,
    Costs,
    DraftHead,
    EngineSettings,
    Host,
    HostTimes,
    KernelFactors,
    ProfileSource,
    Roofline,
    Size,
    SizeOrNone,
    TpTable,
    Transfer,
    nearest_release,
    release,
)
from heddle_sim.profile_parts import ProfileError as ProfileError
from heddle_sim.profile_parts import layout_name as layout_name
from heddle_sim.profile_parts import read_layout as read_layout

T = TypeVar("T")

PROFILE_FOLDER = Path(__file__).parent / "profiles"
MAX_BATCH = 512
"""Default largest batch of tables: twice the source's largest, vLLM's usual
ceiling."""


def _layout_options(name: str) -> str:
    """Options that choose a table, by its name."""
    _, dp, ep = read_layout(name)
    ranks = f"cluster.attention_dp = {dp}" if dp > 1 else "no cluster.attention_dp"
    return f"cluster.expert_parallel = on with {ranks}" if ep > 1 else ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One model on one GPU class: the ground truth and the cost estimate, as in the file."""

    schema: Literal["heddle.profile/1"]
    model: str
    gpu: str
    source: ProfileSource
    kv_bytes_per_token: Size
    """One copy of a token's KV, over all the GPUs that it is cut over."""
    kv_heads: Annotated[int | None, Bounds(1, LARGEST)] = None
    """KV heads of a layer, 1 where all heads share one latent vector (MLA): ranks of a larger TP
    degree hold copies. None: KV is cut over all GPUs."""
    derived: str = ""
    """How the times were computed from those of another GPU class; empty where they were
    measured on this one."""
    roofline: Roofline | None = None
    """None where the hardware's best performance is not stated."""
    host: Host
    transfer: Transfer
    belief_transfer: Transfer
    tables: dict[str, TpTable]
    """By `layout_name`: "4" for TP 4, "4ep4" with experts over 4 GPUs, "1dp8ep8" with attention
    data parallelism besides. Entries with dp are of one rank."""
    experts: SizeOrNone = 0
    """Routed experts of a layer; 0: a dense model."""
    expert_parallel: bool = False
    """Whether engines spread experts over all their GPUs (vLLM: ``--enable-expert-parallel``)."""
    attention_dp: Size = 1
    """Attention data-parallel ranks of an engine, as vLLM's ``--data-parallel-size``."""
    refused: dict[str, str] = field(default_factory=dict)
    """TP degree -> why the model does not run there."""
    errors: dict[str, Any] = field(default_factory=dict)
    heads: dict[str, DraftHead] = field(default_factory=dict)
    """Of drafts, by vLLM's method, where a configuration has some."""
    engine: EngineSettings | None = None
    """None: vLLM's defaults for a server on a large GPU."""
    costs: Costs | None = None
    """None where only iterations were measured."""
    kernel_factors: KernelFactors | None = None
    """None: kernel times are as in the tables."""
    host_versions: dict[str, HostTimes] | None = None
    """Host time by engine version, where measured runs name theirs."""
    conditions: dict[str, Any] | None = None
    """Hardware, versions, settings and command of what was measured."""

    @property
    def tps(self) -> tuple[int, ...]:
        """TP degrees the model fits on with this layout of experts and ranks, ascending."""
        shapes = [self.shape(read_layout(name)[0]) for name in self.tables]
        return tuple(sorted({shape.tp for shape in shapes if layout_name(shape) in self.tables}))

    def tps_on(self, gpus: int) -> tuple[int, ...]:
        """TP degrees of engines that have at most `gpus` GPUs, ascending."""
        return tuple(tp for tp in self.tps if self.shape(tp).gpus <= gpus)

    def shape(self, tp: int) -> EngineShape:
        """Shape of an engine whose ranks have TP degree `tp`."""
        dp = self.attention_dp
        return EngineShape(self.gpu, tp, ep=tp * dp if self.expert_parallel else 1, dp=dp)

    def laid_out(
        self, expert_parallel: Literal["auto", "on", "off"], *, attention_dp: int = 1
    ) -> "Profile":
        """Return the profile of engines with this layout; auto: experts as in the file.

        Raises:
            ProfileError: it has no table for that.
        """
        auto = expert_parallel == "auto"
        parallel = self.expert_parallel if auto else expert_parallel == "on"
        if parallel and not self.experts:
            raise ProfileError(
                f"{self.model} has no experts: leave cluster.expert_parallel out, or take a "
                "mixture-of-experts model"
            )
        found = replace(self, expert_parallel=parallel, attention_dp=attention_dp)
        if not found.tps:
            raise ProfileError(
                f"{self.model} on {self.gpu} has no table with expert parallelism "
                f"{'on' if parallel else 'off'} and attention data parallelism {attention_dp}; "
                f"take {' or '.join(dict.fromkeys(map(_layout_options, self.tables)))}"
            )
        return found

    def of_version(self, version: str) -> "Profile":
        """Return the profile with the host time of the nearest release that it was measured with,
        in the cost estimate too.

        Without a `version` that is the newest. Where no release was measured, times stay and
        `source.note` says so.

        Raises:
            ProfileError: `version` is no release.
        """
        times = {release(v): found for v, found in (self.host_versions or {}).items() if release(v)}
        wanted = release(version) if version else max(times, default=())
        if not wanted and not version:
            return self
        if not wanted:
            known = ", ".join(".".join(map(str, each)) for each in times)
            raise ProfileError(
                f"{self.model} on {self.gpu} has no host time of engine version {version!r}; "
                f"take one near {known or '0.26.0'}, or leave cluster.engine_version out"
            )
        if not times:
            note = f"no host time of {version} was measured: it is that of {self.host.measured_on}"
            return replace(self, source=self.source.noted(note))
        near = nearest_release(wanted, times)
        values = asdict(times[near])
        del values["per_request_s"]
        host = replace(self.host, **values)
        if host == self.host and not version:
            return self
        named = ".".join(map(str, near))
        step_s = host.per_step_s - self.host.per_step_s
        running_s = host.per_running_s - self.host.per_running_s
        tables = {
            name: replace(entry, belief=entry.belief.slower(step_s, running_s))
            for name, entry in self.tables.items()
        }
        host = replace(host, measured_on=f"version {named} of the engine")
        note = "" if near == wanted else f"host time of {named}, the nearest measured to {version}"
        return replace(self, host=host, tables=tables, source=self.source.noted(note))

    def at(self, tp: int) -> TpTable:
        """Return the file's entry at a TP degree; ProfileError names the degrees there are."""
        shape = self.shape(tp)
        name = layout_name(shape)
        entry = self.tables.get(name)
        if entry is None:
            why = self.refused.get(name, "the profile has no table for it")
            if self.experts % shape.ep:
                why = f"its {self.experts} experts do not divide over {shape.ep} GPUs"
            fits = ", ".join(str(n) for n in self.tps) or "none"
            raise ProfileError(
                f"{self.model} on {self.gpu} cannot run at TP {name}: {why}; "
                f"TP degrees that fit: {fits}"
            )
        return entry

    def table(self, tp: int, *, max_batch: int = MAX_BATCH) -> LatencyTable:
        """Return the ground truth at a TP degree, for batches of 0 to `max_batch`.

        Raises ProfileError for a degree the model does not fit on.
        """
        return expand(self, tp, host=self.host, max_batch=max_batch)

    def cost_estimate(self, tps: Sequence[int] | None = None) -> CostModel:
        """What a policy estimates at these TP degrees (default: all that fit)."""
        by_shape: Mapping[EngineShape, StepCost] = {
            self.shape(tp): StepCost(
                t0_s=b.t0_s,
                t1_s=b.t1_s / self.attention_dp,
                t2_s=b.t2_s / self.attention_dp,
                prefill_s=b.prefill_s / self.attention_dp,
                per_prefill_s=self.host.per_prefill_s / self.attention_dp,
                kv_capacity_tokens=b.kv_capacity_tokens * self.attention_dp,
                filling=_over_ranks(b.filling, self.attention_dp),
            )
            for tp in (self.tps if tps is None else tps)
            for b in (self.at(tp).belief,)
        }
        return CostModel(
            by_shape=by_shape,
            transfer_fixed_s=self.belief_transfer.fixed_s,
            transfer_s_per_token=self.kv_bytes_per_token / self.belief_transfer.bytes_per_s,
        )

    def without_memory(self, gpu_bytes: float) -> "Profile":
        """Return the profile of engines with `gpu_bytes` less for KV on each GPU.

        TP degrees without room for KV are refused.
        """
        tables, refused = {}, dict(self.refused)
        for name, entry in self.tables.items():
            tp = read_layout(name)[0]
            parts = min(tp, self.kv_heads or tp)
            lost = round(parts * gpu_bytes / self.kv_bytes_per_token)
            if lost >= entry.kv_capacity_tokens:
                refused[name] = (
                    "engines asleep on its GPUs (standby_tp, standby_gib) leave no room for KV"
                )
                continue
            estimate = entry.belief
            tables[name] = replace(
                entry,
                kv_capacity_tokens=entry.kv_capacity_tokens - lost,
                belief=replace(estimate, kv_capacity_tokens=estimate.kv_capacity_tokens - lost),
            )
        return replace(self, tables=tables, refused=refused)

    @property
    def gpu_label(self) -> str:
        """The GPU class for people: with a mark where its times are computed from another's."""
        return gpu_label(self.gpu, self.derived)

    @property
    def layout_label(self) -> str:
        """For people: what engines do beside TP, with a comma before it; empty for TP alone."""
        spread = ", experts over all GPUs of an engine" if self.expert_parallel else ""
        ranks = f", {self.attention_dp} attention DP ranks" if self.attention_dp > 1 else ""
        return spread + ranks

    @property
    def marks(self) -> dict[str, str]:
        """What a reader of figures must know of the profile: ``derived``, or nothing."""
        return {"derived": self.derived} if self.derived else {}

    @property
    def summary(self) -> str:
        """One line for tables and manifests."""
        s = self.source
        capacity = ", ".join(f"TP{tp} {self.at(tp).kv_capacity_tokens:,}" for tp in self.tps)
        return (
            f"{self.model} on {self.gpu_label} ({s.package} {s.version}, {s.backend} "
            f"{s.backend_version}, {s.precision}); KV tokens: {capacity}"
        )


def gpu_label(gpu: str, derived: str) -> str:
    """Return ``h20 (derived)`` for a class whose times were not measured, else `gpu`."""
    return f"{gpu} (derived)" if derived else gpu


def _over_ranks(filling: FillingCost | None, ranks: int) -> FillingCost | None:
    """Of one rank: the same for all ranks together, which share the sequences equally."""
    if filling is None:
        return None
    return replace(
        filling,
        fill_s=filling.fill_s / ranks,
        knee=filling.knee * ranks,
        t1_s=filling.t1_s / ranks,
        t2_s=filling.t2_s / ranks,
    )


def expand(profile: Profile, tp: int, *, host: Host, max_batch: int = MAX_BATCH) -> LatencyTable:
    """Expand knots: linear in the batch at equal context; the last slope goes on.

    `host` is apart so that a fit can try others. With attention data parallelism the ranks are
    balanced: each decodes an equal part of the batch, prompts are spread over them, and all take
    the step together.
    """
    entry, dp = profile.at(tp), profile.attention_dp
    d, p = entry.decode, entry.prefill
    factors = profile.kernel_factors or KernelFactors()
    decode = factors.decode_on(tp * dp)
    ranks = [-(-b // dp) for b in range(max_batch + 1)]  # sequences of the fullest
    base_ms = _over_batches(d.batch, d.base_ms, ranks)
    context_us = _over_batches(d.batch, d.context_us, ranks)
    return LatencyTable(
        model=profile.model,
        gpu=profile.gpu,
        tp=tp,
        dp=dp,
        base_s=[
            decode * ms / 1e3 + host.per_step_s + host.per_running_s * b
            for b, ms in zip(ranks, base_ms, strict=True)
        ],
        per_context_s=[decode * us / 1e6 / max(1, b) for b, us in enumerate(context_us)],
        prefill_tokens=tuple(dp * tokens for tokens in p.tokens),
        prefill_knots_s=tuple(factors.prefill * ms / 1e3 for ms in p.ms),
        prefill_pair_s=factors.prefill * p.pair_ns / 1e9 / dp,
        host_per_prefill_s=host.per_prefill_s / dp,
        kv_capacity_tokens=dp * entry.kv_capacity_tokens,
        kv_bytes_per_token=profile.kv_bytes_per_token,
    )


def _over_batches(x: Sequence[int], y: Sequence[float], batches: Sequence[float]) -> list[float]:
    """Values at ascending batches of a curve with knots `x`."""
    out: list[float] = []
    k = 0
    for b in batches:
        while k < len(x) - 2 and b >= x[k + 1]:
            k += 1
        out.append(y[k] + (y[k + 1] - y[k]) * (b - x[k]) / (x[k + 1] - x[k]))
    return out


def known_profiles() -> tuple[tuple[str, str], ...]:
    """List shipped (model, gpu) pairs, sorted."""
    stems = sorted(p.name.removesuffix(".json") for p in PROFILE_FOLDER.glob("*.json"))
    return tuple((model, gpu) for model, _, gpu in (stem.rpartition(".") for stem in stems))


def load_profile(model: str, gpu: str = "") -> Profile:
    """Load a shipped profile by the name or Hugging Face id of its model, or one of your own: then
    `model` is a path that ends in ".json".

    Raises ProfileError: for unknown names with the known ones and the nearest; for a file that does
    not parse with the field at fault.
    """
    if model.endswith(".json"):
        return read_profile(Path(model))
    known = known_profiles()
    models = list(dict.fromkeys(m for m, _ in known))
    name, gpu_name = short_model_name(model, models), gpu.lower()
    if (name, gpu_name) not in known:
        gpus = list(dict.fromkeys(g for _, g in known))
        other = from_config_command(model, gpu_name)
        for what, wanted, names in (("model", name, models), ("GPU", gpu_name, gpus)):
            if wanted not in names:
                raise ProfileError(f"{unknown_name(what, wanted, names)}; {other}")
        here = ", ".join(g for m, g in known if m == name)
        raise ProfileError(f"there is no profile of {name} on {gpu}, but on {here}; {other}")
    return read_profile(PROFILE_FOLDER / f"{name}.{gpu_name}.json")


def read_profile(path: Path) -> Profile:
    """Read and check one profile file; ProfileError names the file and the field."""
    profile = decode_profile(path, Profile, "profile")
    for fault in faults_of(profile):
        raise ProfileError(f"{path}: {fault}")
    return profile


def decode_profile(path: Path, made: type[T], what: str) -> T:
    """Read a file as what `made` declares; ProfileError names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=made)
    except OSError as e:
        raise ProfileError(f"cannot read the {what} {path}: {e.strerror}") from e
    except NO_JSON as e:
        raise ProfileError(
            f"{path} is not a {what}: {e}; see heddle_sim/profiles/README.md for the format"
        ) from e
