"""One run in the simulator: where trace, profile, policy, driver and run directory meet."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from heddle import knowledge
from heddle.bound import Bound, lower_bound
from heddle.config import ClusterConfig, MissingConfig, RunConfig
from heddle.metrics import SoloTpot
from heddle.runs import RunFacts, open_run
from heddle.signals import Asked
from heddle.tables import Floats
from heddle_core.controller import Controller
from heddle_core.events import TrajectoryFinished
from heddle_core.history import History
from heddle_core.ids import EngineId
from heddle_core.journal import Entry
from heddle_core.policy import Policy, Setting
from heddle_core.predict.model import Model
from heddle_core.presets import load_policy
from heddle_rollout.core import RecordedCore
from heddle_sim.config import SimulationConfig
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import MAX_BATCH, Profile, load_profile
from heddle_sim.profile_parts import Costs, EngineSettings
from heddle_sim.rollout import simulate_rollout
from heddle_trace.complete import FillReport, complete, shuffled
from heddle_trace.files import read_trace
from heddle_trace.schema import Trace, TrajectoryScript

RUN_KEYS = (
    "makespan_s",
    "throughput_tok_s",
    "queueing_p99_s",
    "tpot_mean_ms",
    "prefix_hit",
    "utilisation",
    "migrations",
    "preemptions",
)
DEFAULT_SETTINGS = EngineSettings(block_tokens=16, max_batched_tokens=8192)
"""vLLM's for a server on a large GPU; for profiles that do not tell."""
ENGINE_START_S = 60.0
"""Loading weights and making graphs; for profiles that do not tell."""


class CapacityError(ValueError):
    """Trajectories that no engine can hold; the message names the largest and the remedies."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace made ready to replay under one seed."""

    trace: Trace
    scripts: tuple[TrajectoryScript, ...]
    fill: FillReport
    dropped: tuple[str, ...]
    """Trajectories left out because their context exceeds an engine's KV capacity."""

    @property
    def largest_tokens(self) -> int:
        """The largest context that a trajectory grows to."""
        return max(map(largest_context, self.scripts))

    @property
    def output_tokens(self) -> int:
        """Tokens that a run of it generates."""
        return sum(step.output_tokens for script in self.scripts for step in script.steps)

    @property
    def filled(self) -> dict[str, int]:
        """How many values of each field the trace did not tell and a rule filled in."""
        counts = {name: f.zeroed + f.sampled for name, f in self.fill.fields.items()}
        return {f"filled_{name}": n for name, n in counts.items()}


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run."""

    policy: str
    seed: int
    path: Path
    summary: Mapping[str, Any]
    wall_s: float
    """Seconds of wall time for simulation, journal, metrics and files."""

    def row(self) -> dict[str, Any]:
        """One element of `runs` in the JSON of `heddle compare`."""
        figures = {key: self.summary[key] for key in RUN_KEYS}
        return {
            "policy": self.policy,
            "seed": self.seed,
            **figures,
            "wall_s": round(self.wall_s, 4),
            "run": str(self.path),
        }


@lru_cache(maxsize=1)
def trace_at(path: str) -> Trace:
    """Read a trace; the last one is kept, since comparisons replay one trace many times."""
    return read_trace(Path(path))


@lru_cache(maxsize=4)
def completed(
    path: str, missing: MissingConfig, seed: int
) -> tuple[tuple[TrajectoryScript, ...], FillReport]:
    """Fill in and order a trace for one seed.

    Raises:
        TraceError: the trace is unusable, or lacks values and no rule allows to fill them in.
    """
    scripts, fill = complete(trace_at(path), rules=knowledge.rules_of(missing), seed=seed)
    return shuffled(scripts, seed), fill


@lru_cache(maxsize=4)
def workload(path: str, missing: MissingConfig, cluster: ClusterConfig, seed: int) -> Workload:
    """Fill in, order and check a trace for one seed.

    Raises:
        TraceError: the trace is unusable, or lacks values and no rule allows to fill them in.
        ProfileError: model, GPU class or TP degree is unknown.
        CapacityError: a context exceeds the KV capacity of an engine and may not be dropped.
    """
    trace = trace_at(path)
    scripts, fill = completed(path, missing, seed)
    kept, dropped = _fitting(scripts, profile_of(cluster), cluster)
    return Workload(trace, kept, fill, dropped)


@lru_cache(maxsize=4)
def profile_of(cluster: ClusterConfig) -> Profile:
    """Load the profile of a cluster and check that the model runs at its TP degrees."""
    profile = load_profile(cluster.model, cluster.gpu)
    for tp in (cluster.tp, *cluster.mix, *(cluster.tp_choices or ())):
        profile.at(tp)
    return profile


def setting_of(
    cluster: ClusterConfig,
    profile: Profile,
    seed: int,
    *,
    largest_tokens: int = 0,
    history: History | None = None,
    learned: Model | None = None,
) -> Setting:
    """Tell a policy what it may know: the cluster, the belief about cost, and what came before.

    `largest_tokens` is the context that any engine must be able to hold, as a framework knows it
    from its limits on lengths: TP degrees whose engines cannot are no choice.
    """
    tps = cluster.tp_choices or tuple(
        tp
        for tp in profile.tps
        if tp <= cluster.gpus and capacity_tokens(profile, tp) >= largest_tokens
    )
    return Setting(
        gpus=cluster.gpus,
        gpu=profile.gpu,
        tp=cluster.tp,
        tp_choices=tps,
        max_running=cluster.max_running,
        mix=cluster.mix,
        cost=profile.belief(tuple(sorted({*tps, cluster.tp, *cluster.mix}))),
        history=history,
        learned=learned,
        seed=seed,
        engine_start_s=world_of(cluster, profile).start_s(max(tps, default=cluster.tp)),
    )


def told_of(config: RunConfig) -> knowledge.Told:
    """Find the history that a run's policy is told."""
    return knowledge.told(config.history, trace_at(config.trace), config.missing)


