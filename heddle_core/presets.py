"""Named policies, and how a name becomes a policy.

A preset is one function below and one line in `PRESETS`; its page under ``docs/policies/`` says
what of the original is modelled. Nothing registers itself: a policy of another package is reached
through the entry-point group ``heddle.policies``, a part through ``heddle.parts``, and either as
``package.module:factory``; docs/write-a-policy.md shows how.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, TypeAlias

from heddle_core.parts.admission.prompt_only import PromptOnly
from heddle_core.parts.admission.reserve_output import ReserveOutput
from heddle_core.parts.migration.balance import Balance
from heddle_core.parts.migration.follow_rank import FollowRank
from heddle_core.parts.migration.never import Never
from heddle_core.parts.placement.cache_aware import CacheAware
from heddle_core.parts.placement.hybrid_ratio import HybridRatio
from heddle_core.parts.placement.least_loaded import LeastLoaded
from heddle_core.parts.placement.presorted import Presorted
from heddle_core.parts.placement.sticky import Sticky
from heddle_core.parts.planner.fixed import FixedPlan
from heddle_core.parts.planner.searched import SearchedPlan
from heddle_core.parts.predictor.none import NoPrediction
from heddle_core.parts.predictor.served import Served
from heddle_core.parts.scheduler.fcfs import Fcfs
from heddle_core.parts.scheduler.longest_total import LongestTotal
from heddle_core.parts.scheduler.progressive_priority import ProgressivePriority
from heddle_core.parts.table import (
    DECIDES,
    PARTS,
    Part,
    kind_by_method,
    kind_of,
    learned,
    progressive,
)
from heddle_core.policy import Placement, Policy, PolicyContext

Factory: TypeAlias = Callable[[PolicyContext], Policy]

ENTRY_POINTS = "heddle.policies"
PART_ENTRY_POINTS = "heddle.parts"


class PolicyError(ValueError):
    """A policy was found but cannot be used."""


class PolicyNotFound(ValueError):  # noqa: N818 -- reads as what happened
    """No policy has this name; the message lists the known ones."""


def _baseline(context: PolicyContext, placement: Placement) -> Policy:
    """Return what all baselines share: no prediction, first come, no migration, one TP degree."""
    return Policy(
        predictor=NoPrediction(),
        scheduler=Fcfs(),
        admission=PromptOnly(),
        placement=placement,
        migration=Never(),
        planner=FixedPlan(context),
    )


def slime(context: PolicyContext) -> Policy:
    """slime as the Heddle paper describes it: every step to the least loaded engine."""
    return _baseline(context, LeastLoaded())


def verl(context: PolicyContext) -> Policy:
    """verl as the Heddle paper describes it: pinned where it first ran."""
    return _baseline(context, Sticky())


def verl_star(context: PolicyContext) -> Policy:
    """verl* of the Heddle paper: pinned, least loaded while max/min load exceeds 32."""
    return _baseline(context, HybridRatio(ratio=32.0))


def verl_2026(context: PolicyContext) -> Policy:
    """verl of August 2026: a table of 10,000 pins; new trajectories to the fewest in flight."""
    return _baseline(context, Sticky(capacity=10_000))


def slime_2026(context: PolicyContext) -> Policy:
    """slime of August 2026: SGLang's cache-aware router with its defaults 0.3 / 64 / 1.5."""
    return _baseline(context, CacheAware(cache_threshold=0.3, balance_abs=64, balance_rel=1.5))


def heddle(context: PolicyContext) -> Policy:
    """Our best honest configuration: no oracle, KV-aware, planned, balanced as it runs."""
    return Policy(
        predictor=learned(context),
        scheduler=LongestTotal(),
        admission=ReserveOutput(context),
        placement=Presorted(context),
        migration=Balance(context),
        planner=SearchedPlan(context, solver="portfolio"),
    )


def heddle_paper(context: PolicyContext) -> Policy:
    """Heddle to the letter of arXiv 2603.28101, with our untrained predictor as a service."""
    return Policy(
        predictor=Served(progressive(context)),
        scheduler=ProgressivePriority(),
        admission=PromptOnly(),
        placement=Presorted(context, cost="paper"),
        migration=FollowRank(),
        planner=SearchedPlan(context, solver="anneal", cost="paper", assignment="planner"),
    )


def heddle_no_migration(context: PolicyContext) -> Policy:
    """`heddle` whose homes never move."""
    return replace(heddle(context), migration=Never())


def heddle_no_plan(context: PolicyContext) -> Policy:
    """`heddle` on engines of one TP degree, the baselines'."""
    return replace(heddle(context), planner=FixedPlan(context))


def heddle_no_priority(context: PolicyContext) -> Policy:
    """`heddle` with queues by arrival and no headroom: the engine decides when, as in vLLM."""
    return replace(heddle(context), scheduler=Fcfs(), admission=PromptOnly())


