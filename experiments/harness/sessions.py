"""Workloads that are not shipped: many calls of short outputs, and tasks of one kind each.

`sessions` are long coding sessions, shaped as the replay set of NVIDIA-NeMo/RL#3663 is described:
610 of them with 19,582 steps in all, 29 at the median, 56 at the 90th percentile, 85 at the 99th,
99 at most. Lengths of prompts and steps are not published there; they are taken from what coding
agents of that kind show (``cc_weka`` and ``tbench_mini`` in docs/traces.md).

`frozenlake` and `gem-math` stand for RollArt's tasks of these names (arXiv 2512.22560), which are
described but not published: FrozenLake spends its time in prefill, math in decoding. A turn of
FrozenLake is a trajectory here, with a long prompt of which no cache has a part, and a short
action; an answer to a math question is long. `rollart-mix` has both, in turn.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from heddle_trace.schema import StepRecord, TrajectoryRecord

Draw = Callable[[int, float, float, float], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Medians and log-normal sigmas of one kind of session; tokens and seconds."""

    steps: float
    steps_sigma: float
    most_steps: int
    prompt: float
    prompt_sigma: float
    output: float
    output_sigma: float
    most_output: float
    payload: float
    payload_sigma: float
    tool: str
    tool_s: float
    tool_sigma: float
    samples: int = 1
    """Trajectories of a prompt."""


TASKS: Mapping[str, Task] = {
    "sessions": Task(
        steps=29.0,
        steps_sigma=math.log(56 / 29) / 1.2816,  # 90th percentile over median
        most_steps=99,
        prompt=6_000,
        prompt_sigma=0.25,
        output=150,
        output_sigma=0.9,
        most_output=4_000,
        payload=350,
        payload_sigma=1.1,
        tool="shell",
        tool_s=1.0,
        tool_sigma=1.2,
    ),
    "frozenlake": Task(
        steps=1.0,
        steps_sigma=0.0,
        most_steps=1,
        prompt=8_000,
        prompt_sigma=0.4,
        output=30,
        output_sigma=0.4,
        most_output=200,
        payload=0,
        payload_sigma=0.0,
        tool="environment",
        tool_s=0.02,
        tool_sigma=0.8,
    ),
    "gem-math": Task(
        steps=1.0,
        steps_sigma=0.0,
        most_steps=1,
        prompt=250,
        prompt_sigma=0.3,
        output=3_000,
        output_sigma=0.5,
        most_output=12_000,
        payload=0,
        payload_sigma=0.0,
        tool="environment",
        tool_s=0.02,
        tool_sigma=0.8,
        samples=8,
    ),
}
MIXES: Mapping[str, Mapping[str, float]] = {
    # On H800 both take about the same GPU time.
    "rollart-mix": {"frozenlake": 0.8, "gem-math": 0.2},
}
"""Shares of the trajectories."""
SESSIONS = (*TASKS, *MIXES)
"""Workloads that `sessions` makes."""


def sessions(workload: str, count: int, seed: int) -> Sequence[TrajectoryRecord]:
    """`count` trajectories of a workload of `SESSIONS`; equal arguments give equal records.

    The prompts of a mix are spread evenly over it.
    """
    mix = MIXES.get(workload)
    if mix is None:
        return _of_task(workload, count, seed)
    placed: list[tuple[float, TrajectoryRecord]] = []
    for name, share in mix.items():
        records = _of_task(name, round(share * count), seed)
        samples = TASKS[name].samples
        placed += [(k // samples * samples / len(records), r) for k, r in enumerate(records)]
    return [record for _, record in sorted(placed, key=lambda each: each[0])]


def _of_task(name: str, count: int, seed: int) -> list[TrajectoryRecord]:
    task = TASKS[name]
    rng = np.random.default_rng([seed, 3663])

    def drawn(size: int, median: float, sigma: float, most: float) -> list[float]:
        values = median * np.exp(sigma * rng.standard_normal(size))
        found: list[float] = np.clip(values, 1e-3, most).tolist()
        return found

    least = min(2, task.most_steps)
    steps = drawn(count, task.steps, task.steps_sigma, task.most_steps)
    prompts = drawn(-(-count // task.samples), task.prompt, task.prompt_sigma, 40_000)
    return [
        TrajectoryRecord(
            trajectory_id=f"{_name(name)}-{index:05d}",
            group_id=f"{_name(name)}-{index // task.samples:05d}",
            workload=name,
            prompt_tokens=round(prompts[index // task.samples]),
            steps=_steps(task, max(least, round(number)), drawn),
            source=f"experiments.harness.sessions seed {seed}",
        )
        for index, number in enumerate(steps)
    ]


def _name(task: str) -> str:
    return "session" if task == "sessions" else task


def _steps(task: Task, number: int, drawn: Draw) -> tuple[StepRecord, ...]:
    outputs = drawn(number, task.output, task.output_sigma, task.most_output)
    payloads = drawn(number, task.payload, task.payload_sigma, 6_000)
    seconds = drawn(number, task.tool_s, task.tool_sigma, 60.0)
    calls = tuple(
        StepRecord(
            output_tokens=max(1, round(output)),
            tool=task.tool,
            tool_s=round(tool_s, 4),
            tool_tokens=round(payload),
            tool_ok=True,
        )
        for output, payload, tool_s in zip(outputs, payloads, seconds, strict=True)
    )
    return (*calls[:-1], StepRecord(output_tokens=calls[-1].output_tokens))
