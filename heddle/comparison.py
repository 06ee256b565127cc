"""Several policies on one trace and cluster, several seeds each: one table."""

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from heddle.bound import Bound
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.knowledge import Told, model_of
from heddle.signals import Asked
from heddle.simulation import (
    RunResult,
    Workload,
    bound_of,
    policy_of,
    profile_of,
    simulate,
    told_of,
    with_policy,
    workload_of,
)

SCHEMA = "heddle.compare/1"
MAX_SEEDS = 1_000
MIN_STEPS_PER_PROCESS = 20_000
"""Fewer steps than this run faster here than a process starts (about a second of imports)."""


SEED_END = 2**32

POLL_S = 0.2
"""Seconds between two looks at how far worker processes are."""

OnProgress: TypeAlias = Callable[[Sequence[int]], None]

_stop: Event | None = None
"""In a worker process: set when no run is to begin any more."""
_finished: Any = None
"""In a worker process: trajectories that each run has finished, shared with the one that asks."""
_busy = threading.Lock()
"""In a worker process: held while a run goes on."""


class WorkerError(RuntimeError):
    """A process of a comparison was killed, by somebody or for lack of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over seeds, and the half-width of its 95 % confidence interval (Student's t).

    `ci95` is None with one seed: one run says nothing about spread.
    """

    mean: float
    ci95: float | None

    def plain(self) -> dict[str, float | None]:
        """As JSON."""
        return {"mean": self.mean, "ci95": self.ci95}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy over all seeds."""

    policy: str
    makespan_s: Estimate
    throughput_tok_s: Estimate
    speedup: float
    """Mean throughput over that of the first policy named."""
    bound_fraction: float
    """Lower bound of the makespan over the mean makespan; 1 could not be better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `heddle compare` tells."""

    config: RunConfig
    """Of the first run."""
    workload: Workload
    """Under the first seed."""
    profile: str
    history: Told
    bound: Bound
    runs: tuple[RunResult, ...]
    policies: tuple[PolicyResult, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON; equal seeds give equal values but for `wall_s` and `run`."""
        trace, cluster = self.workload.trace, self.config.cluster
        return {
            "schema": SCHEMA,
            "trace": {
                "name": trace.name,
                "trajectories": len(self.workload.scripts),
                "output_tokens": self.workload.output_tokens,
                "sha256": trace.sha256,
                "dropped_over_capacity": len(self.workload.dropped),
                **self.workload.filled,
            },
            "cluster": {
                "gpus": cluster.gpus,
                "gpu": cluster.gpu,
                "model": cluster.model,
                "profile": self.profile,
                "tp": cluster.tp,
                **({"mix": list(cluster.mix)} if cluster.mix else {}),
                "max_running": cluster.max_running,
            },
            "history": self.history.plain(),
            "bound": {
                "makespan_s": self.bound.makespan_s,
                "solo_s": self.bound.solo_s,
                "capacity_s": self.bound.capacity_s,
                **({"tools_s": self.bound.tools_s} if cluster.tool_capacity else {}),
            },
            "runs": [run.row() for run in self.runs],
            "policies": [
                {
                    "policy": p.policy,
                    "makespan_s": p.makespan_s.plain(),
                    "throughput_tok_s": p.throughput_tok_s.plain(),
                    "speedup": p.speedup,
                    "bound_fraction": p.bound_fraction,
                }
                for p in self.policies
            ],
        }


