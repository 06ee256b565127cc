"""Heddle beside other simulators on one load, in turn on one core: CPU time, start-up apart.

    python benchmarks/bench_peers.py [--aisimulate PATH] [--vidur PATH] [--large] [--rounds 3]

PATH is the interpreter, or a command beside it, of an environment with the peer: `pip install
aisimulate==0.13.0.dev202610270000000085` (release 0.13.0 is a stub), or `pip install vidur`.
Without it a peer is looked for on PATH; one that is not found is left out.

The load is a rollout of coding trajectories, 100 for each H100, Llama-3.1-8B at TP 1, at most 100
running steps an engine and 8,192 tokens an iteration: 600 trajectories on 6 GPUs, or with --large
6,400 on 64. CPU time is that of whole processes: Heddle's is `heddle compare` of one policy with
its journal, metrics and files. The same command on one trajectory is the start-up, which is taken
off. Of a command that takes less than ten seconds the best of three counts in each round.

- AISimulate gets the same sessions (mooncake-delta: what each step adds, and the seconds of tools).
  It sends steps round robin, so that its prefix cache finds less and it prefills more.
- Vidur has neither sessions nor a prefix cache. Each step is a request that arrives when it is
  runnable in Heddle's run, and its prompt is what the step adds: contexts are too short, and
  prefill is what a full prefix cache leaves. Its operations take the times of Heddle's profile.
"""

import argparse
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bench_paper import build, pin

from heddle.runs import load_run
from heddle_compiled import installed_version
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import load_profile
from heddle_trace.complete import MissingRules, complete
from heddle_trace.files import write_trace
from heddle_trace.schema import Trace, TrajectoryScript
from heddle_trace.synth import synth

SMALL, LARGE = (600, 6), (6_400, 64)
SEED, MAX_RUNNING, MAX_BATCHED_TOKENS = 11, 100, 8_192
BLOCK_TOKENS = 64
"""Of the hashes in AISimulate's trace, its own default."""
LAYERS, ATTENTION = 32, {"n_embd": 4096, "n_kv_head": 8, "num_tensor_parallel_workers": 1}
"""Llama-3.1-8B as Vidur's tables describe it."""
MAX_CONTEXT = 65_536
SHORT_S = 10.0
ONE, ALL = "one", "all"
"""Names of the two traces: the first trajectory, and all."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A simulator, and its commands by trace; they run in the folder of the traces."""

    name: str
    version: str
    commands: Mapping[str, Sequence[str]]
    outcome: Callable[[], tuple[int, float | None]]
    """Of its last run: steps, and the share of prompt tokens that were in a prefix cache."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Took(NamedTuple):
    """CPU seconds of a tool."""

    one_s: float
    """Of one trajectory: its start-up."""
    all_s: float

    @property
    def net_s(self) -> float:
        """Seconds of the load alone."""
        return self.all_s - self.one_s


# -- the load --------------------------------------------------------------------------------------


def mooncake_delta(scripts: Sequence[TrajectoryScript]) -> Iterator[str]:
    """Rows of AISimulate's trace: one for each step, in milliseconds."""
    block = 0
    for script in scripts:
        context_tokens, wait_s = 0, script.arrival_s
        for number, step in enumerate(script.steps):
            added = step.prompt_tokens - context_tokens
            blocks = -(-added // BLOCK_TOKENS)
            row = {
                "session_id": script.id,
                "input_length": added,
                "output_length": step.output_tokens,
                "hash_ids": list(range(block, block + blocks)),
                "delay" if number else "timestamp": 1e3 * wait_s,
            }
            yield json.dumps(row) + "\n"
            block, wait_s = block + blocks, step.tool_s
            context_tokens = step.prompt_tokens + step.output_tokens


def vidur_requests(scripts: Sequence[TrajectoryScript], run: Path) -> Iterator[str]:
    """Rows of Vidur's trace: one for each step, when it is runnable in a run."""
    yield "Date,Time,PromptTokenCount,CompletionTokenCount\n"
    steps = load_run(run).steps.select(["runnable_s", "trajectory", "step"]).to_pylist()
    by_id = {script.id: script.steps for script in scripts}
    for time_s, trajectory, number in sorted(tuple(step.values()) for step in steps):
        step = by_id[trajectory][number]
        yield f"all,{time_s},{step.prompt_tokens - step.shared_tokens},{step.output_tokens}\n"


def vidur_operations(table: LatencyTable) -> dict[str, str]:
    """Milliseconds of each operation of a layer, as CSV files of Vidur's profiles."""
    per_layer = 1e3 / LAYERS
    largest = MAX_RUNNING + 28

    def linear_s(tokens: int) -> float:
        most = table.base_s[min(tokens, largest)]
        return max(
            most, table.base_s[0] + table.prefill_s(tokens, 0.0) if tokens > largest else 0.0
        )

    layers = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "mlp_act")
    layers += ("input_layernorm", "post_attention_layernorm", "attn_rope", "add")
    mlp = [
        {
            **ATTENTION,
            "n_head": LAYERS,
            "n_expanded_embd": 14_336,
            "use_gated_mlp": True,
            "vocab_size": 128_256,
            "num_tokens": tokens,
            **{f"time_stats.{name}.median": 0.0 for name in layers},
            "time_stats.mlp_up_proj.median": per_layer * linear_s(tokens),
        }
        for tokens in [*range(1, largest, 4), *(2**n for n in range(7, 17))]
    ]
    attention = [
        {
            **ATTENTION,
            "n_q_head": LAYERS,
            "block_size": 16,
            "prefill_chunk_size": chunk,
            "batch_size": batch,
            "kv_cache_size": cached,
            "time_stats.attn_kv_cache_save.median": 0.0,
            "time_stats.attn_decode.median": per_layer
            * table.per_context_s[batch]
            * batch
            * cached,
            "time_stats.attn_prefill.median": per_layer
            * table.prefill_pair_s
            * chunk
            * (cached + chunk / 2),
        }
        for cached in range(0, MAX_CONTEXT + 1, 4_096)
        for chunk, batch in [
            *((0, batch) for batch in (1, 2, 4, 8, 16, 32, 64, largest)),
            *((2**n, 1) for n in range(5, 14)),
        ]
    ]
    return {"mlp": csv(mlp), "attention": csv(attention)}


