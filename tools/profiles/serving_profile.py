"""Constants of serving runs in a profile file, and read back from one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from heddle_calibrate.fit.curves import rounded, with_times
from heddle_calibrate.fit.kernel_profile import NO_HOST
from heddle_calibrate.serving.constants import ServingConstants, constants_of
from heddle_calibrate.serving.samples import ServingSample
from heddle_core.estimate.cost import FillingCost
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, load_profile, read_layout
from heddle_sim.profile_parts import (
    CostEstimate,
    Host,
    HostTimes,
    KernelFactors,
    TpTable,
)
from tools.profiles.serving_fit import PriorOf, ServingFit, same_for_all

REFERENCE = ("qwen3-32b", "h100")
"""The shipped profile whose host time others carry until runs of their own give them one."""
OTHERS = "other models"
"""In the place of an engine version, where all runs are of other profiles."""
BEFORE = "; before: "


def stated_before(profiles: Iterable[Profile], *, estimate: bool = False) -> PriorOf:
    """Take the constants that profiles state as prior, of their ground truth or cost estimate.

    Profiles without constants of serving runs have the prior that is the same for all.
    """
    known = {f"{p.model}.{p.gpu}": p for p in profiles if p.kernel_factors is not None}

    def prior(name: str, version: str) -> ServingConstants:
        profile = known.get(name)
        if profile is None:
            return same_for_all(name, version)
        return _estimated(profile) if estimate else constants_of(profile, version)

    return prior


def _estimated(profile: Profile) -> ServingConstants:
    """Constants in a profile's cost estimate; those of its ground truth where it has no others."""
    known = profile.errors.get("measured", {}).get("belief_constants")
    return ServingConstants(**known) if known else constants_of(profile, "")


def newest_last(versions: Sequence[str]) -> list[str]:
    """Sort engine versions: unknown ones first, then names, then numbers."""

    def rank(version: str) -> tuple[int, tuple[int, ...], str]:
        parts = version.split(".")
        numbers = tuple(int(part) for part in parts if part.isdecimal())
        return (1 + (len(numbers) > 1) if version else 0, numbers, version)

    return sorted(set(versions), key=rank)


def with_serving(
    profile: Profile,
    fit: ServingFit,
    estimate: ServingFit,
    own: Sequence[ServingSample],
    measured: Mapping[str, Any],
    *,
    update: bool = False,
) -> Profile:
    """Return the profile with host time and kernel factors of `fit`, and its cost estimate with
    those of `estimate`, which shares no run with `fit`.

    `own` are the runs of this profile; without any it takes what its family has. `measured` goes to
    ``errors.measured``. What an earlier fit left in the profile is taken out first; where it is
    the prior of `fit` (`update`), its engine versions stay.

    Raises:
        ValueError: the host time in the profile is of measurements that the file does not tell
            apart from kernel times.
    """
    bare = without_host(profile)
    name = f"{profile.model}.{profile.gpu}"
    update = update and profile.kernel_factors is not None
    before = [v for v in profile.host_versions or {} if v != OTHERS] if update else []
    named = newest_last([sample.row.version for sample in own])
    versions = newest_last([*before, *named])
    main = fit.constants(name, versions[-1] if versions else "(no runs)")
    rough = estimate.constants(name, versions[-1] if versions else "(no runs)")
    by_version = {version: _times(fit.constants(name, version)) for version in versions}
    factors = KernelFactors(
        decode=round(main.decode, 4),
        decode_per_doubling=round(main.doubling, 4),
        prefill=round(main.prefill, 4),
    )
    tables = {
        layout: replace(entry, belief=_estimate(entry, layout, profile.gpu, rough))
        for layout, entry in bare.tables.items()
    }
    times = _times(main)
    return replace(
        bare,
        host=Host(
            per_step_s=times.per_step_s,
            per_running_s=times.per_running_s,
            per_prefill_s=times.per_prefill_s,
            measured_on=_measured_on(own, named)
            + (f"{BEFORE}{profile.host.measured_on.partition(BEFORE)[0]}" if update else ""),
            carried_over=not own,
        ),
        kernel_factors=factors,
        host_versions=by_version or {OTHERS: times},
        tables=tables,
        errors={
            **bare.errors,
            "measured": {**measured, "belief_constants": asdict(rough)},
        },
    )


def inherited(profile: Profile, base: Profile) -> Profile:
    """Return a profile of a derived class with host time and factors of the class it is derived
    from.

    Raises:
        ValueError: as `with_serving`.
    """
    known, bare = _estimated(base), without_host(profile)
    return replace(
        bare,
        host=replace(
            base.host, measured_on=f"as on {base.gpu}: {base.host.measured_on}", carried_over=True
        ),
        kernel_factors=base.kernel_factors,
        host_versions=base.host_versions,
        tables={
            layout: replace(entry, belief=_estimate(entry, layout, profile.gpu, known))
            for layout, entry in bare.tables.items()
        },
        errors={**bare.errors, "measured": {"runs": 0, "belief_constants": asdict(known)}},
    )


