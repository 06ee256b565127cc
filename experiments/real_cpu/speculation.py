"""Drafts by n-grams on real vLLM engines on CPU, beside what the simulator says of them.

    python -m experiments.real_cpu.speculation --text FILE --other-text FILE [--repeats 5]

Acceptance by position is that of another run of the same engines: of other prompts, taken from the
other text, and other trajectories. Iterations are measured by a sweep of engines that draft. The
model has random weights: how much it accepts is no evidence for a real one.
"""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from experiments.real_cpu.run import HERE, SEED, WORK, heddle
from heddle.config import RuntimeConfig
from heddle.runs import load_run
from heddle.setup import prepare as prepare_run
from heddle.simulation import simulate
from heddle_runtime.tiny_model import make_tiny_model
from heddle_trace import synth, write_trace
from heddle_trace.shrink import shrunk

RESULTS = HERE / "speculation.json"
MODEL, SWEEP, PROFILE = (
    WORK / "speculation-model",
    WORK / "speculation-sweep.json",
    WORK / "speculation.cpu.json",
)
DRAFTS, MAX_RUNNING, CONTEXT = 3, 8, 8192
TRAJECTORIES, PER_GROUP, SHRINK = 32, 8, 8
UNKNOWN = f"ngram:{DRAFTS}:0"
"""Before the other run has told what is accepted."""


@click.command()
@click.option("--text", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--other-text", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--repeats", default=5, show_default=True)
def main(text: Path, other_text: Path, repeats: int) -> None:
    """Measure, predict and compare; results are in speculation.json."""
    _prepare()
    other = _run(_trace(SEED + 1), other_text, UNKNOWN, SEED + 1)
    accepted = other["acceptance"]["accepted"]
    setting = f"ngram:{DRAFTS}:{'/'.join(f'{chance:g}' for chance in accepted)}"
    rows = []
    for number in range(repeats):
        seed = SEED + 2 + number
        rows.append(_run(_trace(seed), text, setting, seed))
        print(json.dumps(rows[-1]))
    off = [abs(row["predicted_s"] / row["measured_s"] - 1.0) for row in rows]
    positions = zip(accepted, *(row["acceptance"]["accepted"] for row in rows), strict=True)
    differences = [abs(median(measured) - predicted) for predicted, *measured in positions]
    found = {
        "predicted_acceptance": accepted,
        "makespan_error_median": round(median(off), 4),
        "acceptance_difference": [round(each, 4) for each in differences],
        "other_run": other,
        "runs": rows,
    }
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in list(found)[:3]}, indent=1))


def _prepare() -> None:
    """Make the model, and measure engines that draft."""
    WORK.mkdir(exist_ok=True)
    if not MODEL.exists():
        make_tiny_model(MODEL, size="medium", seed=SEED)
    if not SWEEP.exists():
        heddle(
            *("profile", "measure", "--engine", "vllm", "--model-dir", MODEL),
            *("--max-running", MAX_RUNNING, "--set", "profile.sweep=quick"),
            *("--set", "profile.max_context=4096", "--set", f"cluster.speculation={UNKNOWN}"),
            *("-o", SWEEP),
        )
    heddle(
        *("profile", "fit", SWEEP, "-o", PROFILE, "--force"),
        *("--set", "profile.max_fit_error=100"),
    )


def _trace(seed: int) -> Path:
    path = WORK / f"speculation-{seed}.jsonl.gz"
    records = synth("coding", TRAJECTORIES, seed, samples_per_group=PER_GROUP)
    write_trace(path, [shrunk(record, SHRINK) for record in records])
    return path


def _run(trace: Path, text: Path, setting: str, seed: int) -> dict[str, Any]:
    """One run on real engines, and the same simulated with what the setting says is accepted."""
    row = heddle(
        *("run", trace, "--policy", "verl", "--json", "--model", PROFILE, "--engines", 2),
        *("--engine", "vllm", "--model-dir", MODEL, "--seed", seed, "--max-running", MAX_RUNNING),
        *("--set", f"runtime.max_context={CONTEXT}", "--set", f"runtime.text={text}"),
        *("--set", f"cluster.speculation={setting}", "--out", WORK / "runs"),
    )
    run = load_run(json.loads(row)["run"])
    setup = prepare_run(replace(run.config, runtime=RuntimeConfig()))
    predicted = load_run(simulate(setup, out=WORK / "runs").path)
    return {
        "seed": seed,
        "setting": setting,
        "measured_s": run.summary["makespan_s"],
        "predicted_s": predicted.summary["makespan_s"],
        "acceptance": run.manifest["world"]["acceptance"],
    }


if __name__ == "__main__":
    main()
