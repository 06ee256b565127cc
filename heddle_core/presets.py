"""Named policies.

A preset is one function below and one line in `PRESETS`. Its paragraph in ``docs/policies.md``
states what of the original is modelled. `heddle.policies.plugins` finds policies and parts of
other packages.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from heddle_core.parts import admission, migration, planner, predictor, scheduler
from heddle_core.parts.consolidation import TailConsolidation
from heddle_core.parts.placement.affinity import Affinity, TaggedAffinity
from heddle_core.parts.placement.buckets import Buckets
from heddle_core.parts.placement.cache_aware import CacheAware
from heddle_core.parts.placement.kv_budget import KvBudget
from heddle_core.parts.placement.load_and_pin import (
    HybridRatio,
    LeastLoaded,
    SharedKv,
    Sticky,
    StickyGroup,
    StickyLeastSessions,
)
from heddle_core.parts.placement.pause_restore import PauseRestore
from heddle_core.parts.placement.prefill_and_held import PrefillAndHeld
from heddle_core.parts.placement.presorted import Presorted
from heddle_core.parts.placement.program_scheduling import ProgramScheduling
from heddle_core.parts.placement.progress_ttl import ProgressTtl
from heddle_core.parts.placement.request_window import RequestWindow
from heddle_core.parts.placement.weighted_scores import WeightedScores
from heddle_core.parts.table import learned, next_round, progressive
from heddle_core.policy import Placement, Policy, PolicyContext

Factory: TypeAlias = Callable[[PolicyContext], Policy]


def _baseline(context: PolicyContext, placement: Placement) -> Policy:
    """Return what all baselines share: no prediction, first come, no migration, one TP degree."""
    return Policy(
        predictor=predictor.NoPrediction(),
        scheduler=scheduler.Fcfs(),
        admission=admission.PromptOnly(),
        placement=placement,
        migration=migration.Never(),
        planner=planner.FixedPlan(context),
    )


def slime(context: PolicyContext) -> Policy:
    """slime as the Heddle paper describes it: every step to the least loaded engine."""
    return _baseline(context, LeastLoaded())


def verl(context: PolicyContext) -> Policy:
    """verl as the Heddle paper describes it: pinned where it first ran."""
    return _baseline(context, Sticky())


def verl_affinity(context: PolicyContext) -> Policy:
    """verl with the samples of a prompt on one engine: affinity by the prefix that they share."""
    return _baseline(context, StickyGroup())


def verl_star(context: PolicyContext) -> Policy:
    """verl* of the Heddle paper: pinned, least loaded while max/min load exceeds 32."""
    return _baseline(context, HybridRatio(ratio=32.0))


def verl_2026(context: PolicyContext) -> Policy:
    """verl of September 2026: a table of 10,000 pins; new ones to any of the fewest in flight."""
    return _baseline(context, Sticky(capacity=10_000, seed=context.seed))


def verl_margin(context: PolicyContext) -> Policy:
    """The same as proposed in verl#7435 (open): pins break at 2 more in flight than the fewest."""
    return _baseline(context, Sticky(capacity=10_000, margin=2, seed=context.seed))


def slime_2026(context: PolicyContext) -> Policy:
    """slime of August 2026: SGLang's cache-aware router with its defaults 0.3 / 64 / 1.5."""
    return _baseline(context, CacheAware(cache_threshold=0.3, balance_abs=64, balance_rel=1.5))


def sticky_least_loaded(context: PolicyContext) -> Policy:
    """vllm-router of September 2026: pinned; new trajectories to the fewest unfinished ones."""
    return _baseline(context, StickyLeastSessions())


def prime_rl(context: PolicyContext) -> Policy:
    """prime-rl of September 2026: trajectories at once by KV in use, waiting steps, preemptions."""
    return _baseline(context, KvBudget(context))


def fireworks_aimd(context: PolicyContext) -> Policy:
    """Fireworks' cookbook of 2026: requests in flight by AIMD on the wait for a prefill; pinned."""
    return _baseline(context, RequestWindow())


def libra_cmlfq(context: PolicyContext) -> Policy:
    """C-MLFQ of Libra's paper: tool results choose the TP degree, and KV moves along."""
    return replace(
        _baseline(context, Buckets()),
        migration=migration.Carry(context),
        planner=planner.SharesPlan(context),
    )


def libra_cmlfq_release(context: PolicyContext) -> Policy:
    """C-MLFQ as Libra released it in August 2026: a move is a prefill on the new engine."""
    buckets = Buckets(exceed_limit=True, totals_when_unknown=True)
    return replace(_baseline(context, buckets), planner=planner.SharesPlan(context))


def continuum(context: PolicyContext) -> Policy:
    """Continuum: KV stays through a tool call for a time that pays; trajectories in their order."""
    return replace(
        _baseline(context, Sticky()),
        scheduler=scheduler.ProgramFcfs(),
        admission=admission.TimeToLive(context),
    )


