"""What to run: the best candidate of a race, judged on prompts that its rounds have not seen."""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Final

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import ClusterProfiles
from heddle.comparison.tuning import (
    Variant,
    drafted,
    running_steps,
    speculations,
    tuning,
    with_drafts,
    with_policy,
)
from heddle.config import RunConfig
from heddle.cost.prices import Prices, RunCost
from heddle.planning.block_loops import routes
from heddle.planning.blocks import runnable
from heddle.planning.deployment import LoopSplit
from heddle.runs.bound import Bound, alone_s
from heddle.search.draws import Draw, check_groups, check_history, drawn, places
from heddle.search.interval import PredictionInterval, prediction_interval
from heddle.search.jobs import draws_of, race_of
from heddle.search.policies import FIRST, shipped
from heddle.search.race import LAST, NEAR, NEVER, SEARCHED, OnRound, Race, kind_of
from heddle.search.rounds import all_rounds, first_rounds, of_policies, share_of
from heddle.search.ties import name_of
from heddle.setup import RunSetup, Workspace, makespan_bound, prepare
from heddle.workload import Workload
from heddle_core.ids import EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.parts.admission import PromptOnly
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import LeastLoaded, Sticky
from heddle_core.parts.planner import FixedPlan
from heddle_core.parts.predictor import NoPrediction
from heddle_core.parts.scheduler import Fcfs
from heddle_core.plans import ResourcePlan
from heddle_core.policy import NoConsolidation, Policy
from heddle_core.trajectory import Trajectory
from heddle_trace.schema import TrajectoryScript

OWN_ENGINES: Final = "heddle+fixed+keep_engines"
"""`heddle` on engines of one TP degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate, and what it takes on prompts that the search has not seen."""

    candidate: Variant
    makespan_s: PredictionInterval
    """Of a rollout; of an RL loop, the mean time of a batch."""
    times: tuple[float, ...]
    """By drawn rollout, in seconds."""
    engines: tuple[tuple[EngineShape, int], ...]
    """Shapes and counts, the widest first."""
    loop: LoopSplit | None = None

    @property
    def of(self) -> str:
        """What its time is of."""
        return "rollout" if self.loop is None else "batch"

    @property
    def setting(self) -> str:
        """Its engines and slots in words."""
        return f"{self.engines_text}, {self.candidate.cluster.running} slots"

    @property
    def engines_text(self) -> str:
        """Its engines in words, with GPU types and roles where there are several."""
        types = {shape.gpu for shape, _ in self.engines}
        words = []
        for shape, count in self.engines:
            text = f"{count} x TP {shape.tp}"
            text += f" ({shape.gpu.lower()})" if len(types) > 1 else ""
            words.append(f"{text} to {shape.role}" if shape.role != "both" else text)
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    candidate: Variant
    draws: int
    """That it ran on; 0: on a part of the cluster only."""
    mean_s: float | None
    """Mean makespan of them; None where one was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    setup: RunSetup
    """Of the recommended candidate, on the whole trace."""
    judged: tuple[Judged, ...]
    """The recommended first, then by makespan."""
    tried: tuple[Tried, ...]
    """All candidates, those of most draws first, then by makespan."""
    ties: tuple[str, ...]
    """Candidates that the draws do not tell from the best."""
    as_it_comes: Judged | None
    """What they are compared with, on the cluster's own engines, where these hold the trace."""
    bound_s: float
    """Of what the mean is of: the judged rollouts, or the loop on the trace itself."""
    prices: Prices
    gpus: Mapping[str, int]
    """All GPUs by type, those of a trainer too."""
    simulations: int
    seconds: float
    complete: bool
    """False: the time was over before the search was, or a signal ended it."""
    interrupted: bool
    """Whether a signal ended it."""
    draws: int
    notes: tuple[str, ...] = ()
    """What was chosen for a loop where the configuration leaves it open."""

    @property
    def best(self) -> Judged:
        return self.judged[0]

    @property
    def name(self) -> str:
        """Its cluster for people: ``16 x h100``."""
        return " + ".join(f"{count} x {gpu.lower()}" for gpu, count in self.gpus.items())

    @property
    def makespan_s(self) -> float:
        """Mean of the recommended setting."""
        return self.best.makespan_s.mean

    @property
    def cost(self) -> RunCost:
        """Of the recommended setting; see `cost_of`."""
        return self.cost_of(self.best)

    def cost_of(self, each: Judged) -> RunCost:
        """Of one rollout, or batch of a loop, in the mean."""
        return self.prices.cost(self.gpus, each.makespan_s.mean)