def workload_of(config: RunConfig) -> Workload:
    """Make a run's trace ready; see `workload`."""
    return workload(config.trace, config.missing, config.cluster, config.seed)


def setting_for(config: RunConfig) -> Setting:
    """Tell the policy of a run what it may know."""
    return setting_of(
        config.cluster,
        profile_of(config.cluster),
        config.seed,
        largest_tokens=workload_of(config).largest_tokens,
        history=told_of(config).history,
        learned=knowledge.taught(config.predictor_model).model,
    )


def policy_of(config: RunConfig, setting: Setting | None = None) -> Policy:
    """Make the policy of a run, fresh, told `setting` or what a new run would be told."""
    preset = config.policy.preset
    scripts = workload_of(config).scripts if knowledge.asks_for_oracle(preset) else ()
    extra = knowledge.extras(preset, scripts, config.seed)
    return load_policy(preset, setting or setting_for(config), extra=extra)


def bound_of(config: RunConfig) -> Bound:
    """Bound the makespan of a run from below."""
    cluster, profile = config.cluster, profile_of(config.cluster)
    return lower_bound(
        workload_of(config).scripts,
        [_table(profile, tp, cluster) for tp in profile.tps if tp <= cluster.gpus],
        gpus=cluster.gpus,
        max_running=cluster.max_running,
        tool_capacity=cluster.tool_capacity,
    )


