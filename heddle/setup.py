"""A run, set up once: its workload, profile, history, model, policy and simulation.

Only `prepare` makes these from a configuration. Runs with common inputs are prepared with one
`Workspace`, which reads each input once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from heddle import policy_inputs
from heddle.cluster.config import ClusterConfig
from heddle.cluster.disaggregation import disaggregation
from heddle.cluster.failures import check_faults
from heddle.cluster.host_kv import host_kv_of
from heddle.cluster.profiles import NO_COSTS, ClusterProfiles, capacity_tokens, load_profiles
from heddle.config import RunConfig
from heddle.policies.plugins import load_policy
from heddle.raw_logs import read_replayed
from heddle.runs import RunFacts
from heddle.runs.bound import Bound, lower_bound
from heddle.runs.ideal import Ideal, ideal_makespans
from heddle.workload import ReplayedTrace, Workload, check_tags, check_tools, fitting
from heddle_core.controller import Controller
from heddle_core.defaults import ENGINE_START_S
from heddle_core.estimate.cost import CostModel
from heddle_core.ids import EngineId, EngineShape, Role
from heddle_core.parts.planner import FixedPlan
from heddle_core.policy import NoConsolidation, Policy, PolicyContext
from heddle_core.presets import adaptive
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile
from heddle_trace.complete import FillReport, complete, shuffled
from heddle_trace.schema import Trace, TrajectoryScript
from heddle_trace.table import Records, Scripts

BOUND_KEPT_FROM = 20_000
"""Trajectories of a run whose manifest has its bound: it takes less than a hundredth of the run."""

KEPT_INPUTS = 4
"""Inputs of each kind that a workspace keeps: seeds of a comparison, profiles of an experiment."""
MOST_STEPS_KEPT = 1_000_000
"""Steps of a trace whose records stay in memory, 25 MB; larger ones are read for each seed."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """All inputs of one run. The policy learns during the run: one set-up serves one run."""

    config: RunConfig
    """With the name of the history that was found."""
    workload: Workload
    profiles: ClusterProfiles
    """Of each GPU class."""
    history: policy_inputs.HistorySource
    model: policy_inputs.LoadedModel
    predictor_model: Mapping[str, Any] | None
    """Name and hash of `model` if the policy's predictor uses it, else None."""
    context: PolicyContext
    policy: Policy
    simulation: SimulationConfig
    """The simulated cluster."""

    @property
    def profile(self) -> Profile:
        """The profile of the only GPU class.

        Raises:
            ProfileError: there are several.
        """
        return self.profiles.only

    def controller(self) -> Controller:
        restarts = self.config.cluster.restart_limit
        return Controller(self.policy, self.context.disaggregation, restarts)

    def bound(self) -> Bound:
        """Bound the makespan of the run from below."""
        return makespan_bound(self.workload, self.profiles, self.config.cluster)

    def kept_bound(self) -> Mapping[str, float] | None:
        """Seconds of `bound`, of a run of many trajectories without drafts; None of any other."""
        drafts = self.profiles.tables()[0].drafting is not None
        few = self.workload.trajectories < BOUND_KEPT_FROM
        return None if few or drafts else self.bound().seconds()

    def ideal(self, bound: Bound) -> Ideal:
        """Compute ideal makespans beside `bound`, which is the run's."""
        return ideal_levels(self.workload, self.profiles, self.config.cluster, bound)

    def facts(self, driver: str, world: Mapping[str, Any] | None = None) -> RunFacts:
        """The manifest of the run; `world` describes real engines."""
        marks = self.profiles.marks
        return RunFacts(
            driver=driver,
            trace_name=self.workload.trace.name,
            trace_sha256=self.workload.trace.sha256,
            oracle=policy_inputs.sees_the_future(self.policy),
            history=self.history.plain(),
            predictor_model=self.predictor_model,
            context=self.context,
            world=world or ({"gpus": self.profiles.hardware(), **marks} if marks else None),
        )


