"""What stands behind a profile, in one line."""

from heddle_sim.profile_files import Profile


def profile_line(profile: Profile, tp: int) -> str:
    """The source of the profile and its known error."""
    errors = profile.at(tp).errors.get("decode_unseen", {})
    source = profile.source
    text = f"{source.package} {source.version}, {source.engine}"
    if profile.derived:
        text += f"; derived: {profile.derived}"
    if source.note:
        text += f"; {source.note}"
    expected = profile.errors.get("roofline", {}).get("expected")
    if expected:
        left_out = {"model": "models", "class": "GPU classes"}[expected["left_out"]]
        text += (
            f"; decode steps off by {expected['mean_pct']:g} % (mean) on {left_out} left out of "
            "its fit"
        )
        if "prompt_mean_pct" in expected:
            text += f", prompts by {expected['prompt_mean_pct']:g} %"
    elif errors:
        text += (
            f"; decode steps off by {errors['median_pct']:g} % (median) and "
            f"{errors['worst_pct']:g} % (worst) on points not fitted"
        )
    measured = profile.errors.get("measured", {})
    runs = measured.get("unseen", measured)
    if runs.get("runs"):
        text += f"; TPOT of {runs['runs']} measured runs off by {runs['tpot_mean_abs_pct']:g} %"
        if "tpot_unseen_mean_abs_pct" in runs:
            apart = runs["tpot_unseen_mean_abs_pct"]
            text += f", and {apart:g} % without their group in the fit"
    else:
        text += "; no measured runs of this model on this GPU class"
    return text