def search(
    config: RunConfig,
    *,
    policies: Sequence[str] | None = None,
    slots: Sequence[int] | None = None,
    speculation: str | None = None,
    roles: bool = False,
    prices: Prices,
    jobs: int | None = None,
    budget_s: float | None = None,
    workspace: Workspace | None = None,
    on_round: OnRound | None = None,
    comes: str = FIRST,
    keeps_best: bool = True,
    framework: str | None = None,
) -> SearchResult:
    """Find what ends a rollout of prompts like those of the trace soonest, on `config.cluster`.

    Candidates are `policies` or all, at every TP degree, with `slots` or all sensible numbers of
    running steps, as `framework` runs them, beside `comes`; with `speculation`, ``best`` or
    ``METHOD:best[:ACCEPTANCE]``, at each setting of it; with `roles`, also engines that only
    prefill. At `SEARCHED` of `budget_s`, or a signal with `keeps_best`, the best so far is judged.

    Raises:
        ConfigError: too few groups to judge on, a policy that is unknown, or no `jobs`.
        ValueError: any other of the packages' errors for bad input.
        WorkerError: a process was killed.
    """
    began_s, shared = time.time(), Workspace() if workspace is None else workspace
    names = list(dict.fromkeys([*(policies or [*shipped(config), OWN_ENGINES]), comes]))
    tried = () if speculation is None else speculations(config.cluster, speculation)
    # What engines with a drafter cannot hold is refused, or dropped, for all alike.
    config = with_drafts(config, tried[-1:])
    settings = tuning(config, tps="best", roles=roles, workspace=shared)
    config = replace(config, cluster=(base := settings.base))
    check_history(config, shared)
    check_groups(shared.workload(config).scripts)
    candidates = runnable(settings.variants(config, names, shared), framework)
    rounds_s = None if budget_s is None else SEARCHED * budget_s
    race_with = partial(race_of, config, shared, jobs=jobs, budget_s=rounds_s, on_round=on_round)
    race, share = race_with(), share_of(config, candidates, shared)
    small = race if share == 1 else race_with(share=share)
    small.simplicity = race.simplicity = cache(partial(simplicity, config, shared, framework))
    first = partial(first_rounds, small, config, candidates, slots, tried, shared)
    rounds = partial(all_rounds, race, small, first, keeps_best=keeps_best)
    complete = race.completes(rounds, keeps_best=keeps_best)
    own = [drafted(c, tried[:1]) for c in candidates if c.policy == comes and c.cluster == base]
    compared, draws = _judge(race, own, None if budget_s is None else began_s + budget_s)
    same, doubtful = race.ties()
    chosen = _chosen(race, same, own)
    found = (*tried_of(race), *untried_of(race, small))
    ties = race.tied_with(chosen, (*same, *doubtful))
    setups = {c: setup_of(config, c, shared) for c in (*compared, *named_ties(ties, compared))}
    halves = _longest_of_halves(setups[chosen])
    judged = {each: _judged(race, each, setups[each], halves) for each in setups}
    return SearchResult(
        setup=setups[chosen],
        judged=best_of_kinds(judged, chosen, own),
        tried=found,
        ties=tuple(map(name_of, ties)),
        as_it_comes=judged[own[0]] if own else None,
        bound_s=_bound_s(setups[chosen], draws),
        prices=prices,
        gpus=setups[chosen].profiles.pools,
        simulations=sum(each.simulations for each in {race, small}),
        seconds=time.time() - began_s,
        complete=complete and not race.stopped,
        interrupted=race.stopped,
        draws=draws,
    )


