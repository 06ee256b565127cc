"""The constants of serving times: of a profile file, or sums of terms of a fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from heddle_calibrate.serving.replay import SpanWork
from heddle_calibrate.serving.samples import ServingSample
from heddle_sim.profile_files import Profile
from heddle_sim.profile_parts import KernelFactors

LEAST = {"doubling": -1.0, "per_running": 1e-6}
"""Others are at least 0. A further sequence is never free."""
Terms = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By quantity, level, and which one of that level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConstants:
    """Constants of one profile and engine version; factors on kernel times, and seconds."""

    decode: float
    doubling: float
    prefill: float
    per_step: float
    per_running: float
    per_prefill: float
    per_request: float

    def decode_on(self, gpus: int) -> float:
        """Factor on decoding of an engine of `gpus` GPUs."""
        return self.decode + self.doubling * log2(gpus)

    def _seconds(self, work: SpanWork, gpus: int) -> float:
        return (
            self.decode_on(gpus) * work.decode_s
            + self.prefill * work.prefill_s
            + self.per_step * work.steps
            + self.per_running * work.sequences
            + self.per_prefill * work.prompts
        )

    def tpot_s(self, sample: ServingSample) -> float:
        """Seconds from one output token to the next."""
        return self._seconds(sample.work.per_token, sample.gpus)

    def ttft_s(self, sample: ServingSample) -> float:
        """Seconds from a request to its first token."""
        return self._seconds(sample.work.first_token, sample.gpus) + self.per_request


def constants_of(profile: Profile, version: str) -> ServingConstants:
    """Constants that a profile file states for an engine version; without that version, those that
    simulations take.
    """
    factors = profile.kernel_factors or KernelFactors()
    times = (profile.host_versions or {}).get(version)
    host = profile.host if times is None else times
    once = times or next(reversed((profile.host_versions or {}).values()), None)
    return ServingConstants(
        decode=factors.decode,
        doubling=factors.decode_per_doubling,
        prefill=factors.prefill,
        per_step=host.per_step_s,
        per_running=host.per_running_s,
        per_prefill=host.per_prefill_s,
        per_request=once.per_request_s if once else 0.0,
    )


def level_keys(profile: str, version: str) -> dict[str, str]:
    """Name which one of each level a profile ("model.gpu") and an engine version belong to."""
    model, _, gpu = profile.rpartition(".")
    return {
        "family": "",
        "model": model,
        "profile": profile,
        "gpu": gpu,
        "version": version,
    }


def summed(
    prior: Mapping[str, float], terms: Terms, profile: str, version: str
) -> ServingConstants:
    """Add what each level adds to each quantity, none negative; a level without rows adds
    nothing."""
    keys = level_keys(profile, version)
    values = {}
    for quantity, before in prior.items():
        levels = terms.get(quantity, {})
        value = before + sum(of.get(keys[level], 0.0) for level, of in levels.items())
        values[quantity] = max(LEAST.get(quantity, 0.0), value)
    return ServingConstants(**values)
