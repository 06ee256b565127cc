"""`heddle profile check`: a run on engines beside its simulation.

A run is simulated again with its own trace, configuration, policy, seed and context, on engines of
the profile. They have the KV space and the failures of the run's own engines, and a search for a
plan takes as long as in the run. The error is then that of profile and simulator together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from heddle.cluster.profiles import ClusterProfiles, load_cluster_profile
from heddle.config import RunConfig
from heddle.runs import Run, RunError
from heddle.runs.conditions import other_cpu_share
from heddle.runs.journal_buffer import JournalInMemory
from heddle.runs.journal_columns import Journal
from heddle.runs.metrics import measure
from heddle.runs.replay import check_allowed, check_trace, policy_of_run
from heddle.runs.tables import MEASURED
from heddle.setup import (
    Workspace,
    prepare,
    simulation_config,
)
from heddle.workload import Workload
from heddle_calibrate.check import Checked, compare_figures, finish_order, simulation_of_run
from heddle_core.controller import Controller
from heddle_rollout.core import RecordedCore
from heddle_sim.config import SimulationConfig
from heddle_sim.profile_files import Profile, ProfileError
from heddle_sim.rollout import simulate_rollout
from heddle_trace.schema import TrajectoryScript


def check(
    run: Run, profile_path: Path | None = None, *, allow_policies: Sequence[str] = ()
) -> Checked:
    """Simulate a finished run on engines again.

    `allow_policies` are names of the form ``module:factory`` that its configuration may import.

    Raises:
        RunError: the run was simulated, its trace is gone or another, a file of it is not what it
            wrote, or its policy is code that is not allowed.
        ProfileError: the profile is of another model or GPU class, or lacks a TP degree.
    """
    if run.manifest["driver"] != "heddle_runtime":
        raise RunError(
            f"{run.path}: is a simulated run (driver {run.manifest['driver']!r}), which checks "
            f"nothing; give runs of `heddle run`"
        )
    check_allowed(run, allow_policies)
    run.verify()
    config, shared = profiled(run, profile_path), Workspace()
    check_trace(run, shared, "simulating it again takes the trace that it replayed")
    journal = simulated_again(run, config, shared)
    simulated = measure(journal, shared.profiles(config.cluster).solo_tpot())
    cluster = replace(config.cluster, model="")
    return Checked(
        run=str(run.path),
        policy=run.manifest["policy"],
        seed=run.manifest["seed"],
        trace=run.manifest["trace"]["name"],
        kind=repr((run.manifest["trace"]["sha256"], cluster, config.runtime, config.missing)),
        figures=compare_figures(run.summary, simulated.summary),
        finish_order=finish_order(run.trajectories, simulated.trajectories),
        late_share=run.summary.get("late_share", 0.0),
        other_cpu_share=other_cpu_share(run.summary),
    )


def profiled(run: Run, path: Path | None) -> RunConfig:
    """The run's configuration with the profile to simulate with in the place of its own.

    Raises:
        ProfileError: it is of another model or GPU class.
    """
    config = run.config
    if path is None:
        return config
    given = replace(config, cluster=replace(config.cluster, model=str(path)))
    profile = load_cluster_profile(given.cluster)
    own: Profile | None = None
    try:
        own = load_cluster_profile(config.cluster)
    except ProfileError:
        # The profile file of the run is gone: use the name in the path.
        if Path(config.cluster.model).stem != profile.model:
            raise
    for what, mine, theirs in (
        ("model", profile.model, own.model if own is not None else profile.model),
        ("GPU class", profile.gpu, own.gpu if own is not None else profile.gpu),
    ):
        if mine != theirs:
            raise ProfileError(
                f"{path}: is a profile of {what} {mine!r}, but {run.path} ran {theirs!r}; "
                f"fit one of that, or give runs of this"
            )
    return given


def simulated_again(
    run: Run,
    config: RunConfig,
    shared: Workspace,
    adjusted: Callable[[SimulationConfig], SimulationConfig] = lambda simulation: simulation,
) -> Journal:
    """The journal of the rollout of a run, simulated under `config`, in which its profile may be
    another; `adjusted` changes the cluster."""
    profiles, workload = shared.profiles(config.cluster), shared.workload(config)
    context = run.context
    if context is None:
        setup = prepare(config, workspace=shared)
        context, policy = setup.context, setup.policy
    else:
        policy = policy_of_run(run)
    controller = Controller(policy, context.disaggregation, config.cluster.restart_limit)
    recorded = JournalInMemory(MEASURED)
    on_engines = run.manifest["driver"] == "heddle_runtime"
    simulate_rollout(
        _scripts(config, workload) if on_engines else workload.scripts,
        RecordedCore(controller, recorded.record),
        adjusted(
            _simulation(run, config, profiles)
            if on_engines
            else simulation_config(config.cluster, profiles, seed=config.seed)
        ),
    )
    return recorded.journal()


def _scripts(config: RunConfig, workload: Workload) -> list[TrajectoryScript]:
    """The trace as the run replayed it: real engines are given tools at another pace, and no tool
    call longer than the limit."""
    runtime = config.runtime
    scale = runtime.time_scale if runtime.engine != "fake" else 1.0
    most_s = runtime.tool_limit_s if runtime.tool_limit_s is not None else float("inf")
    return [
        replace(
            script,
            steps=tuple(
                replace(step, tool_s=min(step.tool_s * scale, most_s)) for step in script.steps
            ),
        )
        for script in workload.scripts
    ]


def _simulation(run: Run, config: RunConfig, profiles: ClusterProfiles) -> SimulationConfig:
    """The profile's simulation with the KV space and failures of this run's engines."""
    simulation = simulation_of_run(
        run.entries(), simulation_config(config.cluster, profiles, seed=config.seed)
    )
    if config.runtime.engine == "fake":
        return simulation
    return replace(
        simulation,
        moves_by="prefill" if config.runtime.kv_transfer == "none" else "kv",
        max_batched_tokens=config.runtime.max_batched_tokens,
        tool_scale=config.runtime.time_scale,
    )