def simulate(
    config: RunConfig,
    *,
    out: Path = Path("runs"),
    config_text: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunResult:
    """Replay a trace under a policy on a simulated cluster, into a new run directory in `out`.

    `on_progress` hears, a few hundred times, how many trajectories have finished, and of how many.

    Raises:
        ValueError: one of the packages' errors for bad input, before a directory is made.
        OSError: the run directory cannot be written.
        KeyboardInterrupt: a signal asked to end; the run directory says interrupted. More signals
            change nothing.
    """
    work = workload_of(config)
    profile = profile_of(config.cluster)
    history = told_of(config)
    setting = setting_for(config)
    policy = policy_of(config, setting)
    config = replace(config, history=history.name)
    facts = RunFacts(
        driver="heddle_sim",
        trace_name=work.trace.name,
        trace_sha256=work.trace.sha256,
        oracle=knowledge.sees_the_future(policy),
        history=history.plain(),
        predictor_model=knowledge.model_of(config, policy.predictor, work.trace),
        setting=setting,
    )
    began_s = time.perf_counter()
    with Asked(), _seldom_collected(), open_run(out, config, facts, config_text=config_text) as run:
        controller = Controller(policy)
        sink: Callable[[Entry], None] = run.append
        if on_progress is not None:
            sink = _counting(sink, len(work.scripts), on_progress)
        simulate_rollout(
            work.scripts, RecordedCore(controller, sink), world_of(config.cluster, profile)
        )
        notes = {**work.filled, "dropped_over_capacity": len(work.dropped)}
        measured = run.finish(solo_tpot=solo_tpot_of(profile, config.cluster), notes=notes)
    wall_s = time.perf_counter() - began_s
    return RunResult(
        config.policy.preset, config.seed, run.path, {**measured.summary, **notes}, wall_s
    )


def _counting(
    sink: Callable[[Entry], None], total: int, hear: Callable[[int, int], None]
) -> Callable[[Entry], None]:
    """Pass entries on to `sink`, and tell `hear` now and then how many trajectories have ended."""
    done, every = 0, max(total // 200, 1)

    def counted(entry: Entry) -> None:
        nonlocal done
        sink(entry)
        if entry.event.__class__ is TrajectoryFinished:
            done += 1
            if done % every == 0 or done == total:
                hear(done, total)

    return counted


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Let the garbage collector look once in 100,000 new objects, not once in 700.

    A run makes no cycles, but holds many small objects: a sixth of its time went into finding them
    all alive.
    """
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def world_of(cluster: ClusterConfig, profile: Profile) -> SimulationConfig:
    """Describe the simulated cluster to the driver."""
    tables: dict[int, LatencyTable] = {}

    def table(gpu: str, tp: int) -> LatencyTable:
        assert gpu == profile.gpu, f"no profile of {gpu} was loaded"
        if tp not in tables:
            tables[tp] = _table(profile, tp, cluster)
        return tables[tp]

    costs = profile.costs or Costs(dispatch_s=0.0, engines={})
    settings = profile.engine or DEFAULT_SETTINGS
    given_s = cluster.engine_start_s
    return SimulationConfig(
        table=table,
        transfer_fixed_s=profile.transfer.fixed_s,
        transfer_bytes_per_s=profile.transfer.bytes_per_s,
        moves_by=costs.moves_by,
        max_batched_tokens=settings.max_batched_tokens,
        block_size=settings.block_tokens,
        tool_capacity=cluster.tool_capacity,
        engine_start_s=ENGINE_START_S if given_s is None else given_s,
        engine_start_s_at={
            int(tp): life.start_s for tp, life in costs.engines.items() if given_s is None
        },
        dispatch_s=costs.dispatch_s,
        prediction_s=cluster.prediction_s,
        report_interval_s=cluster.report_interval_s,
        faults=tuple((time_s, EngineId(engine)) for time_s, engine in cluster.faults()),
    )


def _table(profile: Profile, tp: int, cluster: ClusterConfig) -> LatencyTable:
    return profile.table(tp, max_batch=max(MAX_BATCH, cluster.max_running))


def solo_tpot_of(profile: Profile, cluster: ClusterConfig) -> SoloTpot:
    """Seconds per token of a step alone on an engine, from the profile."""

    def solo(tp: int, context_tokens: Floats) -> Floats:
        table = _table(profile, tp, cluster)
        return np.asarray(table.base_s[1] + table.per_context_s[1] * context_tokens, np.float64)

    return solo


def largest_context(script: TrajectoryScript) -> int:
    """Tokens that a trajectory's context grows to."""
    return max(step.prompt_tokens + step.output_tokens for step in script.steps)


def capacity_tokens(profile: Profile, tp: int) -> int:
    """Tokens of context that an engine of TP degree `tp` holds, in whole blocks."""
    block = (profile.engine or DEFAULT_SETTINGS).block_tokens
    return int(profile.at(tp).kv_capacity_tokens // block * block)


def _fitting(
    scripts: Sequence[TrajectoryScript], profile: Profile, cluster: ClusterConfig
) -> tuple[tuple[TrajectoryScript, ...], tuple[str, ...]]:
    """Part trajectories that every engine can hold from those that one cannot."""
    chosen = cluster.tp_choices or ()
    tp = min((*(cluster.mix or (cluster.tp,)), *chosen))
    capacity = capacity_tokens(profile, tp)
    largest = {s.id: largest_context(s) for s in scripts}
    dropped = tuple(s.id for s in scripts if largest[s.id] > capacity)
    if not dropped:
        return tuple(scripts), ()
    if cluster.over_capacity == "drop" and len(dropped) < len(scripts):
        return tuple(s for s in scripts if largest[s.id] <= capacity), dropped
    worst = max(dropped, key=lambda name: largest[name])
    remedies = [
        f"--tp {other}" if tp not in chosen else f"a tp_choices that begins at {other}"
        for other in profile.tps
        if capacity_tokens(profile, other) >= largest[worst] and cluster.gpus % other == 0
    ][:1]
    remedies.append("a GPU class with more memory")
    if len(dropped) < len(scripts):
        remedies.append(f"--over-capacity drop, which leaves {len(dropped):,} out and says so")
    raise CapacityError(
        f"{len(dropped):,} of {len(scripts):,} trajectories do not fit into the KV cache of an "
        f"engine: {worst!r} grows to {largest[worst]:,} tokens, {profile.model} on {profile.gpu} "
        f"at TP {tp} holds {capacity:,}. Use {', or '.join(remedies)}"
    )


def with_policy(config: RunConfig, preset: str, seed: int) -> RunConfig:
    """Return the same run under another policy and seed."""
    return replace(config, policy=replace(config.policy, preset=preset), seed=seed)
