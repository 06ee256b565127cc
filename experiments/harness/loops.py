"""RL loops as computations: a trace that is made on the spot, regimes, and what they reached."""

import gzip
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.jobs import Computation, Size
from heddle.cluster.config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.splits import splits
from heddle_trace.files import write_trace
from heddle_trace.synth import synth

FIRST_SEED = 501
"""Of traces for loops; shipped histories are of other seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Answers without tools: log-normal lengths, cut at `most`, with this mean after the cut."""

    mean: int
    most: int
    sigma: float = 0.8
    prompt: int = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Regimes on one trace and cluster, each at its best of the settings that are tried."""

    regimes: tuple[str, ...]
    workload: str | Lengths = "math"
    model: str = "qwen3-14b"
    gpu: str = "h100"
    gpus: int = 64
    train_gpus: tuple[int, ...] | None = (16,)
    """None: `best` of `heddle loop`."""
    tps: tuple[int, ...] | None = (1,)
    """None: all that hold the contexts."""
    policy: str = "verl"
    colocated: bool = False
    max_running: int = 256
    groups: int = 64
    samples: int = 16
    steps: int = 16
    seed: int = FIRST_SEED
    drift: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `LoopConfig`."""

    @property
    def computation(self) -> Computation:
        """Its rows, by regime, as `heddle loop --json` prints them."""
        return Computation(question={"loop": asdict(self), "version": 1}, make=partial(_run, self))


def verl_async(
    size: Size, lengths: Lengths, thresholds: Sequence[str], *, batches: int = 4
) -> Loop:
    """verl's fully asynchronous runs on 128 H20, a regime for each threshold.

    `batches` of `require_batches` mini-batches, 512 prompts in all, are between two updates. Of its
    page, its script and its Rollouter (September 2026): degrees, mini-batches, a queue of complete
    groups, 16 prompts at once on each engine.
    """
    gpus = sized(size, 128, 16)
    groups = 4 * gpus // batches
    return Loop(
        regimes=tuple(verl_regime(each, batches) for each in thresholds),
        workload=lengths,
        train_gpus=(gpus // 2,),
        groups=groups,
        steps=5 * batches,
        **_on_h20(gpus, groups, logprob_passes=0),
    )


def verl_regime(threshold: str, batches: int = 4) -> str:
    """The regime of `verl_async`."""
    return f"verl-fully-async:staleness_threshold={threshold}:trigger_parameter_sync_step={batches}"


def verl_colocated(size: Size, lengths: Lengths) -> Loop:
    """The synchronous run that it is compared with, on the same GPUs in turn."""
    gpus = sized(size, 128, 16)
    groups = 4 * gpus
    made = _on_h20(gpus, groups, logprob_passes=1)
    return Loop(regimes=("sync",), workload=lengths, colocated=True, groups=groups, steps=5, **made)


def _on_h20(gpus: int, groups: int, *, logprob_passes: int) -> dict[str, Any]:
    steps = max(1, 4 * groups // gpus)
    layout = {"train_backend": "fsdp", "train_cp": 4}
    options = {**layout, "optimizer_steps": steps, "logprob_passes": logprob_passes}
    return {"model": "qwen2.5-7b", "gpu": "h20", "gpus": gpus, "tps": (4,), "options": options}


def sized(size: Size, full: int, reduced: int) -> int:
    """A number that depends on the size."""
    return full if size.full else reduced


def by_regime(rows: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Rows by the name of their regime."""
    return {row["regime"]: row for row in rows["regimes"]}


def step_s(rows: Mapping[str, Any], regime: str) -> float:
    """Seconds of a step."""
    return float(by_regime(rows)[regime]["step_s"]["mean"])


def _run(loop: Loop) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = _config(loop, Path(folder))
        found = compare_regimes(
            splits(config, loop.train_gpus, loop.tps),
            fitting_only=loop.tps is None or loop.train_gpus is None or len(loop.train_gpus) > 1,
        )
    plain = found.plain()
    return {"regimes": plain["regimes"], "tried": plain["tried"]}


def _config(loop: Loop, folder: Path) -> LoopConfig:
    path = folder / "loop.jsonl.gz"
    _write(path, loop, loop.groups * (loop.steps + 6))
    cluster = ClusterConfig(
        gpus=loop.gpus, gpu=loop.gpu, model=loop.model, max_running=loop.max_running
    )
    run = RunConfig(
        trace=str(path), cluster=cluster, policy=PolicyConfig(preset=loop.policy), seed=0
    )
    return LoopConfig(
        run=run,
        regimes=loop.regimes,
        batches=loop.steps,
        groups=loop.groups,
        samples=loop.samples,
        colocated=loop.colocated,
        repeat=True,
        **loop.options,
    )


def _write(path: Path, loop: Loop, prompts: int) -> None:
    # A regime may start a quarter more samples than it trains.
    samples = loop.samples + -(-loop.samples // 4)
    if isinstance(loop.workload, str):
        write_trace(path, synth(loop.workload, prompts * samples, loop.seed, samples, loop.drift))
        return
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for record in _answers(loop.workload, prompts, samples, loop.seed):
            file.write(json.dumps(record) + "\n")


def _answers(lengths: Lengths, prompts: int, samples: int, seed: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng([seed, lengths.mean])
    # Half of the variance is the prompt's.
    shared = np.repeat(rng.standard_normal(prompts), samples)
    own = rng.standard_normal(prompts * samples)
    spread = np.exp(lengths.sigma * (shared + own) / np.sqrt(2.0))
    low, high = 1.0, float(lengths.most) * 100.0
    for _ in range(60):
        median = (low * high) ** 0.5
        mean = float(np.minimum(median * spread, lengths.most).mean())
        low, high = (median, high) if mean < lengths.mean else (low, median)
    tokens: Sequence[float] = np.minimum(median * spread, lengths.most)
    for number, output in enumerate(tokens):
        group, sample = divmod(number, samples)
        yield {
            "trajectory_id": f"answer-{group:05}/{sample:02}",
            "group_id": f"answer-{group:05}",
            "workload": "math",
            "prompt_tokens": lengths.prompt,
            "steps": [{"output_tokens": max(1, int(output))}],
            "source": "experiments",
        }
