"""Long coding sessions, shaped as the replay set of NVIDIA-NeMo/RL#3663 is described.

610 sessions with 19,582 steps in all: 29 a session at the median, 56 at the 90th percentile, 85 at
the 99th, 99 at most. Lengths of prompts and steps are not published there; they are taken from
what coding agents of that kind show (``cc_weka`` and ``tbench_mini`` in docs/workloads.md).
"""

import math
from collections.abc import Sequence

import numpy as np

from heddle_trace.schema import StepRecord, TrajectoryRecord

SESSIONS = ("sessions",)
_MEDIAN_STEPS, _MOST_STEPS = 29.0, 99
_STEPS_SIGMA = math.log(56 / 29) / 1.2816  # 90th percentile over median of a log-normal
_PROMPT, _PROMPT_SIGMA = 6_000, 0.25
_OUTPUT, _OUTPUT_SIGMA = 150, 0.9
_PAYLOAD, _PAYLOAD_SIGMA = 350, 1.1
_TOOL_S, _TOOL_SIGMA = 1.0, 1.2


def sessions(count: int, seed: int) -> Sequence[TrajectoryRecord]:
    """`count` sessions, each a group of its own; equal arguments give equal records."""
    rng = np.random.default_rng([seed, 3663])

    def drawn(size: int, median: float, sigma: float, most: float) -> list[float]:
        values = median * np.exp(sigma * rng.standard_normal(size))
        found: list[float] = np.clip(values, 1e-3, most).tolist()
        return found

    steps = [max(2, round(s)) for s in drawn(count, _MEDIAN_STEPS, _STEPS_SIGMA, _MOST_STEPS)]
    prompts = drawn(count, _PROMPT, _PROMPT_SIGMA, 40_000)
    records = []
    for index, (number, prompt) in enumerate(zip(steps, prompts, strict=True)):
        outputs = drawn(number, _OUTPUT, _OUTPUT_SIGMA, 4_000)
        payloads = drawn(number, _PAYLOAD, _PAYLOAD_SIGMA, 6_000)
        seconds = drawn(number, _TOOL_S, _TOOL_SIGMA, 60.0)
        calls = tuple(
            StepRecord(
                output_tokens=max(1, round(output)),
                tool="shell",
                tool_s=round(tool_s, 4),
                tool_tokens=round(payload),
                tool_ok=True,
            )
            for output, payload, tool_s in zip(outputs, payloads, seconds, strict=True)
        )
        last = StepRecord(output_tokens=calls[-1].output_tokens)
        records.append(
            TrajectoryRecord(
                trajectory_id=f"session-{index:05d}",
                group_id=f"session-{index:05d}",
                workload="sessions",
                prompt_tokens=round(prompt),
                steps=(*calls[:-1], last),
                source=f"experiments.harness.sessions seed {seed}",
            )
        )
    return records
