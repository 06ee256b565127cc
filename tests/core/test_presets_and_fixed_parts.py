import ast
import dataclasses
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import heddle_core.presets as presets
from heddle_core.parts.migration.never import Never
from heddle_core.parts.placement.sticky import Sticky
from heddle_core.parts.planner.fixed import FixedPlan
from heddle_core.parts.predictor.none import NoPrediction
from heddle_core.parts.table import DECIDES, PARTS, kind_by_method
from heddle_core.policy import Policy
from heddle_core.presets import (
    PRESETS,
    PolicyError,
    PolicyNotFound,
    about,
    installed_policies,
    load_policy,
)
from tests.core.policy_fakes import policy_context, trajectory, view_of

CORE = Path(presets.__file__).parent
PAGES = CORE.parent / "docs" / "policies"


def own_policy(s):
    return load_policy("verl", s)


class ShortestPromptFirst:
    preemptive = False

    def priority(self, t, remaining_tokens):
        return -t.prompt_tokens


def own_order(s):
    return ShortestPromptFirst()


def broken_policy(s):
    raise RuntimeError("no tables at home")


def not_a_policy(s):
    return "verl"


not_even_callable = 7


@pytest.fixture
def offered(monkeypatch):
    """Pretend that an installed package offers these entry points."""

    def offer(group=presets.ENTRY_POINTS, **points):
        found = EntryPoints(
            EntryPoint(name=name.replace("_", "-"), value=value, group=group)
            for name, value in points.items()
        )
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **by: found.select(**by))

    return offer


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_describes_itself_and_has_a_page(name):
    policy = load_policy(name, policy_context())
    assert isinstance(policy, Policy)
    assert len(about(name)) > 20
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# `{name}`")
    for heading in ("## What is modelled", "## What is not", "## Where it was read"):
        assert heading in page
    assert f"[`{name}`]({name}.md)" in (PAGES / "index.md").read_text(encoding="utf-8")


def test_two_runs_never_share_a_part():
    first, second = load_policy("verl", policy_context()), load_policy("verl", policy_context())
    assert first.placement is not second.placement


def defines_part(path: Path, method: str) -> bool:
    """Whether the file holds a class, other than a Protocol, with the kind's deciding method."""
    classes = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases)
    ]
    return any(isinstance(d, ast.FunctionDef) and d.name == method for c in classes for d in c.body)


@pytest.mark.parametrize("kind", PARTS)
def test_the_list_of_parts_reaches_every_file_that_holds_one(kind):
    files = [p.stem for p in (CORE / "parts" / kind).glob("*.py") if defines_part(p, DECIDES[kind])]
    parts = [part.make(policy_context()) for part in PARTS[kind].values()]
    listed = {type(part).__module__.rpartition(".")[2] for part in parts}
    assert listed == set(files)
    assert {kind_by_method(part) for part in parts} == {kind}


def test_an_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(PolicyNotFound, match=r"Did you mean 'verl-star'\?") as caught:
        load_policy("verl-sta", policy_context())
    assert all(name in str(caught.value) for name in PRESETS)


def test_a_name_like_no_other_gets_no_hint():
    with pytest.raises(PolicyNotFound) as caught:
        load_policy("zzzzzz", policy_context())
    assert "Did you mean" not in str(caught.value)


def test_a_factory_is_named_by_module_and_function():
    assert isinstance(load_policy(f"{__name__}:own_policy", policy_context()).placement, Sticky)


def test_a_part_is_named_by_module_and_function():
    policy = load_policy(f"verl+{__name__}:own_order+never", policy_context())
    assert isinstance(policy.scheduler, ShortestPromptFirst)
    assert isinstance(policy.placement, Sticky)


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (f"verl+{__name__}:not_a_policy", PolicyError, "returned str, which decides nothing"),
        (f"verl+{__name__}:broken_policy", PolicyError, "cannot be built: RuntimeError"),
        (f"verl+{__name__}:missing", PolicyNotFound, "has no 'missing'"),
        ("verl+longest_tota", PolicyNotFound, "no part is called .* Did you mean 'longest_total'"),
        ("verl+", PolicyNotFound, "no part is called ''"),
        (f"{__name__}:broken_policy", PolicyError, "RuntimeError: no tables at home"),
        (f"{__name__}:not_a_policy", PolicyError, "returned str"),
        (f"{__name__}:not_even_callable", PolicyError, "is int, not a function"),
        (f"{__name__}:missing", PolicyNotFound, "has no 'missing'"),
        ("no_such_module_anywhere:policy", PolicyError, "cannot import no_such_module_anywhere"),
        (":policy", PolicyNotFound, "not of the form"),
        ("module:", PolicyNotFound, "not of the form"),
    ],
)
def test_a_factory_that_cannot_be_used_is_explained(name, kind, says):
    with pytest.raises(kind, match=says):
        load_policy(name, policy_context())


def test_an_installed_package_offers_a_policy(offered):
    offered(house_blend=f"{__name__}:own_policy")
    assert installed_policies() == ("house-blend",)
    assert isinstance(load_policy("house-blend", policy_context()), Policy)
    with pytest.raises(PolicyNotFound, match="Did you mean 'house-blend'"):
        load_policy("house-blen", policy_context())


def test_an_installed_package_offers_a_part(offered):
    offered(group=presets.PART_ENTRY_POINTS, short_prompts=f"{__name__}:own_order")
    assert isinstance(
        load_policy("verl+short-prompts", policy_context()).scheduler, ShortestPromptFirst
    )


def test_a_preset_cannot_be_shadowed_by_an_installed_package(offered):
    offered(verl=f"{__name__}:broken_policy")
    assert isinstance(load_policy("verl", policy_context()), Policy)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module_anywhere:policy", "fails to load: ModuleNotFoundError"),
        (f"{__name__}:not_even_callable", "is int, not a function"),
    ],
)
def test_a_broken_offer_is_explained(offered, value, says):
    offered(broken=value)
    with pytest.raises(PolicyError, match=says):
        load_policy("broken", policy_context())


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
