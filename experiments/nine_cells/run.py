"""Coding, search and math on Qwen3-8B, 14B and 32B: baselines, Heddle, its ablations, the bound.

    python experiments/nine_cells/run.py [--seeds 3] [--jobs 2] [--only coding:qwen3-14b] [--fresh]

The setting of the Heddle paper (arXiv 2603.28101, section on evaluation): 64 H100, 100 trajectories
for each baseline engine, 16 samples of a prompt, baselines at TP 1, 1 and 2. Each seed is a rollout
of its own, synthesised with that seed; policies know the shipped prior of the workload, which is
made from other seeds. Results are kept in results.json as they come, so that an interrupted run
goes on where it was; the tables in RESULTS.md are written at the end.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import click
from scipy.stats import t as student

HERE = Path(__file__).parent
WORKLOADS = ("coding", "search", "math")
MODELS = {"qwen3-8b": 1, "qwen3-14b": 1, "qwen3-32b": 2}
"""Baseline TP degree of each model, as in the paper."""
PREDICTION_S = {"coding": 0.10, "search": 0.15, "math": 0.27}
"""Latency of a served prediction: the paper's Table 1, 14B."""
BASELINES = ("verl", "verl-star", "slime")
POLICIES = (*BASELINES, "heddle-paper", "heddle", "heddle+oracle")
ABLATIONS = {
    "scheduler": "heddle-no-priority",
    "placement": "heddle-no-placement",
    "migration": "heddle-no-migration",
    "resource manager": "heddle-no-plan",
}
PAPER_ABLATIONS = {
    "scheduler": "1.1-1.26",
    "placement": "1.2-1.5, placement and migration together",
    "migration": "-",
    "resource manager": "1.1-1.3",
}
GPUS, PER_ENGINE, SAMPLES = 64, 100, 16
FIRST_SEED = 101


@dataclass(frozen=True)
class Job:
    """One policy on one rollout."""

    workload: str
    model: str
    seed: int
    policy: str

    @property
    def key(self) -> str:
        """Its name in results.json."""
        return f"{self.workload}/{self.model}/{self.seed}/{self.policy}"


def jobs(seeds: int, only: str | None) -> Iterator[Job]:
    """Everything to run; ablations on the 14B cells, as in the paper."""
    for workload in WORKLOADS:
        for model in MODELS:
            if only in (None, f"{workload}:{model}"):
                ablations = ABLATIONS.values() if model == "qwen3-14b" else ()
                for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                    for policy in (*POLICIES, *ablations):
                        yield Job(workload, model, seed, policy)


