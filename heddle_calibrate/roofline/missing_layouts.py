"""Layouts that a profile's tables lack, by the roofline: ranks of attention, experts spread."""

from dataclasses import replace

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.pairs import shape_of
from heddle_calibrate.roofline.profile import impossible, profile_from_shape
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, layout_name

BY_ROOFLINE = (
    "by the roofline: beside the tables of 375 such layouts, decode steps are 6 % off in the "
    "median and one in ten over 15 %, prompts 14 %"
)


def with_layouts(profile: Profile, *, expert_parallel: bool, attention_dp: int) -> Profile:
    """Return a profile of experts with tables for TP degrees that it lacks with this layout, or why
    it cannot have them, where shape of the model and data sheet of its class are known."""
    gpu = GPU_CLASSES.get(profile.gpu)
    if not profile.experts or gpu is None or not (expert_parallel or attention_dp > 1):
        return profile
    wanted = [
        EngineShape(
            profile.gpu, tp, dp=attention_dp, ep=tp * attention_dp if expert_parallel else 1
        )
        for tp in (1, 2, 4, 8)
        if tp * attention_dp > 1
    ]
    missing = [shape for shape in wanted if layout_name(shape) not in profile.tables]
    model = shape_of(profile) if missing else None
    if model is None:
        return profile
    reasons = {layout_name(shape): impossible(model, shape, gpu) for shape in missing}
    refused = {**profile.refused, **{name: why for name, why in reasons.items() if why}}
    possible = [shape for shape in missing if not reasons[layout_name(shape)]]
    if not possible:
        return replace(profile, refused=refused)
    made = profile_from_shape(model, gpu, possible, factors=(1.0, 1.0)).tables
    tables = {
        name: replace(table, errors={**table.errors, "roofline": BY_ROOFLINE})
        for name, table in made.items()
    }
    refused = {name: why for name, why in refused.items() if name not in tables}
    return replace(profile, tables={**profile.tables, **tables}, refused=refused)
