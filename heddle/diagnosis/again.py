"""What ran, simulated again: of a run directory, or of measured steps on a stated cluster."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, TypeAlias

import msgspec
import numpy as np

from heddle.calibration.check import profiled, simulated_again
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.diagnosis.own_runs import observed_journal, observed_run
from heddle.loops.comparison import loop_journal
from heddle.runs import Run, RunError
from heddle.runs.journal_buffer import JournalInMemory
from heddle.runs.replay import check_allowed, check_trace, loop_of_run
from heddle.runs.tables import MEASURED
from heddle.setup import Workspace, prepare
from heddle.simulation import check_starts_engines
from heddle_rollout.core import RecordedCore
from heddle_sim.config import SimulationConfig
from heddle_sim.rollout import simulate_rollout
from heddle_trace import write_trace
from heddle_trace.columns import TraceColumn
from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.importers.notes import Notes
from heddle_trace.limits import MAX_CLOCK_S
from heddle_trace.observed.columns import ObservedSteps, observed
from heddle_trace.observed.core import ParsedObservation
from heddle_trace.observed.records import records_of
from heddle_trace.observed.schema import ObservedRequest
from heddle_trace.schema import TrajectoryRecord

Adjusted: TypeAlias = Callable[[SimulationConfig], SimulationConfig]
"""Changes the simulated cluster."""
Rollouts: TypeAlias = tuple[ObservedSteps, ...]
"""One after the other."""
_AS_A_FILE: Final = "write them by heddle diagnose --set diagnose.observed=FILE, and verify FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What was observed, and what simulates it."""

    source: str
    config: RunConfig
    seen: Rollouts
    simulate: Callable[[Adjusted], Rollouts]
    """In the same order, with the parts of requests that were recorded."""
    speed_measured: bool = False
    """Engines decode as fast as was measured, and not as the profile says."""


def of_run(run: Run, profile: Path | None, allowed: Sequence[str]) -> Ran:
    """A run of a trace, with the profile that it named, or another.

    Raises:
        RunError: it did not finish, its trace is gone, or its policy is code that is not allowed.
        ProfileError: the profile is of another model or GPU class.
    """
    if run.unfinished is not None:
        raise RunError(f"{run.path}: {run.unfinished}: verify a run that finished")
    if run.manifest["driver"] == "heddle_gateway":
        raise RunError(f"{run.path}: the requests of its clients are in no trace: {_AS_A_FILE}")
    check_allowed(run, allowed, "--set policy.preset=")
    run.verify()
    loop = run.manifest.get("loop")
    config, shared = profiled(run, profile), Workspace()
    check_trace(run, shared, "simulating it again takes the trace that it replayed")

    def simulate(adjusted: Adjusted) -> Rollouts:
        if loop:
            setup = loop_of_run(run)
            simulation = adjusted(setup.run.simulation)
            journal = loop_journal(replace(setup, run=replace(setup.run, simulation=simulation)))
        else:
            journal = simulated_again(run, config, shared, adjusted)
        return (observed_journal(journal, "simulated"),)

    seen = (observed_run(run),)
    return Ran(source=seen[0].header.source, config=config, seen=seen, simulate=simulate)


def of_steps(steps: ObservedSteps, config: RunConfig, workload: str, source: str) -> Ran:
    """Measured steps on the cluster and under the policy of `config`; `workload` is their task.

    Raises:
        ConfigError: they lack what a simulation takes; the message says what.
    """
    _check(steps)
    seen = rollouts(steps)
    records = [_arriving(each, workload) for each in seen]

    def simulate(adjusted: Adjusted) -> Rollouts:
        return tuple(
            _as_recorded(_simulated(config, own, adjusted), each)
            for each, own in zip(seen, records, strict=True)
        )

    decoded = "decode_s" in steps.requests
    return Ran(source=source, config=config, seen=seen, simulate=simulate, speed_measured=decoded)


