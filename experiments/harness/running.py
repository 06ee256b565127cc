"""Does missing jobs in processes, and stores each result at once."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from experiments.harness.extract import extract
from experiments.harness.jobs import Computation, Job, Rollout, content_key
from experiments.harness.store import ROOT, Store
from heddle.executor import Executor, InProcess, Processes, Report, WorkerError
from heddle.setup import Workspace, prepare

S = TypeVar("S")


class Skipped(ValueError):  # noqa: N818 -- reads as what happened
    """An experiment cannot run here; the message says why."""


def run_missing(
    jobs: Sequence[Job | Computation],
    store: Store,
    *,
    processes: int,
    on_progress: Callable[[int, int], None],
) -> int:
    """Do every job without a result; returns how many were done.

    Each process writes its own results, one by one, so that nothing that has finished is ever
    lost: not to an interrupt, not to a job that fails. `on_progress` is called with done and total.

    Raises:
        ValueError: a job is refused.
        WorkerError: a process was killed; what has finished is kept.
    """
    wanted = {job.key: job for job in jobs}
    todo = sorted((job for key, job in wanted.items() if key not in store), key=_order)
    if not todo:
        return 0
    on_progress(0, len(todo))
    try:
        each = executor(processes, Workspace()).map(partial(_run, store), todo)
        for done, _ in enumerate(each, 1):
            on_progress(done, len(todo))
    except WorkerError as error:
        error.add_note("What has finished is kept.")
        raise
    return len(todo)


def executor(processes: int, shared: S) -> Executor[S]:
    """Processes whose jobs, once begun, end after Ctrl-C too, and their results are kept."""
    if processes == 1:
        return InProcess(shared)
    return Processes(processes, shared, interrupts="ignored")


def _run(store: Store, shared: Workspace, job: Job | Computation, _: Report | None) -> None:
    if isinstance(job, Job):
        run_one(job, store, shared)
    else:
        store.put(job.key, job.question, job.make())


def _order(job: Job | Computation) -> tuple[int, int, str, str]:
    """Computations, then seed by seed, so that an interrupted set has whole seeds.

    Long ones first, so that no process waits long for the last; jobs of one rollout together: a
    process keeps the trace that it read last in its workspace.
    """
    if isinstance(job, Computation):
        return 0, 0, job.key, ""
    rollout = job.rollout
    return (
        rollout.seed,
        -rollout.trajectories,
        str(msgspec.to_builtins(rollout)),
        job.policy,
    )


def run_one(job: Job, store: Store, shared: Workspace) -> None:
    """Simulate one job and keep what `extract` makes of it.

    Raises:
        Skipped: its recorded trace is not there.
        ValueError: the simulator refuses it; a note names the job.
    """
    import heddle
    from heddle.config import PolicyConfig

    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]  # policies of `experiments.harness`
    config = heddle.RunConfig(
        trace=str(trace_of(job.rollout, store.folder)),
        seed=job.seed,
        missing=job.rollout.missing,
        history=job.history,
        cluster=job.cluster,
        policy=PolicyConfig(preset=job.policy),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="heddle-experiment-") as folder:
            setup = prepare(config, workspace=shared)
            result = heddle.simulate(setup, out=Path(folder))
            made = extract(heddle.load_run(result.path))
            store.put(
                job.key,
                msgspec.to_builtins(job),
                {**made, "bound_s": setup.bound().makespan_s, "wall_s": result.wall_s},
            )
            for file in result.path.iterdir():
                file.chmod(0o644)
    except ValueError as error:
        error.add_note(f"while running {job.policy} on {job.rollout.workload}")
        raise


def trace_of(rollout: Rollout, folder: Path) -> Path:
    """Path of the rollout's trace; a synthetic one is written once and then found.

    Raises:
        Skipped: a recorded trace is not there.
    """
    from heddle_trace import write_trace

    if rollout.path:
        path = ROOT / rollout.path
        if not path.exists():
            raise Skipped(f"{rollout.path} is not there: recorded traces are no part of the source")
        return path
    key = content_key(msgspec.to_builtins(rollout))
    path = folder / "traces" / f"{rollout.workload}-{key[:10]}.jsonl.gz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another process may be looking.
        part = path.with_name(f"{os.getpid()}-{path.name}")
        write_trace(part, records_of(rollout))
        part.replace(path)
    return path


def records_of(rollout: Rollout) -> Sequence[Any]:
    """Synthesise a rollout; `experiments.harness.sessions` has workloads that are not shipped."""
    from experiments.harness.sessions import SESSIONS, sessions
    from heddle_trace import synth

    if rollout.workload in SESSIONS:
        return sessions(rollout.workload, rollout.trajectories, rollout.seed)
    records = synth(rollout.workload, rollout.trajectories, rollout.seed, rollout.samples)
    if rollout.arrive_over_s:
        records = arriving(records, rollout.arrive_over_s, rollout.seed)
    if rollout.tool_scale == 1.0:
        return records
    return [scaled(record, rollout.tool_scale) for record in records]


def arriving(records: Sequence[Any], over_s: float, seed: int) -> Any:
    """The same trajectories, each group at a time of its own, uniform over `over_s`."""
    groups = list(dict.fromkeys(record.group_id for record in records))
    times = np.sort(np.random.default_rng([seed, 1791]).uniform(0.0, over_s, len(groups)))
    at = dict(zip(groups, (times - times[0]).round(3).tolist(), strict=True))
    return [msgspec.structs.replace(r, arrival_s=at[r.group_id]) for r in records]


def scaled(record: Any, factor: float) -> Any:
    """The same trajectory with every tool call `factor` times as long."""
    steps = tuple(
        msgspec.structs.replace(s, tool_s=round(s.tool_s * factor, 6)) if s.tool_s else s
        for s in record.steps
    )
    return msgspec.structs.replace(record, steps=steps)
