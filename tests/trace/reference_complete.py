"""`complete` step by step, as docs/traces.md states its rules; slow and easy to read."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from heddle_trace import (
    MissingRules,
    StepRecord,
    StepScript,
    TrajectoryRecord,
    TrajectoryScript,
)


class Gap:
    """One field: what can be drawn, and what was."""

    def __init__(self, name: str, rule: str, seed: int) -> None:
        self.rule = rule
        self.rng = np.random.default_rng([seed, crc32(name.encode())])
        self.pools: dict[str, list[float]] = {}

    def learn(self, value: float | None, *keys: str) -> None:
        if value is not None:
            for key in keys:
                self.pools.setdefault(key, []).append(value)

    def fill(self, *keys: str) -> float:
        if self.rule != "sample":
            return 0
        pool = next(self.pools[key] for key in keys if key in self.pools)
        return pool[int(self.rng.random() * len(pool))]


def of_tool(tool: str | None) -> tuple[str, ...]:
    return (f"tool {tool}",) if tool in (None, "user") else (f"tool {tool}", "any tool")


class Reference:
    """One pass over the records."""

    def __init__(self, records: Sequence[TrajectoryRecord], rules: MissingRules, seed: int) -> None:
        self.cap_s = rules.cap_tool_s
        self.gaps = {
            name: Gap(name, getattr(rules, name), seed)
            for name in ("tool_s", "tool_tokens", "prompt_tokens", "output_tokens")
        }
        self.drawn: dict[str, int] = {}
        for record in records:
            keys = f"group {record.group_id}", f"workload {record.workload}"
            self.gaps["prompt_tokens"].learn(first_prompt(record), *keys)
            for step in record.steps:
                if step.tool is not None:
                    self.gaps["tool_s"].learn(step.tool_s, *of_tool(step.tool))
                    self.gaps["tool_tokens"].learn(step.tool_tokens, *of_tool(step.tool))
                self.gaps["output_tokens"].learn(
                    step.output_tokens, f"tool {step.tool}", "any step"
                )

    def script(self, record: TrajectoryRecord) -> TrajectoryScript:
        end, added, steps = 0, self.prompt(record), []
        for index, step in enumerate(record.steps):
            after = record.steps[index + 1] if index + 1 < len(record.steps) else None
            prompt = end + added
            if index and step.input_tokens is not None:
                prompt = step.input_tokens
            prompt = max(prompt, 1)
            shared = min(end, prompt)
            if prompt < end and step.cached_tokens is not None:
                shared = min(shared, step.cached_tokens)
            output = step.output_tokens
            if output is None:
                output = int(self.gaps["output_tokens"].fill(f"tool {step.tool}", "any step"))
            output = max(output, 1)
            end = prompt + output
            added = self.added(step, after, end)
            tool, tool_s = self.tool(step)
            steps.append(StepScript(prompt, shared, output, tool, tool_s, step.tool_ok, added))
        return TrajectoryScript(
            id=record.trajectory_id,
            group=record.group_id,
            task=record.workload,
            arrival_s=record.arrival_s or 0.0,
            steps=tuple(steps),
            truncated=bool(record.truncated),
        )

    def prompt(self, record: TrajectoryRecord) -> int:
        known = first_prompt(record)
        if known is not None:
            return known
        keys = f"group {record.group_id}", f"workload {record.workload}"
        filled = int(self.gaps["prompt_tokens"].fill(*keys))
        return self.drawn.setdefault(record.group_id, filled)

    def added(self, step: StepRecord, after: StepRecord | None, end: int) -> int:
        if step.tool_tokens is not None:
            return step.tool_tokens
        if after is None:
            return 0
        if after.input_tokens is not None:
            return max(0, after.input_tokens - end)
        if step.tool is None:
            return 0
        return int(self.gaps["tool_tokens"].fill(*of_tool(step.tool)))

    def tool(self, step: StepRecord) -> tuple[str | None, float]:
        tool, tool_s = step.tool, step.tool_s
        if tool is None:
            if not tool_s:
                return None, 0.0
            tool = "unspecified"
        elif tool_s is None:
            tool_s = self.gaps["tool_s"].fill(*of_tool(tool))
        return tool, tool_s if self.cap_s is None else min(tool_s, self.cap_s)


def first_prompt(record: TrajectoryRecord) -> int | None:
    known = record.prompt_tokens
    return record.steps[0].input_tokens if known is None else known


def reference(
    records: Sequence[TrajectoryRecord], rules: MissingRules, seed: int
) -> list[TrajectoryScript]:
    made = Reference(records, rules, seed)
    return [made.script(record) for record in records]