def _judge(race: Race, own: Collection[Variant], ends_s: float | None) -> tuple[list[Variant], int]:
    """Run the last candidates on prompts that the search has not seen.

    Returns those that ended, and on how many draws.

    The best and `own` run on one draw at least, others until `ends_s`, and not after a signal.
    """
    compared = list(dict.fromkeys([*race.near(NEAR, LAST), *of_policies(race), *own]))
    if not race.stopped:
        race.ends_s = ends_s
    first = [compared[0], *own]
    race.judge(first, compared, at_least=len(first))
    draws = race.keep_ended(first)
    return [each for each in compared if each in race.made["judge"]], draws


def best_of_kinds(
    judged: Mapping[Variant, Judged], chosen: Variant, as_it_comes: Collection[Variant]
) -> tuple[Judged, ...]:
    """The chosen candidate, then the best of each other kind, by makespan."""
    found = {kind_of(chosen): judged[chosen]}
    for each in sorted(judged, key=lambda each: judged[each].makespan_s.mean):
        if each not in as_it_comes:
            found.setdefault(kind_of(each), judged[each])
    return tuple(found.values())


def named_ties(ties: Iterable[Variant], judged: Collection[Variant]) -> list[Variant]:
    """Of ties that have the times of another, those of judged kinds, and the first."""
    kinds, more = set(map(kind_of, judged)), [each for each in ties if each not in judged]
    return [each for each in more if each is more[0] or kind_of(each) in kinds]


def tried_of(race: Race) -> tuple[Tried, ...]:
    """All candidates of a race, those of most draws first."""
    made = race.made["search"]
    ended = race.ranked()
    rest = [each for each in made if each not in set(ended)]
    return tuple(
        Tried(
            candidate=each,
            draws=len(made[each]),
            mean_s=None if NEVER in made[each].values() else fmean(made[each].values()),
        )
        for each in (*ended, *rest)
    )


def untried_of(race: Race, small: Race) -> list[Tried]:
    """Candidates that ran on a part of the cluster only, in their order there."""
    made = race.made["search"]
    return [
        replace(each, draws=0, mean_s=None)
        for each in tried_of(small)
        if each.candidate not in made
    ]


def _chosen(race: Race, same: Iterable[Variant], own: Iterable[Variant]) -> Variant:
    """The simplest of the best, then the least mean; `own`, which had no time, if judged faster."""
    simplest = min(same, key=lambda each: (*race.simplicity(each), fmean(race.decided()[each])))
    own = [each for each in own if each not in race.made["search"]]
    return min([simplest, *own], key=lambda each: fmean(race.made["judge"][each].values()))


def simplicity(
    config: RunConfig, workspace: Workspace, framework: str | None, candidate: Variant
) -> tuple[bool, int, bool, int]:
    """Policies that a framework's router has, few mechanisms, presets first, wide engines."""
    return (
        not routes(framework, candidate.policy),
        mechanisms(setup_of(config, candidate, workspace).policy),
        "+" in candidate.policy,
        -candidate.cluster.tp,
    )


def setup_of(config: RunConfig, candidate: Variant, workspace: Workspace) -> RunSetup:
    """Of a run on the whole trace."""
    return prepare(
        with_policy(config, candidate.policy, candidate.cluster),
        workspace=workspace,
        workload=workspace.workload(config),
    )


def _judged(
    race: Race, candidate: Variant, setup: RunSetup, longest_s: Sequence[Sequence[float]]
) -> Judged:
    times = tuple(race.made["judge"][candidate].values())
    searched = [each for each in race.made["search"].get(candidate, {}).values() if each < NEVER]
    return Judged(
        candidate=candidate,
        makespan_s=prediction_interval(times, searched, longest_s),
        times=times,
        engines=engines_of(setup),
    )


