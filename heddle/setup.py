"""A run, set up once: its workload, profile, history, model, policy and simulation.

Only `prepare` makes these from a configuration. Runs with common inputs are prepared with one
`Workspace`, which reads each input once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from heddle import knowledge
from heddle.config import ClusterConfig, RunConfig
from heddle.plugins import load_policy
from heddle.runs import RunFacts
from heddle.runs.bound import Bound, lower_bound
from heddle.runs.ideal import Ideal, ideal_makespans
from heddle.runs.metrics import SoloTpot
from heddle.runs.tables import Floats
from heddle.workload import DEFAULT_SETTINGS, Workload, capacity_tokens, check_tools, fitting
from heddle_core.defaults import ENGINE_START_S, SPARE_SLOTS
from heddle_core.estimate.cost import CostModel
from heddle_core.ids import EngineId, EngineShape
from heddle_core.policy import Policy, PolicyContext
from heddle_sim.config import HostKvConfig, SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import MAX_BATCH, Profile, load_profile
from heddle_sim.profile_parts import Costs
from heddle_trace.complete import FillReport, complete, shuffled
from heddle_trace.files import read_trace
from heddle_trace.schema import Trace, TrajectoryScript
from heddle_trace.scripts import Scripts

KEPT_INPUTS = 4
"""Inputs of each kind that a workspace keeps: seeds of a comparison, profiles of an experiment."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """All inputs of one run. The policy learns during the run: one set-up serves one run."""

    config: RunConfig
    """With the name of the history that was found."""
    workload: Workload
    profile: Profile
    history: knowledge.HistorySource
    model: knowledge.LoadedModel
    predictor_model: Mapping[str, Any] | None
    """Name and hash of `model` if the policy's predictor uses it, else None."""
    context: PolicyContext
    policy: Policy
    simulation: SimulationConfig
    """The simulated cluster."""

    def bound(self) -> Bound:
        """Bound the makespan of the run from below."""
        return makespan_bound(self.workload, self.profile, self.config.cluster)

    def ideal(self, bound: Bound) -> Ideal:
        """Compute ideal makespans beside `bound`, which is the run's."""
        return ideal_levels(self.workload, self.profile, self.config.cluster, bound)

    def facts(self, driver: str, world: Mapping[str, Any] | None = None) -> RunFacts:
        """The manifest of the run; `world` describes real engines."""
        marks = self.profile.marks
        return RunFacts(
            driver=driver,
            trace_name=self.workload.trace.name,
            trace_sha256=self.workload.trace.sha256,
            oracle=knowledge.sees_the_future(self.policy),
            history=self.history.plain(),
            predictor_model=self.predictor_model,
            context=self.context,
            world=world or ({"gpu": self.profile.gpu_label, **marks} if marks else None),
        )


class Workspace:
    """Inputs that several runs have in common, each read once.

    Give the same one to every `prepare` of a comparison. It keeps the last inputs of each kind, so
    that its size does not grow with the number of runs.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[Hashable, Any]] = {}

    def trace(self, path: str) -> Trace:
        """Read a trace.

        Raises:
            TraceError: it is no trace, or damaged.
        """
        return self._keep("trace", path, lambda: read_trace(Path(path)), at_most=1)

    def completed(self, config: RunConfig) -> tuple[Scripts, FillReport]:
        """Fill in the trace of a run and order its groups, for the run's seed.

        Raises:
            TraceError: the trace is unusable, or lacks values and no rule allows to fill them in.
        """

        def make() -> tuple[Scripts, FillReport]:
            rules = knowledge.missing_rules(config.missing)
            scripts, fill = complete(self.trace(config.trace), rules=rules, seed=config.seed)
            return shuffled(scripts, config.seed), fill

        return self._keep("completed", (config.trace, config.missing, config.seed), make)

    def workload(self, config: RunConfig) -> Workload:
        """Fill in, order and check the trace of a run.

        Raises:
            TraceError: the trace is unusable, or lacks values and no rule allows to fill them in.
            ProfileError: model, GPU class or TP degree is unknown.
            CapacityError: a context exceeds the KV capacity of an engine and may not be dropped.
        """
        cluster = config.cluster

        def make() -> Workload:
            trace = self.trace(config.trace)
            scripts, fill = self.completed(config)
            check_tools(scripts.table.tools, cluster)
            kept, dropped = fitting(scripts, self.profile(cluster), cluster)
            return Workload(
                trace=trace,
                scripts=kept,
                trajectories=len(kept),
                largest_tokens=int(kept.largest_context().max()),
                fill=fill,
                dropped=dropped,
            )

        key = (config.trace, config.missing, cluster, config.seed)
        return self._keep("workload", key, make)

    def profile(self, cluster: ClusterConfig) -> Profile:
        """Load the profile of a cluster; see `load_cluster_profile`."""
        return self._keep("profile", cluster, lambda: load_cluster_profile(cluster))

    def history(self, config: RunConfig, trace: Trace) -> knowledge.HistorySource:
        """Find the history of a run of `trace`; see `heddle.knowledge.resolve_history`."""
        key = (config.history, config.missing, trace.sha256)
        return self._keep(
            "history", key, lambda: knowledge.resolve_history(config.history, trace, config.missing)
        )

    def model(self, name: str) -> knowledge.LoadedModel:
        """Load a predictor model; see `heddle.knowledge.load_predictor_model`."""
        return self._keep("model", name, lambda: knowledge.load_predictor_model(name))

    def _keep(
        self, kind: str, key: Hashable, make: Callable[[], T], at_most: int = KEPT_INPUTS
    ) -> T:
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

    `workload` has the tasks of live agents, where `config.trace` is no trace.

    Raises:
        ValueError: one of the packages' errors for bad input, with the remedy.
        OSError: a file cannot be read.
    """
    shared = Workspace() if workspace is None else workspace
    if workload is None:
        workload = shared.workload(config)
    profile = shared.profile(config.cluster)
    history = shared.history(config, workload.trace)
    model = shared.model(config.predictor_model)
    simulation = simulation_config(config.cluster, profile, seed=config.seed)
    context = _context(config, profile, simulation, workload.largest_tokens, history, model)
    policy = make_policy(config, context, workload.scripts)
    return RunSetup(
        config=replace(config, history=history.name),
        workload=workload,
        profile=profile,
        history=history,
        model=model,
        predictor_model=knowledge.model_used(model, policy.predictor, workload.trace),
        context=context,
        policy=policy,
        simulation=simulation,
    )


