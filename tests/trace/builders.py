"""Legal records in one line, for tests that care about one field of them."""

from typing import Any

from heddle_trace import StepRecord, Trace, TrajectoryRecord


def step(output_tokens: int | None = 10, **fields: Any) -> StepRecord:
    return StepRecord(output_tokens=output_tokens, **fields)


def call(output_tokens: int | None = 10, **fields: Any) -> StepRecord:
    """A step that ended in a tool call."""
    given = {"tool": "bash", "tool_s": 0.5, "tool_tokens": 20, "tool_ok": True} | fields
    return StepRecord(output_tokens=output_tokens, **given)


def record(*steps: StepRecord, **fields: Any) -> TrajectoryRecord:
    given = {"trajectory_id": "t", "group_id": "g", "workload": "coding", "prompt_tokens": 100}
    return TrajectoryRecord(steps=steps or (step(),), **(given | fields))


def trace(*records: TrajectoryRecord) -> Trace:
    return Trace("made", records, "0" * 64)