def csv(rows: Sequence[Mapping[str, object]]) -> str:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    return "\n".join(lines) + "\n"


# -- the tools -------------------------------------------------------------------------------------


def heddle(folder: Path, policy: str, gpus: int) -> Tool:
    """This checkout."""
    options = ["--model", "llama-3.1-8b", "--gpus", str(gpus), "--max-running", str(MAX_RUNNING)]
    options += ["--policies", policy, "--history", "none", "--seed", "0"]
    options += ["--jobs", "1", "--set", "report.page=false"]
    command = [sys.executable, "-m", "heddle.cli", "compare"]

    def outcome() -> tuple[int, float]:
        summary = load_run(last(folder, f"{policy}-{ALL}/*/*/")).summary
        return summary["steps"], summary["prefix_hit"]

    return Tool(
        name=f"heddle {policy}",
        version=f"{installed_version()}, {build()}",
        commands={
            trace: [*command, f"{trace}.jsonl.gz", *options, "--out", f"{policy}-{trace}"]
            for trace in (ONE, ALL)
        },
        outcome=outcome,
    )


def aisimulate(python: Path, version: str, folder: Path, gpus: int) -> Tool:
    """AISimulate; writes the configuration of either trace, as YAML that is JSON."""
    for trace in (ONE, ALL):
        source = {"type": "trace", "paths": [str(folder / f"{trace}.mooncake.jsonl")]}
        workers = {
            "parallelism": {"replicas": gpus, "tensor": 1},
            "scheduler": {"max_batched_tokens": MAX_BATCHED_TOKENS, "max_sequences": MAX_RUNNING},
        }
        case = {
            "traffic": {
                "source": {**source, "format": "mooncake-delta", "block_size": BLOCK_TOKENS},
                "load": {"type": "trace_timestamps"},
            },
            "engine": {
                "mode": "aggregated",
                "model": "meta-llama/Meta-Llama-3.1-8B",
                "hardware": "h100_sxm",
                "backend": "vllm",
                "backend_version": "0.24.0",
                "workers": {"aggregated": workers},
            },
        }
        (folder / f"{trace}.yaml").write_text(json.dumps(case))
    command = [
        str(python),
        "-m",
        "aisimulate",
        "predict",
        "--overwrite",
        "--output-dir",
        "predicted",
    ]

    def outcome() -> tuple[int, float]:
        report = json.loads((folder / "predicted" / "prediction.json").read_text())
        return report["completed_requests"], report["prefix_cache_reused_ratio"]

    return Tool(
        name="AISimulate",
        version=version,
        commands={trace: [*command, "-c", f"{trace}.yaml"] for trace in (ONE, ALL)},
        outcome=outcome,
    )