def heddle_no_placement(context: PolicyContext) -> Policy:
    """`heddle` with verl's pins for homes, which never move."""
    engines_only = SearchedPlan(context, solver="portfolio", assignment="placement")
    return replace(heddle(context), placement=Sticky(), migration=Never(), planner=engines_only)


PRESETS: Mapping[str, Factory] = {
    "slime": slime,
    "verl": verl,
    "verl-star": verl_star,
    "verl-2026": verl_2026,
    "slime-2026": slime_2026,
    "heddle": heddle,
    "heddle-paper": heddle_paper,
    "heddle-no-migration": heddle_no_migration,
    "heddle-no-plan": heddle_no_plan,
    "heddle-no-priority": heddle_no_priority,
    "heddle-no-placement": heddle_no_placement,
}


def load_policy(
    name: str, context: PolicyContext, *, extra: Mapping[str, Part] = MappingProxyType({})
) -> Policy:
    """Return the policy called `name`, fresh.

    `name` is a preset, an entry point or ``package.module:factory``; after it, ``+PART`` puts a
    part in place of the preset's own: ``heddle+never``, ``verl+lpt+progressive``. A part
    is named as a policy is: one of ours, an entry point, or ``package.module:factory``. `extra`
    adds predictors that only the caller can make, such as an oracle.

    Raises:
        PolicyNotFound: nothing has this name; the message lists the known ones and the nearest.
        PolicyError: it was found, but importing or calling it failed or gave something else.
    """
    base, *parts = name.split("+")
    factory = PRESETS.get(base) or _installed(base)
    if factory is None and ":" in base:
        factory = _imported(base)
    if factory is None:
        raise PolicyNotFound(_unknown(base))
    try:
        policy = factory(context)
    except Exception as error:
        raise PolicyError(f"policy {base!r} cannot be built: {_said(error)}") from error
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"policy {base!r}: its factory returned {type(policy).__name__}, "
            "not heddle_core.policy.Policy"
        )
    return replace(policy, **dict(load_part(part, context, extra=extra) for part in parts))


def load_part(
    name: str, context: PolicyContext, *, extra: Mapping[str, Part] = MappingProxyType({})
) -> tuple[str, Any]:
    """Return the field of `Policy` that a part fills, and the part, fresh.

    Raises:
        PolicyNotFound: nothing has this name.
        PolicyError: it was found, but cannot be used.
    """
    kind = kind_of(name, extra)
    make: Callable[[PolicyContext], Any] | None
    if kind is not None:
        make = extra[name].make if name in extra else PARTS[kind][name].make
    else:
        make = _installed(name, PART_ENTRY_POINTS) or (_imported(name) if ":" in name else None)
    if make is None:
        known = [*extra, *(n for parts in PARTS.values() for n in parts)]
        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PolicyNotFound(f"no part is called {name!r}.{hint} Parts: {', '.join(known)}")
    try:
        part = make(context)
    except Exception as error:
        raise PolicyError(f"part {name!r} cannot be built: {_said(error)}") from error
    kind = kind or kind_by_method(part)
    if kind is None:
        raise PolicyError(
            f"part {name!r}: its factory returned {type(part).__name__}, which decides nothing: a "
            f"part has one of the methods {', '.join(DECIDES.values())}"
        )
    return kind, part


def installed_policies() -> tuple[str, ...]:
    """Names that installed packages offer in the entry-point group, in alphabetical order."""
    # Imported here because it costs more than the rest of the core, and few runs ask for it.
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=ENTRY_POINTS).names))


def about(name: str) -> str:
    """Return the one line that describes a preset."""
    return (PRESETS[name].__doc__ or "").strip().partition("\n")[0]


def _installed(name: str, group: str = ENTRY_POINTS) -> Callable[[PolicyContext], Any] | None:
    from importlib.metadata import entry_points

    for point in entry_points(group=group, name=name):
        try:
            return _callable(point.load(), name)
        except PolicyError:
            raise
        except Exception as error:
            raise PolicyError(
                f"{name!r} is offered as {point.value!r}, which fails to load: {_said(error)}"
            ) from error
    return None


def _imported(name: str) -> Callable[[PolicyContext], Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PolicyNotFound(f"{name!r} is not of the form package.module:factory")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise PolicyError(f"{name!r}: cannot import {module_name}: {_said(error)}") from error
    if not hasattr(module, attribute):
        raise PolicyNotFound(f"{name!r}: module {module_name} has no {attribute!r}")
    return _callable(getattr(module, attribute), name)


def _callable(found: object, name: str) -> Callable[[PolicyContext], Any]:
    if not callable(found):
        raise PolicyError(
            f"{name!r} is {type(found).__name__}, not a function that takes a PolicyContext"
        )
    return found


def _unknown(name: str) -> str:
    known = [*PRESETS, *(p for p in installed_policies() if p not in PRESETS)]
    nearest = get_close_matches(name, known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return (
        f"no policy is called {name!r}.{hint} Known: {', '.join(known)}; "
        "or name your own as package.module:factory."
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