def judged_bounds(
    config: RunConfig, workspace: Workspace, slots: Sequence[int] | None
) -> tuple[Mapping[str, int], list[Bound]]:
    """GPUs by type, and what bounds each rollout that `search` may judge without `speculation`."""
    base = tuning(config, tps="best", workspace=workspace).base
    workload = workspace.workload(replace(config, cluster=base))
    profiles = workspace.profiles(base)
    base = replace(base, max_running=max(running_steps(base, profiles, slots or "best")))
    return profiles.pools, _bounds(workload, profiles, base, config.seed, draws_of(workload))


def _bounds(
    workload: Workload, profiles: ClusterProfiles, cluster: ClusterConfig, seed: int, draws: int
) -> list[Bound]:
    judged = (drawn(workload, Draw("judge", number), seed) for number in range(draws))
    return [makespan_bound(each, profiles, cluster) for each in judged]


def _bound_s(setup: RunSetup, draws: int) -> float:
    """Mean of what bounds each judged rollout."""
    config = setup.config
    bounds = _bounds(setup.workload, setup.profiles, config.cluster, config.seed, draws)
    return fmean(each.makespan_s for each in bounds)


def _longest_of_halves(setup: RunSetup) -> list[list[float]]:
    """As `longest_s`: judged, and searched on."""
    longest = longest_s(setup.workload, setup.profiles, setup.config.cluster)
    halves = (places(len(longest), half, setup.config.seed) for half in ("judge", "search"))
    return [[longest[place] for place in half] for half in halves]


def longest_s(workload: Workload, profiles: ClusterProfiles, cluster: ClusterConfig) -> list[float]:
    """Time alone of the longest trajectory of each group, in seconds."""
    seconds = alone_s(workload.scripts, profiles.tables(), max_running=cluster.max_running)
    groups = workload.scripts.trajectory("group").occurring().values()
    return [float(seconds[own].max()) for own in groups]


def engines_of(setup: RunSetup) -> tuple[tuple[EngineShape, int], ...]:
    """The engines that a policy starts with on the workload: shapes and counts, widest first."""
    ts = [arrived(script) for script in setup.workload.scripts]
    predictor, planner = setup.policy.predictor, setup.policy.planner
    found = planner.plan(ts, [predictor.remaining_tokens(t) for t in ts])
    plan = found if isinstance(found, ResourcePlan) else found.solve()
    counts = Counter(engine.shape for engine in plan.engines)
    cluster, (first, *_) = setup.config.cluster, setup.profiles.classes
    counts += Counter(first.profile.shape(tp).as_role("prefill") for tp in cluster.prefill_tps)
    return tuple(sorted(counts.items(), key=lambda each: -each[0].gpus))


def mechanisms(policy: Policy) -> int:
    """Parts of a policy that do more than the least of their kind."""
    least: tuple[tuple[object, type], ...] = (
        (policy.predictor, NoPrediction),
        (policy.scheduler, Fcfs),
        (policy.admission, PromptOnly),
        (policy.migration, Never),
        (policy.planner, FixedPlan),
        (policy.consolidation, NoConsolidation),
    )
    plain = type(policy.placement) in (Sticky, LeastLoaded)
    return sum(not isinstance(part, kind) for part, kind in least) + (not plain)


def arrived(script: TrajectoryScript) -> Trajectory:
    """A trajectory as a policy sees it on arrival."""
    prompt_tokens = script.steps[0].prompt_tokens
    return Trajectory(
        id=TrajectoryId(script.id),
        rollout=RolloutId("rollout"),
        group=GroupId(script.group),
        task=script.task,
        weights_version=0,
        prompt_tokens=prompt_tokens,
        arrived_s=0.0,
        context_tokens=prompt_tokens,
        runnable_s=0.0,
    )