def compare(
    config: RunConfig,
    policies: Sequence[str],
    *,
    seeds: int = 1,
    out: Path = Path("runs"),
    jobs: int | None = None,
    config_text: str | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Run each policy under seeds `config.seed`, `config.seed` + 1, ...; put the results together.

    A seed draws the values that the trace does not tell and permutes the order of its groups, in
    the same way for every policy. `jobs` processes (default: as many as pay) change no
    result. `on_progress` hears, some times a second, how many trajectories each run has finished;
    runs are listed by seed first, then by policy.

    Raises:
        ConfigError: no policy, a policy named twice, or an absurd number of seeds or jobs.
        ValueError: any other of the packages' errors for bad input, before the first run.
        OSError: a run directory cannot be written.
        WorkerError: a process of `jobs` was killed.
        KeyboardInterrupt: a signal asked to end; runs under way say interrupted. More signals
            change nothing.
    """
    _check(policies, seeds, config.seed, jobs)
    # By seed first: the trace is filled in once for all policies.
    configs = [with_policy(config, p, config.seed + s) for s in range(seeds) for p in policies]
    first = workload_of(config)
    for first_of_each in configs[: len(policies)]:
        model_of(first_of_each, policy_of(first_of_each).predictor, first.trace)
    bound = _bound(config, first, seeds)
    steps = sum(len(script.steps) for script in first.scripts)
    processes = jobs if jobs is not None else _processes(len(configs), steps * len(configs))
    done: dict[tuple[str, int], RunResult] = {}
    one = partial(simulate, out=out, config_text=config_text)
    try:
        with Asked():
            for result in _all(configs, one, processes, on_progress):
                done[result.policy, result.seed] = result
    except (KeyboardInterrupt, WorkerError) as e:
        e.add_note(f"{len(done)} of {len(configs)} runs are finished and stay in {out}.")
        raise
    runs = tuple(done[p, config.seed + s] for p in policies for s in range(seeds))
    return Comparison(
        config=config,
        workload=first,
        profile=f"{profile_of(config.cluster).model}.{profile_of(config.cluster).gpu}",
        history=told_of(config),
        bound=bound,
        runs=runs,
        policies=tuple(_by_policy(policies, runs, bound)),
    )


def _check(policies: Sequence[str], seeds: int, first_seed: int, jobs: int | None) -> None:
    if not policies:
        raise ConfigError("no policy is named; see `heddle policies`")
    twice = [p for p in dict.fromkeys(policies) if list(policies).count(p) > 1]
    if twice:
        raise ConfigError(f"policy {twice[0]!r} is named twice")
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError(f"seeds must be from 1 to {MAX_SEEDS:,}, not {seeds}")
    if first_seed + seeds > SEED_END:
        raise ConfigError(f"seed {first_seed} and {seeds - 1} after it pass {SEED_END - 1}")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs must be 1 or more, not {jobs}")


def _bound(config: RunConfig, first: Workload, seeds: int) -> Bound:
    """The bound that holds for every seed: drawn values differ, so the lowest counts."""
    drawn = any(f.sampled for f in first.fill.fields.values())
    bounds = [
        bound_of(with_policy(config, config.policy.preset, config.seed + s))
        for s in range(seeds if drawn else 1)
    ]
    return min(bounds, key=lambda b: b.makespan_s)


def _processes(runs: int, steps: int) -> int:
    """As many processes as there are cores and runs, if there is work enough to pay for them."""
    return max(1, min(os.cpu_count() or 1, runs, steps // MIN_STEPS_PER_PROCESS))


class _Simulate(Protocol):
    """`simulate` with all but these already told."""

    def __call__(
        self, config: RunConfig, *, on_progress: Callable[[int, int], None] | None = None
    ) -> RunResult: ...


def _all(
    configs: Sequence[RunConfig], run: _Simulate, processes: int, on_progress: OnProgress | None
) -> Iterator[RunResult]:
    if processes == 1:
        done = [0] * len(configs)
        for index, config in enumerate(configs):
            yield run(config, on_progress=_hearing(done, index, on_progress))
        return
    # Spawned, not forked: a copy of a process whose libraries run threads may hang.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    # Without a lock, which a killed process would keep: each number has one that writes it.
    counts = context.RawArray("q", len(configs)) if on_progress else None
    pool = ProcessPoolExecutor(
        processes, mp_context=context, initializer=_follow, initargs=(stop, counts)
    )
    polling = _polling(counts, on_progress)
    try:
        # They inherit that SIGINT waits, and so do not die noisily of Ctrl-C while they start.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            runs = [pool.submit(_interruptible, run, *each) for each in enumerate(configs)]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        for ended in as_completed(runs):
            yield ended.result()
    except BrokenProcessPool:
        raise WorkerError(
            "a process was killed before its run was done, perhaps for lack of memory: "
            "compare again with fewer --jobs"
        ) from None
    except BaseException:
        # First the word, then the signal: whoever misses the signal, not yet listening, is told.
        stop.set()
        for process in multiprocessing.active_children():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
        raise
    finally:
        polling.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _hearing(
    done: list[int], index: int, on_progress: OnProgress | None
) -> Callable[[int, int], None] | None:
    """What hears of one run for whoever hears of all."""
    if on_progress is None:
        return None

    def hear(finished: int, _: int) -> None:
        done[index] = finished
        on_progress(done)

    return hear


def _polling(counts: Any, on_progress: OnProgress | None) -> threading.Event:
    """Look at the counts of worker processes from time to time, until the event is set."""
    over = threading.Event()
    if on_progress is not None:

        def poll() -> None:
            while not over.wait(POLL_S):
                on_progress(list(counts))

        threading.Thread(target=poll, daemon=True).start()
    return over


def _follow(stop: Event, finished: Any) -> None:
    """Start a worker process; it ends, its run closed, when the one that asked for it is gone."""
    global _stop, _finished
    _stop, _finished = stop, finished
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        stop.set()
        os.kill(os.getpid(), signal.SIGINT)
        with _busy:
            os._exit(1)  # nobody is there to answer, and the queue of runs would wait for ever

    threading.Thread(target=watch, daemon=True).start()


def _interruptible(run: _Simulate, index: int, config: RunConfig) -> RunResult:
    """In a process of its own: let the first Ctrl-C end the run, and none disturb its closing."""

    def once(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    with _busy:
        signal.signal(signal.SIGINT, once)
        try:
            if _stop is not None and _stop.is_set():
                raise KeyboardInterrupt
            return run(config, on_progress=None if _finished is None else partial(_count, index))
        except KeyboardInterrupt:
            # Its run is closed, and no other will begin. If it stayed, waiting for one, and this
            # run has swallowed the signal by which the pool ends its processes, all would wait.
            os._exit(1)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _count(index: int, finished: int, _: int) -> None:
    _finished[index] = finished


def _by_policy(
    policies: Sequence[str], runs: Sequence[RunResult], bound: Bound
) -> Iterator[PolicyResult]:
    reference: float | None = None
    for policy in policies:
        mine = [run.summary for run in runs if run.policy == policy]
        makespan = _estimate([s["makespan_s"] for s in mine])
        throughput = _estimate([s["throughput_tok_s"] for s in mine])
        reference = throughput.mean if reference is None else reference
        yield PolicyResult(
            policy=policy,
            makespan_s=makespan,
            throughput_tok_s=throughput,
            speedup=throughput.mean / reference,
            bound_fraction=bound.makespan_s / makespan.mean,
        )


def _estimate(values: Sequence[float]) -> Estimate:
    # Imported here: half of scipy's weight is not worth paying for `heddle --help`.
    from scipy.special import stdtrit

    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean=mean, ci95=None)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    return Estimate(mean=mean, ci95=float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / n))
