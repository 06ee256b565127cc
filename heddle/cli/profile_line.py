"""The source of a profile and its known errors, in a few words."""

from typing import Final

from heddle_sim.profile_files import Profile
from heddle_sim.profile_parts import MEASURED

KINDS: Final = {"heddle roofline": "roofline", MEASURED: "measured steps"}
"""What times are, by the package that they come from; of any other, kernel tables."""


def profile_lines(profile: Profile, tp: int, max_running: int = 0) -> list[str]:
    """Return source and error of decode steps; then how times were derived, batches of fewer than
    `max_running` that its tables end at, and measured runs.

    Without measured runs of the model on the GPU class there is no line about them.
    """
    source = profile.source
    version = source.backend_version
    named = source.engine.replace(f"{version},", version).replace(
        version, version.removesuffix(".0")
    )
    error = decode_error(profile, tp)
    lines = [f"{named} {KINDS.get(source.package, 'kernel tables')}{error}"]
    if profile.derived:
        lines.append(f"derived: {profile.derived}")
    if source.note:
        lines.append(source.note)
    if measured := measured_runs(profile):
        lines.append(measured)
    largest = profile.attention_dp * max(profile.at(tp).decode.batch)
    if max_running > largest:
        lines.append(f"batches over {largest} are extrapolated: its tables have none")
    return lines


def error_class(profile: Profile) -> str:
    """Return what states the error of a profile: ``measured`` runs, a ``table`` or ``roofline``."""
    kind = KINDS.get(profile.source.package, "table")
    return "measured" if measured_runs(profile) or kind == "measured steps" else kind


def measured_runs(profile: Profile) -> str:
    """State the error against measured serving runs; empty without such runs."""
    measured = profile.errors.get("measured", {})
    runs = measured.get("unseen", measured)
    if not runs.get("runs"):
        return ""
    text = f"TPOT of {runs['runs']} measured runs off by {runs['tpot_mean_abs_pct']:g} %"
    if "tpot_unseen_mean_abs_pct" in runs:
        apart = runs["tpot_unseen_mean_abs_pct"]
        text += f", and {apart:g} % without their group in the fit"
    return text


def decode_error(profile: Profile, tp: int) -> str:
    """State the error of decode steps, with a comma before it; empty where none is known."""
    expected = profile.errors.get("roofline", {}).get("expected")
    if expected:
        left_out = {"model": "models", "class": "GPU classes"}[expected["left_out"]]
        text = f", decode error {expected['mean_pct']:.1f} % mean"
        if "prompt_mean_pct" in expected:
            text += f", prompts {expected['prompt_mean_pct']:.1f} %"
        return f"{text}, on {left_out} left out of its fit"
    table = profile.at(tp).errors
    if apart := table.get("roofline"):
        return f"; this layout {apart}"
    errors = table.get("decode_unseen", {})
    if not errors:
        return ""
    return f", decode error {errors['median_pct']:.1f} % median, {errors['worst_pct']:.1f} % worst"
