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
    elif errors:
        text += (
            f"; decode steps off by {errors['median_pct']:g} % (median) and "
            f"{errors['worst_pct']:g} % (worst) on points not fitted"
        )
    unseen = profile.errors.get("measured", {}).get("unseen")
    if unseen:
        text += f"; TPOT of {unseen['runs']} measured runs off by {unseen['tpot_mean_abs_pct']:g} %"
    else:
        text += "; no measured runs of this model on this GPU class"
    return text