def vidur(python: Path, version: str, folder: Path, gpus: int) -> Tool:
    """Vidur; writes its profiles where it keeps those that it has downloaded."""
    table = load_profile("llama-3.1-8b", "h100").table(1)
    files = {f"{k}.csv.xz": lzma.compress(v.encode()) for k, v in vidur_operations(table).items()}
    model = {"model": "meta-llama/Llama-3-8B", "device_sku": "h100"}
    for kind, content in (
        ("compute", {**files, "config.json": json.dumps(model).encode()}),
        ("network", {"config.json": json.dumps({"sku": "h100_dgx"}).encode()}),
    ):
        dataset = folder / "cache" / "profiling_data" / kind / f"datasets--heddle--{kind}"
        for file, data in {
            "refs/main": b"0",
            **{f"snapshots/0/{name}": data for name, data in content.items()},
        }.items():
            (dataset / file).parent.mkdir(parents=True, exist_ok=True)
            (dataset / file).write_bytes(data)
    options = {
        "cluster_config_num_replicas": gpus,
        "replica_config_model_name": model["model"],
        "replica_config_device": "h100",
        "replica_config_network_device": "h100_dgx",
        "replica_config_tensor_parallel_size": 1,
        "replica_config_num_pipeline_stages": 1,
        "replica_scheduler_config_type": "sarathi",
        "sarathi_scheduler_config_batch_size_cap": MAX_RUNNING,
        "sarathi_scheduler_config_chunk_size": MAX_BATCHED_TOKENS,
        "request_generator_config_type": "trace_replay",
        "metrics_config_output_dir": "simulated",
        "execution_time_predictor_config_type": "random_forrest",
    }
    requests = {"date": "all", "max_tokens": MAX_CONTEXT}
    requests |= {f"{what}_scale_factor": 1 for what in ("prefill", "decode", "time")}
    options |= {f"trace_request_generator_config_{key}": v for key, v in requests.items()}
    predictor = {
        "model_profiling_dataset": "heddle/compute",
        "network_profiling_dataset": "heddle/network",
        "cache_dir": "cache",
        "prediction_max_tokens_per_request": MAX_CONTEXT,
        "prediction_max_prefill_chunk_size": MAX_BATCHED_TOKENS,
        "attention_decode_batching_overhead_fraction": 0,
        "k_fold_cv_splits": 2,
        "num_training_job_threads": 1,
        "num_estimators": 10,
        "max_depth": 32,
        "min_samples_split": 2,
    }
    options |= {
        f"random_forrest_execution_time_predictor_config_{k}": v for k, v in predictor.items()
    }
    command = [str(python), "-m", "vidur.main"]
    command += [word for key, value in options.items() for word in (f"--{key}", str(value))]
    # Its plots need a browser.
    command += ["--no-metrics_config_store_plots", "--no-metrics_config_enable_chrome_trace"]
    trace_file = "--trace_request_generator_config_trace_file"

    def outcome() -> tuple[int, None]:
        rows = (last(folder, "simulated/*") / "request_metrics.csv").read_text().splitlines()
        return len(rows) - 1, None

    return Tool(
        name="Vidur",
        version=version,
        commands={trace: [*command, trace_file, f"{trace}.csv"] for trace in (ONE, ALL)},
        outcome=outcome,
        environment={"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"},
    )


PEERS = {"aisimulate": aisimulate, "vidur": vidur}
"""By the name of the package that is installed."""