def make_policy(
    config: RunConfig, context: PolicyContext, scripts: Sequence[TrajectoryScript] = ()
) -> Policy:
    """Make the policy of a run; `scripts` are the input of oracles."""
    preset = config.policy.preset
    return load_policy(preset, context, extra=knowledge.extras(preset, scripts, config.seed))


def layout_profile(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster's engines; raises ProfileError where there is none."""
    profile = load_profile(cluster.model, cluster.gpu)
    return profile.laid_out(cluster.expert_parallel, attention_dp=cluster.attention_dp)


def memory_profile(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster, with the memory that engines asleep leave for KV.

    Raises:
        ProfileError: model or GPU class is unknown.
    """
    profile = layout_profile(cluster)
    if cluster.standby_tp:
        asleep_bytes = len(cluster.standby_tp) * cluster.standby_gib * 2**30
        profile = profile.without_memory(asleep_bytes)
    return profile


def load_cluster_profile(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster and check that the model runs at its TP degrees.

    Raises:
        ProfileError: model, GPU class or TP degree is unknown.
    """
    profile = memory_profile(cluster)
    for tp in (cluster.tp, *cluster.mix, *(cluster.tp_choices or ()), *cluster.standby_tp):
        profile.at(tp)
    return profile


def makespan_bound(workload: Workload, profile: Profile, cluster: ClusterConfig) -> Bound:
    """Bound the makespan of a workload on a cluster from below, whatever the policy."""
    return lower_bound(
        workload.scripts,
        _tables(profile, cluster),
        gpus=cluster.gpus,
        max_running=cluster.max_running,
        # Calls of tools with a pool of their own do not count against it.
        tool_capacity=None if cluster.tool_pools else cluster.tool_capacity,
    )


def ideal_levels(
    workload: Workload, profile: Profile, cluster: ClusterConfig, bound: Bound
) -> Ideal:
    """Compute makespans that nothing proves, beside `bound` of the same workload and cluster."""
    return ideal_makespans(
        workload.scripts,
        _tables(profile, cluster),
        gpus=cluster.gpus,
        max_running=cluster.max_running,
        bound=bound,
    )


def simulation_config(
    cluster: ClusterConfig, profile: Profile, *, seed: int = 0
) -> SimulationConfig:
    """Describe the simulated cluster to the driver; `seed` is of its services' draws."""
    tables: dict[EngineShape, LatencyTable] = {}

    def table(shape: EngineShape) -> LatencyTable:
        assert shape == profile.shape(shape.tp), f"no profile of {shape} was loaded"
        if shape not in tables:
            tables[shape] = _table(profile, shape.tp, cluster)
        return tables[shape]

    costs = profile.costs or Costs(dispatch_s=0.0, engines={})
    settings = profile.engine or DEFAULT_SETTINGS
    given_s = cluster.engine_start_s
    return SimulationConfig(
        table=table,
        transfer_fixed_s=profile.transfer.fixed_s,
        transfer_bytes_per_s=profile.transfer.bytes_per_s,
        moves_by=costs.moves_by,
        # Each data-parallel rank has the budget of an engine.
        max_batched_tokens=profile.attention_dp * settings.max_batched_tokens,
        block_size=settings.block_tokens,
        tool_capacity=cluster.tool_capacity,
        tools=cluster.tool_services(),
        seed=seed,
        engine_start_s=ENGINE_START_S if given_s is None else given_s,
        engine_start_s_at={
            profile.shape(int(tp)): life.start_s
            for tp, life in costs.engines.items()
            if given_s is None
        }
        | dict.fromkeys(
            map(profile.shape, cluster.standby_tp),
            STANDBY_START_S if cluster.standby_start_s is None else cluster.standby_start_s,
        ),
        dispatch_s=costs.dispatch_s,
        host_kv=_host_kv(cluster),
        prediction_s=cluster.prediction_s,
        report_interval_s=cluster.report_interval_s,
        faults=tuple((time_s, EngineId(engine)) for time_s, engine in cluster.faults()),
    )


STANDBY_START_S = 2.5
"""Published for an 8B model with LoRA on an A100 (vLLM pull request 48337, July 2026): 0.31 s until
the engine that gives way sleeps, its weights dropped (level 2), and 2.19 s until the other has its
own back from host memory (level 1)."""

_HOST_KV_GB_PER_S = {"engine": 41.7, "cluster": 10.8}
"""Published, for each GPU: an H100 copies 83.4 GB/s to and from host memory together, in blocks of
2 MB (vLLM's report on its offloading connector, January 2026); eight H200 restore 86.8 GB/s from a
shared store over two links of 400 Gb/s (MinIO's guide to MemKV with vLLM, 2026)."""

_HOST_KV_FIXED_S = 0.02
"""Of a load; assumed: lookup, scheduling and the iteration that it waits for."""


def _host_kv(cluster: ClusterConfig) -> HostKvConfig | None:
    if cluster.host_kv == "none":
        return None
    return HostKvConfig(
        scope=cluster.host_kv,
        gpu_bytes=cluster.host_kv_gib * 2**30,
        gpus=cluster.gpus,
        gpu_bytes_per_s=1e9 * (cluster.host_kv_gb_per_s or _HOST_KV_GB_PER_S[cluster.host_kv]),
        fixed_s=_HOST_KV_FIXED_S,
    )


def solo_tpot(profile: Profile, cluster: ClusterConfig) -> SoloTpot:
    """Seconds per token of a step alone on an engine, from the profile."""

    def solo(tp: int, context_tokens: Floats) -> Floats:
        table = _table(profile, tp, cluster)
        return np.asarray(table.base_s[1] + table.per_context_s[1] * context_tokens, np.float64)

    return solo


def _context(
    config: RunConfig,
    profile: Profile,
    simulation: SimulationConfig,
    largest_tokens: int,
    history: knowledge.HistorySource,
    model: knowledge.LoadedModel,
) -> PolicyContext:
    """Inputs of a policy: the cluster, estimated costs, and history.

    `largest_tokens` is the context that every engine must hold, as a framework derives it from its
    limits on lengths. TP degrees whose engines cannot hold it are left out.
    """
    cluster = config.cluster
    tps = cluster.tp_choices or tuple(
        tp for tp in profile.tps_on(cluster.gpus) if capacity_tokens(profile, tp) >= largest_tokens
    )
    every = sorted({*tps, cluster.tp, *cluster.mix})
    shapes = {tp: profile.shape(tp) for tp in every}
    return PolicyContext(
        pools={profile.gpu: cluster.gpus},
        shape=shapes[cluster.tp],
        shape_choices=tuple(shapes[tp] for tp in tps),
        max_running=cluster.max_running,
        mix=tuple(shapes[tp] for tp in cluster.mix),
        cost=_cost_estimate(profile, tuple(shapes), simulation),
        history=history.history,
        learned=model.factory,
        seed=config.seed,
        engine_start_s=simulation.engine_start_s,
        engine_start_s_by_shape={
            shape: simulation.start_s(shape)
            for shape in shapes.values()
            if shape in simulation.engine_start_s_at
        },
    )


def _cost_estimate(profile: Profile, tps: Sequence[int], simulation: SimulationConfig) -> CostModel:
    """The profile's estimate, with loads from a store that all engines share."""
    cost, host_kv = profile.cost_estimate(tps), simulation.host_kv
    if host_kv is None or host_kv.scope != "cluster":
        return cost
    token_s = profile.kv_bytes_per_token / host_kv.gpu_bytes_per_s
    by_shape = {s: replace(c, load_s=token_s / s.gpus) for s, c in cost.by_shape.items()}
    return replace(cost, by_shape=by_shape)


def _tables(profile: Profile, cluster: ClusterConfig) -> list[LatencyTable]:
    """The tables of all TP degrees of the profile that the cluster has GPUs for."""
    return [_table(profile, tp, cluster) for tp in profile.tps_on(cluster.gpus)]


def _table(profile: Profile, tp: int, cluster: ClusterConfig) -> LatencyTable:
    return profile.table(tp, max_batch=max(MAX_BATCH, cluster.max_running + SPARE_SLOTS))
