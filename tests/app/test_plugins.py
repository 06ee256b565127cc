"""Policies and parts by name: ours, installed ones, and factories in modules."""

import json
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from heddle.policies import plugins
from heddle.policies.plugins import (
    PRESETS_THAT_WENT,
    PolicyError,
    PolicyNotFound,
    installed_policies,
    load_policy,
)
from heddle_core.parts.placement.load_and_pin import Sticky
from heddle_core.policy import Placement, Policy, Scheduler
from heddle_core.presets import PRESETS, verl
from tests.app.journals import ONE_RUN, Heddle, run_of
from tests.core.policy_fakes import policy_context


def own_policy(context):
    return verl(context)


class ShortestPromptFirst:
    preemptive = False

    def priority(self, t, remaining_tokens):
        return -t.prompt_tokens


def own_order(context) -> Scheduler:
    return ShortestPromptFirst()


def broken_policy(context):
    raise RuntimeError("no tables at home")


def not_a_policy(context):
    return "verl"


def broken_part(context) -> Scheduler:
    raise RuntimeError("no tables at home")


def unreadable(context) -> "Schedular":  # noqa: F821 -- the mistake that is tested
    return ShortestPromptFirst()


class HalfAPlacement:
    needs_all = False

    def place(self, t):
        return t.home


def half_a_placement(context) -> Placement:
    return HalfAPlacement()


class HalfABacklog(Sticky):
    def release(self, view):
        return []


def half_a_backlog(context) -> Placement:
    return HalfABacklog()


class HalfAPredictor:
    def served(self):
        return False

    def remaining_tokens(self, t):
        return 1.0


def half_a_policy(context):
    return replace(verl(context), placement=HalfAPlacement(), predictor=HalfAPredictor())


class Longest(Scheduler):
    preemptive = False

    def __init__(self, context):
        self.slots = context.max_running

    def priority(self, t, remaining_tokens):
        return remaining_tokens


not_even_callable = 7


@pytest.fixture
def offered(monkeypatch):
    """Pretend that an installed package offers these entry points."""

    def offer(group=plugins.ENTRY_POINTS, **points):
        found = EntryPoints(
            EntryPoint(name=name.replace("_", "-"), value=value, group=group)
            for name, value in points.items()
        )
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **by: found.select(**by))

    return offer


def test_an_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(PolicyNotFound, match=r"Did you mean 'verl-star'\?") as caught:
        load_policy("verl-sta", policy_context())
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize(("name", "now"), PRESETS_THAT_WENT.items())
def test_a_preset_that_went_is_refused_with_its_name_of_today(name: str, now: str):
    with pytest.raises(PolicyNotFound, match=re.escape(f"the preset {name!r} is {now!r} now")):
        load_policy(f"{name}+oracle", policy_context())
    load_policy(now, policy_context())


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


def test_a_class_declares_its_kind_by_its_protocol():
    scheduler = load_policy(f"verl+{__name__}:Longest", policy_context()).scheduler
    assert isinstance(scheduler, Longest)
    assert scheduler.slots == 100


def test_all_that_a_part_lacks_is_said_at_once():
    with pytest.raises(PolicyError) as caught:
        load_policy(f"verl+{__name__}:half_a_placement", policy_context())
    said = str(caught.value)
    assert "placement HalfAPlacement lacks the method assign(ts, remaining, view)" in said
    assert "has place(t), which should be place(t, view)" in said
    assert "lacks the method finished(t)" in said
    assert "needs_all" not in said


def test_a_part_with_one_of_the_further_methods_needs_the_others():
    with pytest.raises(PolicyError) as caught:
        load_policy(f"verl+{__name__}:half_a_backlog", policy_context())
    said = str(caught.value)
    assert "placement HalfABacklog lacks the property review_s" in said
    assert "has release(view), which should be release(backlog, view)" in said


def test_all_that_a_policy_lacks_is_said_at_once():
    with pytest.raises(PolicyError) as caught:
        load_policy(f"{__name__}:half_a_policy", policy_context())
    said = str(caught.value)
    assert "predictor HalfAPredictor has a method served, which should be a property" in said
    for method in ("observe_step(t, event)", "observe_tool(t, event)", "observe_finish(t)"):
        assert f"predictor HalfAPredictor lacks the method {method}" in said
    assert "placement HalfAPlacement lacks the method finished(t)" in said


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        (
            f"verl+{__name__}:not_a_policy",
            PolicyError,
            "declares no kind of part. Annotate its return as one of Predictor",
        ),
        (f"verl+{__name__}:broken_part", PolicyError, "cannot be built: RuntimeError"),
        (f"verl+{__name__}:unreadable", PolicyError, "annotations cannot be read: NameError"),
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
    offered(group=plugins.PART_ENTRY_POINTS, short_prompts=f"{__name__}:own_order")
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


MARKS = """
from pathlib import Path
from heddle_core.presets import PRESETS
Path("imported").write_text("x")
def policy(context):
    return PRESETS["verl"](context)
"""


def test_code_that_a_run_directory_names_is_imported_by_leave_only(
    heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch
):
    Path("marks_import.py").write_text(MARKS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    name = "marks_import:policy"
    done = heddle(*ONE_RUN, trace, "--gpus", 2, "--policies", f"{name}+lpt", "--json")
    run = run_of(done)["run"]
    Path("imported").unlink()
    sys.modules.pop("marks_import")
    said = f"Error: {run}: its configuration names {name}, which would be imported and called."
    for command in (
        ("replay", run),
        ("replay", run, "--allow-policy", "other:policy"),
        ("report", run, "-o", "page.html"),
        ("trace", "extract", run, "-o", "t.jsonl"),
    ):
        done = heddle(*command)
        if command[0] == "replay":
            assert done.exit_code == 2
            assert done.stderr == f"{said} If you trust this code, add --allow-policy {name}\n"
        else:
            assert done.exit_code == 0, done.output
        assert not Path("imported").exists()
    allowed = heddle("replay", run, "--allow-policy", name)
    assert allowed.exit_code == 0, allowed.output
    assert Path("imported").exists()


def test_a_checked_run_imports_code_by_leave_only(heddle: Heddle, trace: Path):
    policy = f"verl+{__name__}:own_order"
    done = heddle("run", trace, "--policy", policy, "--set", "runtime.time_scale=0.001", "--json")
    assert done.exit_code == 0, done.output
    run = json.loads(done.stdout)["run"]
    refused = heddle("profile", "check", run)
    assert refused.exit_code == 2
    assert f"add --allow-policy {__name__}:own_order" in refused.stderr
    allowed = heddle("profile", "check", run, "--allow-policy", f"{__name__}:own_order")
    assert allowed.exit_code == 0, allowed.output
