"""Other names in run directories of earlier versions: one table, applied as they are read.

Version 0.1.0 knew one rollout without a name, engines by TP degree alone, and planning problems of
other classes.
"""

from collections.abc import Mapping
from typing import Any

from heddle_core.ids import RolloutId
from heddle_core.parts.table import kind_of

ROLLOUT_OF_OLD_RUNS = RolloutId("rollout")
"""The name that `heddle simulate` and `heddle run` give a run's only rollout."""


_PROBLEMS = {
    "heddle_core.plan.searched:JointProblem": "heddle_core.solve.joint:JointProblem",
    "heddle_core.consolidate.tail_problem:TailProblem": "heddle_core.solve.tail:TailProblem",
}


PRESETS_VERSION = 3
"""Raised when a preset decides otherwise than before; a manifest without it is of version 1."""

_PLANNED = ("portfolio", "keep_engines")
_PARTS_UNTIL: Mapping[int, Mapping[str, tuple[str, ...]]] = {
    1: {
        "heddle": ("headroom", *_PLANNED),
        "heddle-no-migration": ("headroom", *_PLANNED),
        "heddle-no-placement": ("headroom", *_PLANNED),
        "heddle-no-plan": ("headroom",),
        "heddle-no-priority": _PLANNED,
    },
    2: {
        "heddle": ("fitting",),
        "heddle-no-migration": ("fitting",),
        "heddle-no-placement": ("fitting",),
        "heddle-no-plan": ("fitting",),
        "heddle-no-priority": ("fitting",),
        "heddle-no-widening": ("fitting",),
        "heddle-paper": ("served", "presorted_by_size", "follow_rank", "anneal_by_size"),
    },
}
"""What presets had until a version, that version included, in the place of other parts today."""


def upgraded_policy(name: str, version: int) -> str:
    """Return the name of a policy that decides as `name` did in that version of the presets."""
    preset, *parts = name.split("+")
    for last, presets in _PARTS_UNTIL.items():
        if version <= last:
            named = {kind_of(part) for part in parts}
            old = presets.get(preset, ())
            parts = [*(part for part in old if kind_of(part) not in named), *parts]
    return "+".join((preset, *parts))


def upgraded_problem(path: str, value: Any) -> tuple[str, Any]:
    """Return the class of a planning problem and its value as this version writes them."""
    if path not in _PROBLEMS:
        return path, value
    value = dict(value)
    engines = [_engine(engine) for engine in value.get("engines", ())]
    if engines:
        value["engines"] = engines
    gpu = value.pop("gpu", None) or engines[0]["shape"]["gpu"]
    if "gpus" in value:
        value["pools"] = {gpu: value.pop("gpus")}
    value["by_shape"] = _by_shape(gpu, value.pop("by_tp"))
    return _PROBLEMS[path], value


def upgraded_config(value: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without the section of live agents, which 0.2.0 has not."""
    return {key: section for key, section in value.items() if key != "live"}


def upgraded_context(value: dict[str, Any]) -> dict[str, Any]:
    """Return what a policy knew before the rollout as this version writes it."""
    if "tp_choices" not in value:
        return value
    value = dict(value)
    gpu = value.pop("gpu")
    cost = dict(value["cost"])
    cost["by_shape"] = _by_shape(gpu, cost.pop("by_tp"))
    return value | {
        "pools": {gpu: value.pop("gpus")},
        "shape": {"gpu": gpu, "tp": value.pop("tp")},
        "shape_choices": [{"gpu": gpu, "tp": tp} for tp in value.pop("tp_choices")],
        "mix": [{"gpu": gpu, "tp": tp} for tp in value["mix"]],
        "cost": cost,
    }


def _by_shape(gpu: str, by_tp: dict[str, Any]) -> list[Any]:
    return [[{"gpu": gpu, "tp": int(tp)}, cost] for tp, cost in by_tp.items()]


def upgraded(field: str, value: Any) -> Any:
    """Return the value of a nested field as this version writes it."""
    if field == "resource_plan":
        return _plan(value)
    return value


def _plan(plan: dict[str, Any]) -> dict[str, Any]:
    plan = dict(plan)
    if "believed_makespan_s" in plan:
        plan["estimated_makespan_s"] = plan.pop("believed_makespan_s")
    plan["engines"] = [_engine(engine) for engine in plan["engines"]]
    return plan


def _engine(engine: dict[str, Any]) -> dict[str, Any]:
    if "shape" in engine:
        return engine
    engine = dict(engine)
    engine["shape"] = {"gpu": engine.pop("gpu"), "tp": engine.pop("tp")}
    return engine