class Workspace:
    """Inputs that several runs have in common, each read once.

    Give the same one to every `prepare` of a comparison. It keeps the last inputs of each kind, so
    that its size does not grow with the number of runs.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[Hashable, Any]] = {}

    def trace(self, path: str) -> Trace:
        """Read a trace; only one of at most `MOST_STEPS_KEPT` steps is kept.

        Raises:
            TraceError: it is no trace, or damaged.
        """
        trace = self.keep("trace", path, lambda: read_replayed(Path(path)), at_most=1)
        if int(Records.of(trace.records).counts.sum()) > MOST_STEPS_KEPT:
            self._kept["trace"].clear()
        return trace

    def completed(self, config: RunConfig) -> tuple[Scripts, FillReport, ReplayedTrace]:
        """Fill in the trace of a run and order its groups, for the run's seed.

        Raises:
            TraceError: the trace is unusable, or lacks values and no rule allows to fill them in.
        """

        def make() -> tuple[Scripts, FillReport, ReplayedTrace]:
            rules, trace = policy_inputs.missing_rules(config.missing), self.trace(config.trace)
            scripts, fill = complete(trace, rules=rules, seed=config.seed)
            return shuffled(scripts, config.seed), fill, ReplayedTrace.of(trace)

        return self.keep("completed", (config.trace, config.missing, config.seed), make)

    def workload(self, config: RunConfig, most_tokens: int | None = None) -> Workload:
        """Fill in, order and check the trace of a run; without longer contexts than `most_tokens`.

        Raises:
            TraceError: the trace is unusable, or lacks values and no rule allows to fill them in.
            ProfileError: model, GPU class or TP degree is unknown.
            CapacityError: a context exceeds the KV capacity of an engine and may not be dropped.
        """
        cluster = config.cluster

        def make() -> Workload:
            scripts, fill, trace = self.completed(config)
            check_tools(scripts.table.tools, cluster)
            kept, dropped = fitting(scripts, self.profiles(cluster), most_tokens)
            return Workload(
                trace=trace,
                scripts=kept,
                trajectories=len(kept),
                largest_tokens=int(kept.largest_context().max()),
                fill=fill,
                dropped=dropped,
            )

        key = (config.trace, config.missing, cluster, config.seed, most_tokens)
        return self.keep("workload", key, make)

    def profiles(self, cluster: ClusterConfig) -> ClusterProfiles:
        """Load the profiles of a cluster; see `load_profiles`."""
        return self.keep("profiles", cluster, lambda: load_profiles(cluster))

    def history(self, config: RunConfig, trace: ReplayedTrace) -> policy_inputs.HistorySource:
        """Find the history of a run of `trace`; see `heddle.policy_inputs.resolve_history`."""
        found = partial(policy_inputs.resolve_history, config.history, trace, config.missing)
        return self.keep("history", (config.history, config.missing, trace.sha256), found)

    def model(self, name: str) -> policy_inputs.LoadedModel:
        """Load a predictor model; see `heddle.policy_inputs.load_predictor_model`."""
        return self.keep("model", name, lambda: policy_inputs.load_predictor_model(name))

    def keep(
        self, kind: str, key: Hashable, make: Callable[[], T], at_most: int = KEPT_INPUTS
    ) -> T:
        """What was made under this key of a kind, else what `make` makes."""
        kept = self._kept.setdefault(kind, {})
        if key not in kept:
            kept[key] = make()
            if len(kept) > at_most:
                del kept[next(iter(kept))]
        found: T = kept[key]
        return found


def prepare(
    config: RunConfig, *, workspace: Workspace | None = None, workload: Workload | None = None
) -> RunSetup:
    """Set up a run: read and check all its inputs, and make its policy.

    `workload` is for callers whose `config.trace` names no trace, as a gateway's.

    Raises:
        ValueError: one of the packages' errors for bad input, with the remedy.
        OSError: a file cannot be read.
    """
    shared = Workspace() if workspace is None else workspace
    if workload is None:
        workload = shared.workload(config)
    profiles = shared.profiles(config.cluster)
    history = shared.history(config, workload.trace)
    model = shared.model(config.predictor_model)
    simulation = simulation_config(config.cluster, profiles, seed=config.seed)
    context = _context(config, profiles, simulation, workload.largest_tokens, history, model)
    check_tags(workload.scripts, context.tags, context.pools)
    policy = make_policy(config, context, workload.scripts)
    check_faults(config.cluster.failures, _most_engines(config.cluster, context, policy))
    return RunSetup(
        config=replace(config, history=history.name),
        workload=workload,
        profiles=profiles,
        history=history,
        model=model,
        predictor_model=policy_inputs.model_used(model, policy.predictor, workload.trace),
        context=context,
        policy=policy,
        simulation=simulation,
    )


def _most_engines(cluster: ClusterConfig, context: PolicyContext, policy: Policy) -> dict[str, int]:
    """Engines that a run may have at once, by the first part of their names."""
    homes = len(context.mix or context.uniform)
    if not isinstance(policy.planner, FixedPlan) or not isinstance(
        policy.consolidation, NoConsolidation
    ):
        least = {
            gpu: min((s.gpus for s in context.shape_choices if s.gpu == gpu), default=1)
            for gpu in context.pools
        }
        homes = max(homes, sum(gpus // least[gpu] for gpu, gpus in context.pools.items()))
    return {"e": homes, "p": len(cluster.prefill_tps)}


def make_policy(
    config: RunConfig, context: PolicyContext, scripts: Sequence[TrajectoryScript] = ()
) -> Policy:
    """Make the policy of a run; `scripts` are the input of oracles."""
    preset = config.policy.preset
    policy = load_policy(preset, context, extra=policy_inputs.extras(preset, scripts, config.seed))
    return adaptive(policy, context) if config.cluster.adaptive else policy


def makespan_bound(workload: Workload, profiles: ClusterProfiles, cluster: ClusterConfig) -> Bound:
    """Bound the makespan of a workload on a cluster from below, whatever the policy."""
    return lower_bound(
        workload.scripts,
        profiles.tables(),
        pools=profiles.pools,
        max_running=cluster.max_running,
        # Calls of tools with a pool of their own do not count against it.
        tool_capacity=None if cluster.tool_pools else cluster.tool_capacity,
    )


def ideal_levels(
    workload: Workload, profiles: ClusterProfiles, cluster: ClusterConfig, bound: Bound
) -> Ideal:
    """Compute makespans that nothing proves, beside `bound` of the same workload and cluster."""
    return ideal_makespans(
        workload.scripts,
        profiles.tables(),
        pools=profiles.pools,
        max_running=cluster.max_running,
        bound=bound,
    )


def simulation_config(
    cluster: ClusterConfig, profiles: ClusterProfiles, *, seed: int = 0
) -> SimulationConfig:
    """Describe the simulated cluster to the driver; `seed` is of its services' draws.

    KV moves at the speed of the slowest class.
    """
    tables: dict[EngineShape, LatencyTable] = {}

    def table(shape: EngineShape) -> LatencyTable:
        shape = shape.as_role("both")
        if shape not in tables:
            tables[shape] = profiles.table(shape)
        return tables[shape]

    costs, settings = profiles.costs, profiles.settings
    transfers = [each.profile.transfer for each in profiles.classes]
    given_s = cluster.engine_start_s
    shape_of = profiles.classes[0].profile.shape
    return SimulationConfig(
        table=table,
        transfer_fixed_s=max(transfer.fixed_s for transfer in transfers),
        transfer_bytes_per_s=min(transfer.bytes_per_s for transfer in transfers),
        handover_fixed_s=cluster.handover_fixed_s,
        moves_by=costs.moves_by,
        # Each data-parallel rank has the budget of an engine.
        max_batched_tokens=cluster.attention_dp * settings.max_batched_tokens,
        block_size=settings.block_tokens,
        prefill_first=cluster.engine == "sglang",
        tool_capacity=cluster.tool_capacity,
        tools=cluster.tool_services(),
        seed=seed,
        engine_start_s=ENGINE_START_S if given_s is None else given_s,
        engine_start_s_at={
            each.profile.shape(int(tp)): life.start_s
            for each in profiles.classes
            for tp, life in (each.profile.costs or NO_COSTS).engines.items()
            if given_s is None
        }
        | dict.fromkeys(
            map(shape_of, cluster.standby_tp),
            STANDBY_START_S if cluster.standby_start_s is None else cluster.standby_start_s,
        ),
        dispatch_s=costs.dispatch_s,
        host_kv=host_kv_of(cluster),
        prediction_s=cluster.prediction_s,
        report_interval_s=cluster.report_interval_s,
        faults=tuple((time_s, EngineId(engine)) for time_s, engine in cluster.faults()),
    )


STANDBY_START_S = 2.5
"""Published for an 8B model with LoRA on an A100 (vLLM pull request 48337, July 2026): 0.31 s until
the engine that gives way sleeps, its weights dropped (level 2), and 2.19 s until the other has its
own back from host memory (level 1)."""


def _context(
    config: RunConfig,
    profiles: ClusterProfiles,
    simulation: SimulationConfig,
    largest_tokens: int,
    history: policy_inputs.HistorySource,
    model: policy_inputs.LoadedModel,
) -> PolicyContext:
    """Inputs of a policy: the cluster, estimated costs, and history.

    `largest_tokens` is the context that every engine must hold, as a framework derives it from its
    limits on lengths. TP degrees whose engines cannot hold it are left out.
    """
    choices: list[EngineShape] = []
    own: list[EngineShape] = []
    mix: list[EngineShape] = []
    every: list[EngineShape] = []
    role: Role = "both" if config.cluster.role_gpus is None else "decode"
    for each in profiles.classes:
        cluster, profile = each.cluster, each.profile
        tps = cluster.tp_choices or tuple(
            tp for tp in each.tps if capacity_tokens(profile, tp) >= largest_tokens
        )
        choices += map(profile.shape, tps)
        own.append(profile.shape(cluster.tp))
        mix += map(profile.shape, cluster.mix)
        every += map(profile.shape, sorted({*tps, cluster.tp, *cluster.mix}))
    cost = _cost_estimate(profiles, every, simulation)
    by_shape = {s.as_role(role): c for s, c in cost.by_shape.items()}
    return PolicyContext(
        pools={each.profile.gpu: each.cluster.home_gpus for each in profiles.classes},
        shape=own[0].as_role(role),
        other_shapes=tuple(own[1:]),
        shape_choices=tuple(s.as_role(role) for s in choices),
        max_running=config.cluster.max_running,
        max_context=config.runtime.max_context,
        mix=tuple(s.as_role(role) for s in mix),
        cost=replace(cost, by_shape=by_shape),
        history=history.history,
        learned=model.factory,
        tags=config.policy.tagged(),
        seed=config.seed,
        engine_start_s=simulation.engine_start_s,
        engine_start_s_by_shape={
            shape.as_role(role): simulation.start_s(shape)
            for shape in every
            if shape in simulation.engine_start_s_at
        },
        disaggregation=disaggregation(config.cluster, profiles.classes[0].profile),
    )


def _cost_estimate(
    profiles: ClusterProfiles, shapes: Sequence[EngineShape], simulation: SimulationConfig
) -> CostModel:
    """The profiles' estimate, with loads from a store that all engines share."""
    cost, host_kv = profiles.cost_estimate(shapes), simulation.host_kv
    if host_kv is None or host_kv.scope != "cluster":
        return cost
    token_s = profiles.kv_bytes_per_token / host_kv.gpu_bytes_per_s
    by_shape = {s: replace(c, load_s=token_s / s.gpus) for s, c in cost.by_shape.items()}
    return replace(cost, by_shape=by_shape)
