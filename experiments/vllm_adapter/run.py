"""The engine in a process of our own beside a `vllm serve` of its own, in turn, on CPU.

    python -m experiments.vllm_adapter.run [--pairs 5] [--rounds 3]

Both have the same model of random weights, float32, one engine, KV space and limits. Judged are the
seconds to start, milliseconds a step at batch 1, 8 and 32, aborts, a resumed step, a kill and a
stop (SIGSTOP), and the makespan of a small rollout beside its simulation, whose profile comes from
one sweep of the engine in our process. Results are in results.json and RESULTS.md.
"""

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from experiments.vllm_adapter.serve_launcher import ServeLauncher
from heddle.calibration.check import check
from heddle.hardware import hardware
from heddle.runs import load_run
from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.plans import EngineSpec
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import VllmSettings, installed_vllm
from heddle_trace import synth, write_trace
from heddle_trace.shrink import shrunk
from tests.rollout.contract import Recorder, grown, ids, request

HERE = Path(__file__).parent
KINDS = ("process", "serve")
BATCHES = (1, 8, 32)
PROMPT, OUTPUT, LONG_OUTPUT = 64, 192, 2000
MAX_RUNNING = 32
SIZES = ("small", "medium")
TRAJECTORIES, PER_GROUP, SHRINK, SEED = 16, 8, 8, 7


def launcher_of(kind: str, model: Path, folder: Path) -> Any:
    """Make a launcher of a kind."""
    settings = VllmSettings(
        model_dir=str(model), dtype="float32", max_context=4096, kv_bytes=256 << 20, hang_s=10.0
    )
    make: Callable[..., Any] = VllmLauncher if kind == "process" else ServeLauncher
    return make(settings, log_dir=folder / kind)


async def one_round(kind: str, model: Path, folder: Path) -> dict[str, Any]:
    """Start an engine, use it, and kill it."""
    launcher, recorder = launcher_of(kind, model, folder), Recorder()
    found: dict[str, Any] = {"kind": kind}
    try:
        began_s = time.monotonic()
        engine = await _begin(launcher, recorder, "first")
        found["start_s"] = time.monotonic() - began_s
        await _whole(engine, recorder, "warm", PROMPT, OUTPUT)
        for batch in BATCHES:
            names = [f"b{batch}.{n}" for n in range(batch)]
            began_s = time.monotonic()
            for name in names:
                engine.start(request(name, ids(name, PROMPT), OUTPUT))
            for name in names:
                await recorder.end_of(name)
            found[f"step_ms_{batch}"] = 1000 * (time.monotonic() - began_s) / OUTPUT
        found |= await _aborted(engine, recorder)
        for name, what in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            engine = await _begin(launcher, recorder, name)
            engine.start(request(name, ids(name, PROMPT), LONG_OUTPUT))
            await asyncio.sleep(1.0)
            began_s = time.monotonic()
            os.killpg(launcher.pid(engine.spec.engine), what)
            await recorder.take("failed")
            found[f"{name}_s"] = time.monotonic() - began_s
    finally:
        await launcher.close()
    return found


async def _begin(launcher: Any, recorder: Recorder, name: str) -> Any:
    spec = EngineSpec(engine=EngineId(name), shape=EngineShape("cpu", 1), max_running=MAX_RUNNING)
    engine = launcher.start(spec, recorder)
    await recorder.take("ready", unless=lambda _: True)
    return engine


async def _whole(engine: Any, recorder: Recorder, name: str, prompt: int, output: int) -> Any:
    engine.start(request(name, ids(name, prompt), output))
    return await recorder.end_of(name)


async def _aborted(engine: Any, recorder: Recorder) -> dict[str, Any]:
    """Abort a step, resume it, and compare with the same step undisturbed."""
    context = ids("aborted", PROMPT)
    whole = (await _whole(engine, recorder, "aborted", PROMPT, LONG_OUTPUT)).output_ids
    engine.start(request("aborted", context, LONG_OUTPUT))
    await asyncio.sleep(1.0)
    began_s = time.monotonic()
    engine.abort(TrajectoryId("aborted"))
    part = await recorder.end_of("aborted")
    abort_s = time.monotonic() - began_s
    rest = request("aborted", grown(context, part), LONG_OUTPUT - part.tokens)
    engine.start(rest)
    resumed = await recorder.end_of("aborted")
    return {
        "abort_ms": 1000 * abort_s,
        "aborted_tokens": part.tokens,
        "exact": part.output_ids == whole[: part.tokens],
        "resumed_equal": (*part.output_ids, *resumed.output_ids) == whole,
    }