def _measured_on(own: Sequence[ServingSample], versions: Sequence[str]) -> str:
    if not own:
        return "runs of other models and GPU classes"
    engines = ", ".join(dict.fromkeys(sample.row.engine for sample in own))
    named = ", ".join(version or "version not published" for version in versions)
    return f"{len(own)} runs of this model and GPU class with {engines} ({named})"


def without_host(profile: Profile) -> Profile:
    """Return the profile with kernel times alone, in its cost estimate too.

    Raises:
        ValueError: as `with_serving`.
    """
    measured = profile.errors.get("measured", {})
    if profile.host == NO_HOST:
        return profile
    if "belief_constants" in measured:
        known = ServingConstants(**measured["belief_constants"])
    else:
        reference = load_profile(*REFERENCE)
        same = replace(profile.host, carried_over=reference.host.carried_over) == reference.host
        if not same:
            raise ValueError(
                f"{profile.model} on {profile.gpu}: its host time is not that of a shipped profile "
                "(host.measured_on); serving runs are fitted to kernel times alone"
            )
        times = reference.errors["measured"]["belief_host"]
        known = ServingConstants(
            decode=1.0,
            doubling=0.0,
            prefill=1.0,
            per_step=times["per_step_s"],
            per_running=times["per_running_s"],
            per_prefill=0.0,
            per_request=0.0,
        )
    tables = {
        layout: replace(entry, belief=_kernels(entry, layout, profile.gpu, known))
        for layout, entry in profile.tables.items()
    }
    errors = {key: value for key, value in profile.errors.items() if key != "measured"}
    return replace(
        profile,
        host=NO_HOST,
        kernel_factors=None,
        host_versions=None,
        tables=tables,
        errors=errors,
    )


def kernel_times(
    filling: FillingCost | None, *, kernels: float, per_step_s: float, per_running_s: float
) -> FillingCost | None:
    """What `with_times` made it from, to its rounding."""
    if filling is None:
        return None
    return rounded(
        FillingCost(
            t0_s=max(0.0, filling.t0_s - per_step_s) / kernels,
            fill_s=filling.fill_s / kernels,
            knee=filling.knee,
            t1_s=max(0.0, filling.t1_s - per_running_s) / kernels,
            t2_s=filling.t2_s / kernels,
        )
    )


def _times(constants: ServingConstants) -> HostTimes:
    return HostTimes(
        per_step_s=round(constants.per_step, 6),
        per_running_s=round(constants.per_running, 8),
        per_prefill_s=round(constants.per_prefill, 6),
        per_request_s=round(constants.per_request, 5),
    )


def _decode(constants: ServingConstants, layout: str, gpu: str) -> float:
    tp, dp, ep = read_layout(layout)
    gpus = EngineShape(gpu, tp, dp=dp, ep=ep).gpus
    return KernelFactors(decode=constants.decode, decode_per_doubling=constants.doubling).decode_on(
        gpus
    )


def _estimate(entry: TpTable, layout: str, gpu: str, constants: ServingConstants) -> CostEstimate:
    b, decode = entry.belief, _decode(constants, layout, gpu)
    return replace(
        b,
        t0_s=round(b.t0_s * decode + constants.per_step, 7),
        t1_s=round(b.t1_s * decode + constants.per_running, 9),
        t2_s=float(f"{b.t2_s * decode:.6g}"),
        prefill_s=float(f"{b.prefill_s * constants.prefill:.6g}"),
        filling=with_times(
            b.filling,
            kernels=decode,
            per_step_s=constants.per_step,
            per_running_s=constants.per_running,
        ),
    )


def _kernels(entry: TpTable, layout: str, gpu: str, constants: ServingConstants) -> CostEstimate:
    """What `_estimate` made it from, to its rounding."""
    b, decode = entry.belief, _decode(constants, layout, gpu)
    return replace(
        b,
        t0_s=round(max(0.0, b.t0_s - constants.per_step) / decode, 7),
        t1_s=round(max(0.0, b.t1_s - constants.per_running) / decode, 9),
        t2_s=float(f"{b.t2_s / decode:.6g}"),
        prefill_s=float(f"{b.prefill_s / constants.prefill:.6g}"),
        filling=kernel_times(
            b.filling,
            kernels=decode,
            per_step_s=constants.per_step,
            per_running_s=constants.per_running,
        ),
    )
