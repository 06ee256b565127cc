"""The profile of a model by any name of it: the shipped one, else a roofline's of its shape."""

from dataclasses import replace
from functools import cache

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES, REFUSED_CLASSES
from heddle_sim.model_names import known_model, nearest_ids
from heddle_sim.profile_files import Profile, ProfileError, known_profiles, load_profile


def profile_by_name(model: str, gpu: str = "") -> Profile:
    """Load the shipped profile of a model on a GPU class, or make the roofline's.

    The roofline's is of a model whose shape `models.json` of heddle_sim has, where no shipped
    profile has its precision and class; `source.note` says so. `model` may be a profile file.

    Raises:
        ProfileError: there is neither; with the nearest ids.
    """
    if model.endswith(".json"):
        return load_profile(model)
    try:
        return load_profile(model, gpu)
    except ProfileError as error:
        known = known_model(model) is not None
        if known and gpu.lower() in (*GPU_CLASSES, *REFUSED_CLASSES):
            return _roofline(model, gpu.lower())
        near = [] if known else nearest_ids(model)
        hint = f"; ids of repositories like it: {', '.join(near)}" if near else ""
        raise ProfileError(f"{error}{hint}") from None


@cache
def _roofline(model: str, gpu: str) -> Profile:
    # Only here, because it takes a second to import.
    from heddle_calibrate.roofline.from_config import ConfigRequest, profile_from_config
    from heddle_calibrate.roofline.profile import RooflineError
    from heddle_sim.config_fields import ModelConfigError

    known = known_model(model)
    assert known is not None
    classes = [each for name, each in known_profiles() if name == known.profile]
    shipped = f", but on {', '.join(classes)}" if classes else ""
    none = f"no shipped profile of {known.shape} in {known.precision} on {gpu}{shipped}"
    try:
        made = profile_from_config(ConfigRequest(model=model, gpu=gpu, source="roofline"))
    except (ModelConfigError, RooflineError) as error:
        raise ProfileError(f"{model}: {none}, and no roofline: {error}") from None
    note = "; ".join([f"{none}: made of its shape by the roofline", *made.shape.notes])
    return replace(made.profile, source=replace(made.profile.source, note=note))