def last(folder: Path, pattern: str) -> Path:
    """The newest of the files that a pattern finds."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def interpreter(path: Path) -> Path:
    """The interpreter of the environment that a command is in."""
    return path if path.name.startswith("python") else path.with_name("python")


def version_of(package: str, python: Path) -> str:
    """The release that is installed beside an interpreter; empty if none is."""
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# -- measuring -------------------------------------------------------------------------------------


def least_cpu_s(tool: Tool, trace: str, folder: Path) -> float:
    """CPU seconds of a command, the least of three if they are few: start-up varies by a tenth."""
    seconds = [cpu_s(tool, trace, folder)]
    while seconds[0] < SHORT_S and len(seconds) < 3:
        seconds.append(cpu_s(tool, trace, folder))
    return min(seconds)


def cpu_s(tool: Tool, trace: str, folder: Path) -> float:
    """CPU seconds of a command with all its processes."""
    log = folder / "log.txt"
    with log.open("wb") as output:
        environment = {**os.environ, **tool.environment}
        process = subprocess.Popen(
            tool.commands[trace], cwd=folder, env=environment, stdout=output, stderr=output
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{tool.name} {tool.version} failed:\n{log.read_text()[-2_000:]}")
    return usage.ru_utime + usage.ru_stime


def measured(tools: Sequence[Tool], steps: int, rounds: int, folder: Path) -> dict[str, list[Took]]:
    """CPU seconds of each tool by round; prints them as they come. All simulate all steps."""
    found: dict[str, list[Took]] = {tool.name: [] for tool in tools}
    for number in range(rounds):
        for tool in tools:
            took = Took(*(least_cpu_s(tool, trace, folder) for trace in (ONE, ALL)))
            found[tool.name].append(took)
            if (simulated := tool.outcome()[0]) != steps:
                sys.exit(f"{tool.name} {tool.version} simulated {simulated:,} of {steps:,} steps")
            print(
                f"round {number + 1}: {tool.name:14} {took.all_s:8.2f} s, of it start-up "
                f"{took.one_s:5.2f} s: {took.net_s:8.2f} s",
                flush=True,
            )
    return found


def main() -> None:
    """Take the rounds, then print rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for package in PEERS:
        parser.add_argument(f"--{package}", type=Path, metavar="PATH")
    parser.add_argument("--large", action="store_true", help="6,400 trajectories on 64 GPUs")
    parser.add_argument("--trajectories", type=int, help="another load, on --gpus")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--policies", default="verl,heddle")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, help="core that everything runs on [the last]")
    args = parser.parse_args()
    for name in ("trajectories", "gpus", "rounds"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    peers: dict[str, tuple[Path, str]] = {}
    for package in PEERS:
        given = getattr(args, package)
        path = given or shutil.which(package)
        python = interpreter(Path(path).absolute()) if path else Path(sys.executable)
        version = version_of(package, python)
        if version:
            peers[package] = python, version
        elif given:
            parser.error(f"--{package} {given}: {python} has no package {package}")
        else:
            print(f"{package} is not installed, or --{package} PATH has to say where: left out")
    if not peers:
        return
    count, gpus = LARGE if args.large else SMALL
    count, gpus = args.trajectories or count, args.gpus or gpus
    where = pin(args.core)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = synth("coding", trajectories=count, seed=SEED)
        traces = {ONE: records[:1], ALL: records}
        tools = [heddle(folder, policy, gpus) for policy in args.policies.split(",")]
        for trace, some in traces.items():
            write_trace(folder / f"{trace}.jsonl.gz", some)
            scripts, _ = complete(Trace(trace, tuple(some), ""), rules=MissingRules(), seed=0)
            rows = mooncake_delta(scripts)
            (folder / f"{trace}.mooncake.jsonl").write_text("".join(rows))
            cpu_s(tools[0], trace, folder)  # when steps are runnable
            run = last(folder, f"{args.policies.split(',')[0]}-{trace}/*/*/")
            (folder / f"{trace}.csv").write_text("".join(vidur_requests(scripts, run)))
        tools += [PEERS[name](*found, folder, gpus) for name, found in peers.items()]
        steps = sum(len(script.steps) for script in scripts)
        tokens = sum(step.output_tokens for script in scripts for step in script.steps)
        print(
            f"{count:,} coding trajectories, {steps:,} steps, {tokens / 1e6:.2f} M output tokens, "
            f"{gpus} H100, Llama-3.1-8B at TP 1; {where}, {args.rounds} rounds"
        )
        for tool in tools:
            # Once before it counts: files are in memory, and Vidur has trained its predictor.
            cpu_s(tool, ONE, folder)
        took = measured(tools, steps, args.rounds, folder)
        reuse = {tool.name: tool.outcome()[1] for tool in tools}
        own = len(args.policies.split(","))
        print("\n".join(report(tools[:own], tools[own:], took, tokens, reuse)))


def report(
    own: Sequence[Tool],
    peers: Sequence[Tool],
    took: Mapping[str, Sequence[Took]],
    tokens: int,
    reuse: Mapping[str, float | None],
) -> Iterator[str]:
    """The rate of each tool, and how many times as fast each policy of Heddle is, in lines."""
    if min(each.net_s for rounds in took.values() for each in rounds) <= 0.0:
        yield "the load is too small to be seen beside the start-up: take more trajectories"
        return
    best_s = {
        name: Took(*map(min, zip(*rounds, strict=True))).net_s for name, rounds in took.items()
    }
    yield f"{'':14} {'CPU s, best':>12} {'M tokens/s':>11} {'prefix reuse':>13}  version"
    for tool in (*own, *peers):
        share, least_s = reuse[tool.name], best_s[tool.name]
        found = "none" if share is None else f"{share:.2f}"
        rate = tokens / least_s / 1e6
        yield f"{tool.name:14} {least_s:12.2f} {rate:11.2f} {found:>13}  {tool.version}"
    yield "ratio of CPU seconds, of the best and (least to most) of a round:"
    for peer in peers:
        for mine in own:
            pairs = zip(took[peer.name], took[mine.name], strict=True)
            ratios = sorted(theirs.net_s / ours.net_s for theirs, ours in pairs)
            yield (
                f"{peer.name} over {mine.name}: {best_s[peer.name] / best_s[mine.name]:.1f} "
                f"({ratios[0]:.1f} to {ratios[-1]:.1f})"
            )


if __name__ == "__main__":
    main()
