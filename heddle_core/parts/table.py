"""Every part by name: what `PRESET+PART` in a policy's name can put in a preset's place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar, get_args

from heddle_core.parts import admission, migration, planner, predictor, scheduler
from heddle_core.parts.consolidation import TailConsolidation
from heddle_core.parts.placement.affinity import Affinity, TaggedAffinity
from heddle_core.parts.placement.buckets import Buckets
from heddle_core.parts.placement.cache_aware import CacheAware
from heddle_core.parts.placement.consistent_hash import ConsistentHash
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
from heddle_core.policy import (
    Admission,
    Consolidation,
    Migration,
    NoConsolidation,
    Placement,
    Planner,
    PolicyContext,
    Predictor,
    Scheduler,
)

Kind: TypeAlias = Literal[
    "predictor", "scheduler", "admission", "placement", "migration", "planner", "consolidation"
]
"""A kind of part: the field of `Policy` that it fills."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

P_co = TypeVar("P_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Part(Generic[P_co]):
    """A named part: how it is made, and one line about it."""

    make: Callable[[PolicyContext], P_co]
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    predictor: Mapping[str, Part[Predictor]]
    scheduler: Mapping[str, Part[Scheduler]]
    admission: Mapping[str, Part[Admission]]
    placement: Mapping[str, Part[Placement]]
    migration: Mapping[str, Part[Migration]]
    planner: Mapping[str, Part[Planner]]
    consolidation: Mapping[str, Part[Consolidation]]

    def of(self, kind: Kind) -> Mapping[str, Part[object]]:
        named: Mapping[str, Part[object]] = getattr(self, kind)
        return named


def progressive(context: PolicyContext) -> predictor.ProgressivePredictor:
    """Start from history's mean, with the weight of a hundred ended trajectories."""
    if context.history is None:
        return predictor.ProgressivePredictor()
    typical = max(context.history.mean_output_tokens(), 1.0)
    return predictor.ProgressivePredictor(typical_tokens=typical, typical_weight=100.0)


def learned(context: PolicyContext, *, quantile: float = 0.5) -> Predictor:
    """Use the trained model of the context; without one, `progressive`.

    Raises:
        ValueError: the quantile is not one of the model's.
    """
    if context.learned is None:
        return progressive(context)
    return context.learned(context, quantile=quantile)


def next_round(context: PolicyContext) -> admission.ReserveOutput:
    """Reserve for one mean step and what its tool appends."""
    return admission.ReserveOutput(context, steps=1.0, results=True)


PARTS: Final = Parts(
    predictor={
        "none": Part(lambda _: predictor.NoPrediction(), "expects nothing: 0 tokens left"),
        "group": Part(
            lambda _: predictor.GroupPredictor(), "Seer's rule: longest finished sibling"
        ),
        "history": Part(
            lambda s: predictor.HistoryPredictor(s.history.group_totals if s.history else {}),
            "mean of the same prompt's earlier samples",
        ),
        "prefix_tree": Part(
            lambda _: predictor.PrefixTreePredictor(),
            "Libra's tree: trajectories with the same tool answers",
        ),
        "progressive": Part(progressive, "revised at every step from observations"),
        "posterior": Part(
            lambda s: predictor.PosteriorPredictor(s.history),
            "mean of a calibrated distribution, from survivors and siblings",
        ),
        "learned": Part(learned, "a trained model (predictor_model) for its own tasks"),
        "served": Part(
            lambda s: predictor.Served(progressive(s)),
            "progressive, behind a prediction service that takes time; late answers reorder",
        ),
        "awaited": Part(
            lambda s: predictor.Served(progressive(s), awaited=True),
            "the same service; a step waits for the answer that its tool did not hide",
        ),
    },
    scheduler={
        "fcfs": Part(lambda _: scheduler.Fcfs(), "by arrival of the step, as vLLM and SGLang do"),
        "round_robin": Part(
            lambda _: scheduler.RoundRobin(), "fewest steps done first, ties by arrival"
        ),
        "probes_first": Part(
            lambda _: scheduler.ProbesFirst(),
            "one sample of each prompt, then the longest in all (Seer)",
        ),
        "program_fcfs": Part(
            lambda _: scheduler.ProgramFcfs(),
            "kept KV first, then by arrival of the trajectory (Continuum)",
        ),
        "lpt": Part(lambda _: scheduler.LongestFirst(), "most remaining tokens first (LPT)"),
        "longest_total": Part(
            lambda _: scheduler.LongestTotal(), "most tokens in all first: started ones continue"
        ),
        "sjf": Part(lambda _: scheduler.ShortestFirst(), "fewest remaining tokens first (SJF)"),
        "sjf_aged": Part(
            lambda _: scheduler.ShortestAged(), "the same, but none is passed by much later ones"
        ),
        "progressive_priority": Part(
            lambda _: scheduler.ProgressivePriority(),
            "Algorithm 1: longest first, the head may evict",
        ),
        "autellix": Part(lambda _: scheduler.Autellix(), "least attained service, in levels"),
        "boosted": Part(
            lambda _: scheduler.UniBoost(), "by arrival of the step, little prefill a bit earlier"
        ),
        "by_arrivals": Part(
            lambda _: scheduler.ByArrivals(),
            "longest_total while most came at once, sjf_aged where they come one by one",
        ),
    },
    admission={
        "fitting": Part(lambda _: admission.PromptOnly(), "a prompt's KV must fit, as in vLLM"),
        "headroom": Part(
            admission.ReserveOutput, "KV for the step's output too; KV kept through tool calls"
        ),
        "next_round": Part(
            next_round, "KV for a step and what its tool appends; KV kept through tool calls"
        ),
        "chunks": Part(
            lambda _: admission.InChunks(),
            "KV for a chunk of output, after which a step is placed anew (Seer)",
        ),
        "time_to_live": Part(
            admission.TimeToLive,
            "a prompt's KV must fit; KV kept in a tool while it pays (Continuum)",
        ),
    },
    placement={
        "least_loaded": Part(lambda _: LeastLoaded(), "fewest steps in flight, anew at every step"),
        "sticky": Part(lambda _: Sticky(), "stays where it first ran; new: fewest steps in flight"),
        "sticky_group": Part(
            lambda _: StickyGroup(),
            "stays where it first ran; new: where the other samples of its prompt are",
        ),
        "sticky_least_sessions": Part(
            lambda _: StickyLeastSessions(),
            "stays where it first ran; new: fewest unfinished trajectories",
        ),
        "hybrid_ratio": Part(
            lambda _: HybridRatio(), "stays unless max/min load is too large, then least loaded"
        ),
        "cache_aware": Part(
            lambda _: CacheAware(),
            "longest known prefix while the engines are even, else least loaded",
        ),
        "consistent_hash": Part(
            lambda _: ConsistentHash(), "hash of the trajectory's name on a ring of engines"
        ),
        "buckets": Part(
            lambda _: Buckets(),
            "Libra's C-MLFQ: on engines of its bucket's TP degrees; tool results move it",
        ),
        "buckets_release": Part(
            lambda _: Buckets(exceed_limit=True, totals_when_unknown=True),
            "the same with what Libra's release does about full engines and unknown results",
        ),
        "shared_kv": Part(
            SharedKv,
            "any engine where all share a store of KV (cluster.host_kv), else its home",
        ),
        "pause_restore": Part(
            lambda _: PauseRestore(),
            "ThunderAgent: trajectories pause where their KV would not fit, and wait in a backlog",
        ),
        "kv_budget": Part(
            KvBudget,
            "prime-rl's: trajectories at once by KV in use, waiting steps and preemptions",
        ),
        "request_window": Part(
            lambda _: RequestWindow(),
            "stays where it first ran; requests in flight by AIMD on their wait (Fireworks)",
        ),
        "program_scheduling": Part(
            ProgramScheduling,
            "vllm-router's program scheduling: admission by KV, a backlog, a time-to-live",
        ),
        "progress_ttl": Part(
            ProgressTtl, "the same, with KV reserved for the growth of trajectories that run"
        ),
        "weighted_scores": Part(
            lambda _: WeightedScores(),
            "most of llm-d's scores: few waiting, free KV, the prompt's prefix",
        ),
        "prefill_and_held": Part(
            PrefillAndHeld, "least to prefill plus KV held by steps in flight, in blocks (Dynamo)"
        ),
        "affinity": Part(
            Affinity, "stays; new: on the GPU class that suits its task's prefill and decode"
        ),
        "tagged_affinity": Part(
            TaggedAffinity, "stays; new: on the GPU class of its task's tag (policy.tags; RollArt)"
        ),
        "presorted": Part(Presorted, "longest together, groups cut for the least makespan"),
        "presorted_dealt": Part(
            lambda s: Presorted(s, shared=1.0),
            "the same, samples of a prompt always dealt to engines in turn",
        ),
        "presorted_by_size": Part(
            lambda s: Presorted(s, cost="paper"), "the same under the published cost, F by size"
        ),
    },
    migration={
        "never": Part(lambda _: migration.Never(), "homes never move while a tool runs"),
        "follow_rank": Part(lambda _: migration.FollowRank(), "to the group of the newest rank"),
        "follow_rank_earlier": Part(
            migration.FollowRank,
            "to the group of the newest rank, if the trajectory would end earlier there",
        ),
        "carry": Part(
            migration.Carry,
            "KV goes along where placement changes the home, if that beats a prefill",
        ),
        "balance": Part(migration.Balance, "to where it would end earliest, by estimated work"),
        "balance_batches": Part(
            migration.BalanceBatches, "the same while most trajectories came at once"
        ),
    },
    planner={
        "fixed": Part(planner.FixedPlan, "one TP degree on all GPUs"),
        "given": Part(lambda _: planner.GivenEngines(), "none: a framework starts the engines"),
        "shares": Part(
            planner.SharesPlan, "half of the GPUs at TP 4, a quarter at TP 2, a quarter at TP 1"
        ),
        "equal_progress": Part(
            planner.EqualProgressPlan,
            "one TP degree, or two where homes move; `portfolio` where lengths are known",
        ),
        "one_degree": Part(
            lambda s: planner.EqualProgressPlan(s, mixes=False),
            "the same, never two degrees for a history",
        ),
        "exact": Part(
            lambda s: planner.SearchedPlan(s, solver="exact"),
            "optimal mix and groups under the cost estimate",
        ),
        "portfolio": Part(
            lambda s: planner.SearchedPlan(s, solver="portfolio"), "the best of several, simulated"
        ),
        "anneal": Part(
            lambda s: planner.SearchedPlan(s, solver="anneal", cost="paper"),
            "Algorithm 2: simulated annealing under the published cost",
        ),
        "anneal_by_size": Part(
            lambda s: planner.SearchedPlan(s, solver="anneal", cost="paper", assignment="planner"),
            "the same, homes from the plan even where predictions are ties",
        ),
        "libra-dp": Part(
            lambda s: planner.SearchedPlan(s, solver="libra-dp"), "Libra's DP over (GPUs, requests)"
        ),
    },
    consolidation={
        "keep_engines": Part(lambda _: NoConsolidation(), "the engines of the plan stay"),
        "consolidate": Part(
            TailConsolidation, "late in a rollout: freed engines become wide ones for stragglers"
        ),
    },
)
"""Names are unique over all kinds, so that a name alone identifies the part it replaces."""


def kind_of(name: str) -> Kind | None:
    """Return the kind of the part `name`; None for a name that is not in the table."""
    return next((kind for kind in KINDS if name in PARTS.of(kind)), None)