def heddle(module: str, *args: object) -> str:
    """Run a command; its standard output."""
    command = [sys.executable, "-m", module, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def makespans(size: str, folder: Path, pairs: int) -> list[dict[str, Any]]:
    """Run a rollout on both in turn, and simulate it."""
    model, profile = folder / size, folder / f"{size}.json"
    sweep, trace = folder / f"{size}.sweep.json", folder / "trace.jsonl.gz"
    records = synth("coding", TRAJECTORIES, SEED, samples_per_group=PER_GROUP)
    write_trace(trace, [shrunk(record, SHRINK) for record in records])
    heddle(
        "heddle.cli",
        *MEASURE,
        *("--engine", "vllm", "--model-dir", model, "--max-running", MAX_RUNNING),
        *("--set", "profile.sweep=small", "--set", "profile.max_context=4096"),
        *("--set", "runtime.max_context=8192", "-o", sweep),
    )
    heddle("heddle.cli", *FIT, sweep, "-o", profile, "--force")
    rows = []
    for pair in range(pairs):
        for kind in KINDS if pair % 2 else reversed(KINDS):
            module = "heddle.cli" if kind == "process" else "experiments.vllm_adapter.with_serve"
            row = json.loads(
                heddle(
                    module,
                    *("run", trace, "--policy", "heddle", "--json", "--engine", "vllm"),
                    *("--model-dir", model, "--engines", 1, "--model", profile),
                    *("--max-running", 12, "--seed", SEED, "--out", folder / "runs"),
                    *("--set", "runtime.max_context=8192"),
                )
            )
            span = check(load_run(row["run"])).figures["makespan_s"]
            rows.append({"size": size, "kind": kind, "measured": span.measured})
            rows[-1]["simulated"] = span.simulated
            click.echo(json.dumps(rows[-1]), err=True)
    return rows


MEASURE, FIT = ("profile", "measure"), ("profile", "fit")


@click.command()
@click.option("--pairs", default=5)
@click.option("--rounds", default=3)
def main(pairs: int, rounds: int) -> None:
    """Measure both, and write the results."""
    results: dict[str, Any] = {"hardware": hardware(), "vllm": str(installed_vllm())}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in SIZES:
            make_tiny_model(folder / size, size=size, seed=SEED)
        results["rounds"] = []
        for size in SIZES:
            for number in range(rounds):
                for kind in KINDS if number % 2 else reversed(KINDS):
                    row = asyncio.run(one_round(kind, folder / size, folder)) | {"size": size}
                    click.echo(json.dumps(row), err=True)
                    results["rounds"].append(row)
        results["makespans"] = [
            row for size in SIZES for row in makespans(size, folder, pairs) if pairs
        ]
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "RESULTS.md").write_text("\n".join(tables(results)) + "\n")


def tables(results: dict[str, Any]) -> list[str]:
    """Medians of both, side by side."""
    lines = ["# One adapter for vLLM or two", "", "| model | figure | process | serve |"]
    lines.append("|---|---|---|---|")
    figures = ["start_s", *(f"step_ms_{batch}" for batch in BATCHES), "abort_ms"]
    figures += ["exact", "resumed_equal", "killed_s", "stopped_s"]
    for size in SIZES:
        for figure in figures:
            cells = []
            for kind in KINDS:
                rows = [r for r in results["rounds"] if (r["kind"], r["size"]) == (kind, size)]
                values = sorted(float(row[figure]) for row in rows)
                cells.append(
                    f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"
                )
            lines.append(f"| {size} | {figure} | {cells[0]} | {cells[1]} |")
        for side in ("measured", "simulated"):
            cells = []
            for kind in KINDS:
                rows = [r for r in results["makespans"] if (r["kind"], r["size"]) == (kind, size)]
                values = sorted(row[side] for row in rows)
                cells.append(
                    f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"
                    if values
                    else ""
                )
            lines.append(f"| {size} | makespan {side}, s | {cells[0]} | {cells[1]} |")
    return lines


if __name__ == "__main__":
    main()