def run(job: Job) -> dict[str, Any]:
    """Simulate one job in a temporary folder; returns its figures and the bound."""
    import heddle
    from heddle.config import PolicyConfig
    from heddle.simulation import bound_of
    from heddle_trace import synth, write_trace

    tp = MODELS[job.model]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / f"{job.workload}.jsonl.gz"
        write_trace(trace, synth(job.workload, GPUS // tp * PER_ENGINE, job.seed, SAMPLES))
        config = heddle.RunConfig(
            trace=str(trace),
            cluster=heddle.ClusterConfig(
                model=job.model,
                gpu="h100",
                gpus=GPUS,
                tp=tp,
                max_running=PER_ENGINE,
                prediction_s=PREDICTION_S[job.workload],
            ),
        )
        config = replace(config, policy=PolicyConfig(preset=job.policy))
        result = heddle.simulate(config, out=Path(folder))
        return {**result.row(), "run": None, "bound_s": bound_of(config).makespan_s}


def interval(values: Sequence[float]) -> str:
    """Mean and half-width of its 95 % confidence interval (Student's t)."""
    if len(values) < 2:
        return f"{mean(values):.2f}"
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / sqrt(len(values))
    return f"{mean(values):.2f} ± {half:.2f}"


def tables(results: dict[str, dict[str, Any]], seeds: int) -> str:
    """RESULTS.md."""
    command = "python experiments/nine_cells/run.py"
    text = [
        "# Nine cells",
        "",
        f"64 H100, 100 trajectories for each baseline engine, {seeds} rollouts for each cell "
        f"(seeds {FIRST_SEED} to {FIRST_SEED + seeds - 1}), mean ± half-width of the 95 % "
        f"confidence interval over them. Made by `{command} --seeds {seeds}`.",
        "",
        "## Throughput of `heddle` over each policy",
        "",
        "Output tokens per second over the makespan, paired by rollout. *bound* is the lower bound",
        "of the makespan over the makespan; `heddle+oracle` knows all lengths.",
        "",
        "| workload | model | "
        + " | ".join(f"over {b}" for b in (*BASELINES, "heddle-paper"))
        + " | `heddle` s | `heddle` bound | `heddle+oracle` bound |",
        "|---" * (2 + len(BASELINES) + 4) + "|",
    ]
    for workload in WORKLOADS:
        for model in MODELS:
            rows = [
                {p: results.get(Job(workload, model, seed, p).key) for p in POLICIES}
                for seed in range(FIRST_SEED, FIRST_SEED + seeds)
            ]
            whole = [r for r in rows if all(r.values())]
            if not whole:
                continue

            def over(policy: str, rows: list[Any] = whole) -> str:
                return interval(
                    [r["heddle"]["throughput_tok_s"] / r[policy]["throughput_tok_s"] for r in rows]
                )

            def share(policy: str, rows: list[Any] = whole) -> str:
                return interval([r[policy]["bound_s"] / r[policy]["makespan_s"] for r in rows])

            seconds = mean(r["heddle"]["makespan_s"] for r in whole)
            text.append(
                f"| {workload} | {model} | "
                + " | ".join(over(p) for p in (*BASELINES, "heddle-paper"))
                + f" | {seconds:.0f} | {share('heddle')} | {share('heddle+oracle')} |"
            )
    text += [
        "",
        "## Ablations, Qwen3-14B",
        "",
        "Throughput of `heddle` over `heddle` without the part.",
        "",
        "| without | " + " | ".join(WORKLOADS) + " | the paper |",
        "|---" * (2 + len(WORKLOADS)) + "|",
    ]
    for name, policy in ABLATIONS.items():
        cells = []
        for workload in WORKLOADS:
            pairs = [
                (
                    results.get(Job(workload, "qwen3-14b", seed, "heddle").key),
                    results.get(Job(workload, "qwen3-14b", seed, policy).key),
                )
                for seed in range(FIRST_SEED, FIRST_SEED + seeds)
            ]
            ratios = [a["throughput_tok_s"] / b["throughput_tok_s"] for a, b in pairs if a and b]
            cells.append(interval(ratios) if ratios else "-")
        text.append(f"| {name} | " + " | ".join(cells) + f" | {PAPER_ABLATIONS[name]} |")
    return "\n".join(text) + "\n"


@click.command()
@click.option("--seeds", default=3, show_default=True, help="Rollouts for each cell")
@click.option("--jobs", "processes", default=2, show_default=True, help="Processes")
@click.option("--only", help="One cell, as WORKLOAD:MODEL")
@click.option("--fresh", is_flag=True, help="Forget earlier results")
def main(seeds: int, processes: int, only: str | None, fresh: bool) -> None:
    """Run what is missing in results.json, then write RESULTS.md."""
    store = HERE / "results.json"
    results = {} if fresh or not store.exists() else json.loads(store.read_text(encoding="utf-8"))
    todo = [job for job in jobs(seeds, only) if job.key not in results]
    with ProcessPoolExecutor(processes) as pool:
        asked = {pool.submit(run, job): job for job in todo}
        for done, future in enumerate(as_completed(asked), 1):
            job = asked[future]
            results[job.key] = future.result()
            ordered = json.dumps(results, indent=1, sort_keys=True)
            store.write_text(ordered + "\n", encoding="utf-8")
            made = results[job.key]
            click.echo(f"{done}/{len(todo)} {job.key} {made['makespan_s']:.0f} s", err=True)
    (HERE / "RESULTS.md").write_text(tables(results, seeds), encoding="utf-8")
    click.echo(f"wrote {HERE / 'RESULTS.md'}", err=True)


if __name__ == "__main__":
    main()
