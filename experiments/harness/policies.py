"""Policies for experiments only, as ``experiments.harness.policies:NAME``."""

from dataclasses import replace

from heddle_core.estimate.ordered import Cost
from heddle_core.parts.placement.cache_aware import CacheAware
from heddle_core.parts.placement.presorted import Presorted
from heddle_core.parts.planner import SearchedPlan
from heddle_core.policy import Policy, PolicyContext
from heddle_core.presets import heddle, verl


def batch_only(context: PolicyContext) -> Policy:
    """`heddle` whose plan and placement use the published cost, a function of batch size alone."""
    return _published(context, "paper")


def batch_simulated(context: PolicyContext) -> Policy:
    """The same with `F` from a simulation of the group instead of its size."""
    return _published(context, "paper-simulated")


def _published(context: PolicyContext, cost: Cost) -> Policy:
    return replace(
        heddle(context),
        placement=Presorted(context, cost=cost),
        planner=SearchedPlan(context, solver="exact", cost=cost),
    )


def context_aware(context: PolicyContext) -> Policy:
    """The same exact planner under the context-aware cost."""
    return replace(heddle(context), planner=SearchedPlan(context, solver="exact"))


def annealed(context: PolicyContext) -> Policy:
    """`heddle` with Algorithm 2 for its planner, under the context-aware cost."""
    return replace(heddle(context), planner=SearchedPlan(context, solver="anneal"))


def cache_aware_tight(context: PolicyContext) -> Policy:
    """SGLang's router that leaves a prefix for a difference in load of 4 and 10 %."""
    return replace(verl(context), placement=CacheAware(0.3, 4, 1.1))


def cache_aware_loose(context: PolicyContext) -> Policy:
    """The same router at a difference of 32 and 50 %."""
    return replace(verl(context), placement=CacheAware(0.3, 32, 1.5))