def thunderagent(context: PolicyContext) -> Policy:
    """ThunderAgent: trajectories pause where their KV would not fit, and go on where it does."""
    return _baseline(context, PauseRestore())


def seer(context: PolicyContext) -> Policy:
    """Seer: steps in chunks on any engine, a probe of each group first, then the longest groups."""
    return replace(
        _baseline(context, SharedKv(context)),
        predictor=predictor.GroupPredictor(),
        scheduler=scheduler.ProbesFirst(),
        admission=admission.InChunks(),
    )


def program_scheduling(context: PolicyContext) -> Policy:
    """Program scheduling of vllm-router 0.1.17: admission by KV, KV kept in tools for a time."""
    return _baseline(context, ProgramScheduling(context))


def progress_ttl(context: PolicyContext) -> Policy:
    """Progress-TTL of vllm-router 0.1.17: program scheduling with KV reserved for growth."""
    return _baseline(context, ProgressTtl(context))


def uniboost(context: PolicyContext) -> Policy:
    """UniBoost in SGLang (sglang#35637, open): slime-2026, short prefills a little earlier."""
    return replace(slime_2026(context), scheduler=scheduler.UniBoost())


def llm_d(context: PolicyContext) -> Policy:
    """llm-d's endpoint picker of 2026: waiting steps, free KV and prefix, weighted 2 / 2 / 3."""
    return _baseline(context, WeightedScores())


def dynamo(context: PolicyContext) -> Policy:
    """Dynamo's KV router, 1.2 to 1.6: least prefill blocks plus blocks of the steps in flight."""
    return _baseline(context, PrefillAndHeld(context))


def rollart(context: PolicyContext) -> Policy:
    """RollArt's affinity: tasks to the GPU class of their tag, to others when it is full."""
    return _baseline(context, TaggedAffinity(context))


def rollart_measured(context: PolicyContext) -> Policy:
    """The same without tags: tasks to the GPU class that suits their prefill and decode."""
    return _baseline(context, Affinity(context))


def heddle(context: PolicyContext) -> Policy:
    """Our best configuration: no oracle, engines widened and balanced while it runs."""
    return Policy(
        predictor=learned(context),
        scheduler=scheduler.LongestTotal(),
        admission=next_round(context),
        placement=Presorted(context),
        migration=migration.Balance(context),
        planner=planner.EqualProgressPlan(context),
        consolidation=TailConsolidation(context),
    )


def heddle_paper(context: PolicyContext) -> Policy:
    """Heddle as in arXiv 2603.28101, with our untrained predictor as an awaited service."""
    return Policy(
        predictor=predictor.Served(progressive(context), awaited=True),
        scheduler=scheduler.ProgressivePriority(),
        admission=admission.PromptOnly(),
        placement=Presorted(context, cost="paper-simulated"),
        migration=migration.FollowRank(context),
        planner=planner.SearchedPlan(
            context,
            solver="anneal",
            cost="paper-simulated",
            assignment="ranked",
            least_full_slots=0.25,
        ),
    )


PRESETS: Mapping[str, Factory] = {
    "slime": slime,
    "verl": verl,
    "verl-affinity": verl_affinity,
    "verl-star": verl_star,
    "verl-2026": verl_2026,
    "verl-margin": verl_margin,
    "slime-2026": slime_2026,
    "sticky_least_loaded": sticky_least_loaded,
    "prime-rl": prime_rl,
    "fireworks-aimd": fireworks_aimd,
    "libra-cmlfq": libra_cmlfq,
    "libra-cmlfq-release": libra_cmlfq_release,
    "continuum": continuum,
    "thunderagent": thunderagent,
    "seer": seer,
    "program-scheduling": program_scheduling,
    "progress-ttl": progress_ttl,
    "uniboost": uniboost,
    "llm-d": llm_d,
    "dynamo": dynamo,
    "rollart": rollart,
    "rollart-measured": rollart_measured,
    "heddle": heddle,
    "heddle-paper": heddle_paper,
}


ADAPTIVE: Final = "adaptive"
"""After any policy's name: `adaptive`."""


def adaptive(policy: Policy, context: PolicyContext) -> Policy:
    """The policy with as many running steps as KV allows, for engines with more slots than that.

    A step runs where KV for it and what its tool appends is free, and KV stays through tool calls.
    Steps that the policy serves as they come are served by the arrival of their trajectory, so that
    those under way end first.
    """
    order = policy.scheduler
    return replace(
        policy,
        admission=next_round(context),
        scheduler=scheduler.ProgramFcfs() if isinstance(order, scheduler.Fcfs) else order,
    )


def about(name: str) -> str:
    """Return the one line that describes a preset."""
    return (PRESETS[name].__doc__ or "").strip().partition("\n")[0]
