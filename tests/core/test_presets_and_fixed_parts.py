import dataclasses
from abc import ABC
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

import heddle_core.presets as presets
from heddle.policies.plugins import PolicyError, load_part, load_policy
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import Sticky
from heddle_core.parts.planner import FixedPlan
from heddle_core.parts.predictor import NoPrediction
from heddle_core.parts.table import KINDS, PARTS, Kind, kind_of
from heddle_core.policy import NoConsolidation, Policy
from heddle_core.presets import PRESETS, about
from tests.core.policy_fakes import policy_context, trajectory, view_of

CORE = Path(presets.__file__).parent
PAGE = (CORE.parent / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_describes_itself_and_has_a_paragraph(name):
    policy = load_policy(name, policy_context())
    assert isinstance(policy, Policy)
    assert len(about(name)) > 20
    assert f"| [`{name}`](#{name}) |" in PAGE
    paragraph = PAGE.partition(f"\n### `{name}`\n")[2].partition("\n### ")[0]
    for said in ("*Not modelled:*", "*Read:*"):
        assert said in " ".join(paragraph.split())


def test_two_runs_never_share_a_part():
    first, second = load_policy("verl", policy_context()), load_policy("verl", policy_context())
    assert first.placement is not second.placement


DECIDES: dict[Kind, str] = {
    "predictor": "remaining_tokens",
    "scheduler": "priority",
    "admission": "reserve_tokens",
    "placement": "place",
    "migration": "target",
    "planner": "plan",
    "consolidation": "consolidate",
}


def parts_in(kind: Kind) -> Iterator[type]:
    """The classes in the modules of a kind that can decide."""
    package = f"heddle_core.parts.{kind}"
    modules = [import_module(package)]
    names = iter_modules(getattr(modules[0], "__path__", ()))
    modules += [import_module(f"{package}.{found.name}") for found in names]
    for module in modules:
        for cls in vars(module).values():
            own = isinstance(cls, type) and cls.__module__ == module.__name__
            if own and hasattr(cls, DECIDES[kind]) and ABC not in cls.__bases__:
                yield cls


@pytest.mark.parametrize("kind", KINDS)
def test_the_list_of_parts_has_every_class_that_is_one(kind):
    assert all(kind_of(name) == kind for name in PARTS.of(kind))
    parts = [load_part(name, policy_context())[1] for name in PARTS.of(kind)]
    # Beside `Policy` is the consolidation that it has by default.
    assert {type(part) for part in parts} - {NoConsolidation} == set(parts_in(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_ones_own_may_derive_from_any_compiled_or_not(kind):
    assert all(type("Own", (cls,), {}) for cls in parts_in(kind))


def test_the_fixed_plan_gives_every_gpu_to_engines_of_one_tp_degree():
    plan = FixedPlan(policy_context(gpus=8, tp=2)).plan((), ())
    assert [(e.engine, e.shape.tp, e.max_running) for e in plan.engines] == [
        ("e0", 2, 100),
        ("e1", 2, 100),
        ("e2", 2, 100),
        ("e3", 2, 100),
    ]
    assert plan.homes == ()


@pytest.mark.parametrize(("gpus", "tp"), [(8, 3), (2, 4), (8, 0)])
def test_gpus_that_do_not_divide_are_refused(gpus, tp):
    with pytest.raises(PolicyError, match="do not divide"):
        load_policy("slime", policy_context(gpus=gpus, tp=tp))


def test_parts_mix_as_an_ablation():
    mixed = dataclasses.replace(load_policy("slime", policy_context()), placement=Sticky())
    assert mixed.placement.place(trajectory("a"), view_of(1, 0)) == "e1"


def test_no_prediction_and_no_migration():
    t, view = trajectory("a", home="e0"), view_of(9, 0)
    predictor = NoPrediction()
    predictor.observe_step(t, None)
    predictor.observe_tool(t, None)
    predictor.observe_finish(t)
    assert predictor.remaining_tokens(t) == 0.0
    assert not predictor.served
    assert Never().target(t, 0.0, view) is None
