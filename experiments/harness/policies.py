"""Policies for experiments only, as ``experiments.harness.policies:NAME``."""

from dataclasses import replace

from heddle_core.place.cache_aware import CacheAware
from heddle_core.place.presorted import Presorted
from heddle_core.plan.searched import SearchedPlan
from heddle_core.policy import Policy, Setting
from heddle_core.presets import heddle, verl


def batch_only(setting: Setting) -> Policy:
    """`heddle` whose plan and placement use the published cost, a function of batch size alone."""
    return replace(
        heddle(setting),
        placement=Presorted(setting, cost="paper"),
        planner=SearchedPlan(setting, solver="exact", cost="paper"),
    )


def context_aware(setting: Setting) -> Policy:
    """The same exact planner under the context-aware cost."""
    return replace(heddle(setting), planner=SearchedPlan(setting, solver="exact"))


def annealed(setting: Setting) -> Policy:
    """`heddle` with Algorithm 2 for its planner, under the context-aware cost."""
    return replace(heddle(setting), planner=SearchedPlan(setting, solver="anneal"))


def cache_aware_tight(setting: Setting) -> Policy:
    """SGLang's router that leaves a prefix for a difference in load of 4 and 10 %."""
    return replace(verl(setting), placement=CacheAware(0.3, 4, 1.1))


def cache_aware_loose(setting: Setting) -> Policy:
    """The same router at a difference of 32 and 50 %."""
    return replace(verl(setting), placement=CacheAware(0.3, 32, 1.5))
