"""Profiles of SGLang's engines: constants are sums of terms of the fit to its published runs.

`sglang.json` has the terms; `python -m tools.profiles serving ... --fit` makes it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from heddle_calibrate.roofline.sglang_memory import chunk_tokens, kv_gain_tokens
from heddle_calibrate.serving.constants import ServingConstants, constants_of, summed
from heddle_core.estimate.cost import FillingCost
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, ProfileError
from heddle_sim.profile_parts import (
    MEASURED,
    CostEstimate,
    EngineSettings,
    Host,
    KernelFactors,
    nearest_release,
    read_layout,
    release,
)

TERMS_FILE = Path(__file__).with_name("sglang.json")


@cache
def terms() -> Mapping[str, Any]:
    """Read `sglang.json`: `prior`, terms of `truth` and `estimate`, runs and errors by profile."""
    values: dict[str, Any] = json.loads(TERMS_FILE.read_text(encoding="utf-8"))
    return values


def sglang_constants(profile: Profile, version: str, part: str = "truth") -> ServingConstants:
    """Constants of a profile's model, GPU class and SGLang version, or the nearest that was
    measured; without a version the mean over them.

    Raises:
        ProfileError: `version` is no release.
    """
    known = terms()
    near = nearest_version(version)
    return summed(known["prior"], known[part], f"{profile.model}.{profile.gpu}", near)


def nearest_version(version: str) -> str:
    """Return the SGLang version that was measured, or the one nearest to it; empty as it is.

    Raises:
        ProfileError: `version` is no release.
    """
    known: list[str] = terms()["versions"]
    releases = {release(each): each for each in known if len(release(each)) > 2}
    wanted = release(version)
    if version and version not in known:
        if not wanted:
            raise ProfileError(
                f"{version!r} is no release of SGLang; take one near "
                f"{', '.join(releases.values())}, or leave cluster.engine_version out"
            )
        return releases[nearest_release(wanted, releases)]
    return version


def of_sglang(profile: Profile, version: str = "") -> Profile:
    """Return the profile of SGLang's engines: host time, kernel factors, KV capacity and limits;
    one of measured steps as it is, with a note where another engine was measured.

    Raises:
        ProfileError: as `sglang_constants`.
    """
    truth, source = sglang_constants(profile, version), profile.source
    if source.package == MEASURED:
        note = f"times are as measured with {source.engine}: none of SGLang's take their place"
        own = source.backend == "sglang"
        return profile if own else replace(profile, source=source.noted(note))
    rough = sglang_constants(profile, version, "estimate")
    known = profile.errors.get("measured", {}).get("belief_constants")
    before = ServingConstants(**known) if known else constants_of(profile, "")
    factors = KernelFactors(
        decode=truth.decode, decode_per_doubling=truth.doubling, prefill=truth.prefill
    )
    tables = {}
    for name, entry in profile.tables.items():
        tp, dp, ep = read_layout(name)
        shape = EngineShape(profile.gpu, tp, dp=dp, ep=ep)
        gain = int(kv_gain_tokens(profile, shape))
        estimate = _changed(entry.belief, before, rough, shape.gpus)
        tables[name] = replace(
            entry,
            kv_capacity_tokens=max(0, entry.kv_capacity_tokens + gain),
            belief=replace(estimate, kv_capacity_tokens=max(0, estimate.kv_capacity_tokens + gain)),
        )
    measured = terms()["profiles"].get(f"{profile.model}.{profile.gpu}", {"runs": 0})
    off = terms()["layout_left_out"]
    note = (
        f"times of SGLang by {terms()['runs']} published runs, {measured['runs']} of them of this "
        f"profile: TPOT of a layout left out is {off['tpot_median_pct']:g} % off in the median, of "
        f"one in ten over {off['tpot_p90_pct']:g} %; TTFT {off['ttft_median_pct']:g} %"
    )
    if (near := nearest_version(version)) != version:
        note += f"; those of {near}, the nearest measured to {version}"
    return replace(
        profile,
        source=source.noted(note),
        host=Host(
            per_step_s=truth.per_step,
            per_running_s=truth.per_running,
            per_prefill_s=truth.per_prefill,
            measured_on=f"{terms()['runs']} published runs with SGLang",
            carried_over=not measured["runs"],
        ),
        errors={**profile.errors, "measured": measured},
        kernel_factors=factors,
        host_versions=None,
        engine=EngineSettings(block_tokens=1, max_batched_tokens=chunk_tokens(profile.gpu)),
        tables=tables,
    )


def _changed(
    b: CostEstimate, old: ServingConstants, new: ServingConstants, gpus: int
) -> CostEstimate:
    """Return an estimate with other constants."""
    kernels = new.decode_on(gpus) / old.decode_on(gpus)

    def step(t0_s: float) -> float:
        return max(0.0, t0_s - old.per_step) * kernels + new.per_step

    def running(t1_s: float) -> float:
        return max(0.0, t1_s - old.per_running) * kernels + new.per_running

    filling = None
    if b.filling is not None:
        filling = FillingCost(
            t0_s=step(b.filling.t0_s),
            fill_s=b.filling.fill_s * kernels,
            knee=b.filling.knee,
            t1_s=running(b.filling.t1_s),
            t2_s=b.filling.t2_s * kernels,
        )
    return replace(
        b,
        t0_s=step(b.t0_s),
        t1_s=running(b.t1_s),
        t2_s=b.t2_s * kernels,
        prefill_s=b.prefill_s * new.prefill / old.prefill,
        filling=filling,
    )