def _check(steps: ObservedSteps) -> None:
    if not steps.count:
        raise ConfigError(
            "only engines or a trainer were observed, and no requests of trajectories: give spans "
            "beside the metrics, or a run directory"
        )
    if "output_tokens" not in steps.requests:
        raise ConfigError(
            "the logs lack sizes: no output tokens are recorded, which a simulation takes. "
            "heddle.observed/1, RL-Insight's spans, traces of prime-rl and slime have them"
        )
    if steps.header.clock == "trajectory":
        raise ConfigError(
            "the logs have no common clock, so what ran at once is unknown: give logs with times "
            "of arrival. `heddle diagnose` shows where the time of each trajectory went"
        )
    span_s = steps.column("end_s").values.max() - steps.column("start_s").values.min()
    if span_s > MAX_CLOCK_S:
        raise ConfigError(f"the logs span {span_s:,.0f} s: verify the files of one run")
    if not {"prefill_s", "decode_s", "llm_s"} & steps.requests.keys():
        raise ConfigError("the logs have no time of a generation to compare with")


def rollouts(steps: ObservedSteps) -> Rollouts:
    """Measured rollouts, without environments, rewards and trainer; one where steps overlap."""
    sized = {
        name
        for name, made in zip(
            *(steps.column(n).plain() for n in ("trajectory_id", "output_tokens")), strict=True
        )
        if made
    }
    found: defaultdict[int | None, list[ObservedRequest]] = defaultdict(list)
    for each in steps.observations():
        if isinstance(each, ObservedRequest) and each.trajectory_id in sized:
            found[each.rl_step].append(_generating(each))
    spans = [
        (min(r.start_s or 0.0 for r in own), max(r.end_s or 0.0 for r in own), own)
        for own in found.values()
    ]
    spans.sort(key=lambda span: span[0])
    apart = all(after[0] >= before[1] - SLACK_S for before, after in pairwise(spans))
    several = [own for *_, own in spans] if apart else [[r for *_, own in spans for r in own]]
    return tuple(
        observed(steps.header, (ParsedObservation("", each) for each in own), Notes())
        for own in several
    )


def _generating(request: ObservedRequest) -> ObservedRequest:
    return msgspec.structs.replace(
        request,
        start_s=(request.start_s or 0.0) + (request.env_start_s or 0.0),
        end_s=(request.end_s or 0.0) - (request.reward_s or 0.0),
        env_start_s=None,
        reward_s=None,
        rl_step=None,
    )


def _arriving(seen: ObservedSteps, workload: str) -> list[TrajectoryRecord]:
    """A trace whose trajectories arrive when they began."""
    started_s: dict[str, float] = {}
    names, times = (seen.column(n).plain() for n in ("trajectory_id", "start_s"))
    for name, at_s in zip(names, times, strict=True):
        started_s.setdefault(name, at_s)
    begun_s = min(started_s.values())
    return [
        msgspec.structs.replace(
            record, arrival_s=round(started_s[record.trajectory_id] - begun_s, 6)
        )
        for record in records_of(seen, workload)
    ]


def _simulated(
    config: RunConfig, records: list[TrajectoryRecord], adjusted: Adjusted
) -> ObservedSteps:
    """One rollout; its trajectories stay in the order in which they began."""
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "measured.jsonl"
        write_trace(trace, records)
        config, shared = replace(config, trace=str(trace)), Workspace()
        workload = shared.workload(replace(config, seed=0))
        setup = prepare(config, workspace=shared, workload=workload)
        check_starts_engines(setup)
        recorded = JournalInMemory(MEASURED)
        core = RecordedCore(setup.controller(), recorded.record)
        simulate_rollout(workload.scripts, core, adjusted(setup.simulation))
    return observed_journal(recorded.journal(), "simulated")


def _as_recorded(simulated: ObservedSteps, seen: ObservedSteps) -> ObservedSteps:
    """The parts that were recorded: `llm_s` or `prefill_s` holds those before it that were not."""
    into = "llm_s" if "llm_s" in seen.requests else "prefill_s"
    within = {n for n in ("queue_s", "prefill_s", "decode_s") if n not in seen.requests}
    if not within:
        return simulated
    held_s = np.sum([simulated.seconds(name) for name in (*within, into)], axis=0)
    kept = {name: c for name, c in simulated.requests.items() if name not in within}
    return replace(simulated, requests={**kept, into: TraceColumn("real", held_s)})
