"""tau-bench: one JSON array of runs, each a chat between an agent and a simulated user.

Source: sierra-research/tau-bench, `historical_trajectories` and its `results`. No counts, no times.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from heddle_trace.importers.chat import Message, generations_of, prompt_of
from heddle_trace.importers.generations import (
    fingerprint,
    identifier,
    reward_of,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.openai_messages import ChatMessage, message_of
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sources import SourceFile
from heddle_trace.schema import TrajectoryRecord


class _Run(msgspec.Struct):
    task_id: int | str
    traj: list[ChatMessage]
    trial: int = 0
    reward: float | None = None
    info: dict[str, Any] | None = None


class TauBench:
    """Runs of tau-bench; the trials of a task are its group."""

    assumes = (
        "no times are recorded; a tool succeeded unless its answer begins with 'Error'",
        "the schemas of the tools are not in the file: prompts are low by their size",
    )

    def recognises(self, head: Head) -> bool:
        """A list of runs with `traj` and `task_id`."""
        return "traj" in head.item() and "task_id" in head.item()

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a run."""
        for source in sources:
            for where, run in source.items(context.notes, "item", _Run):
                with context.notes.guard(where):
                    yield ParsedRecord(where, _record(run, source, context))


def _record(run: _Run, source: SourceFile, context: ImportContext) -> TrajectoryRecord:
    messages = [_with_failure(message_of(m, context), m) for m in run.traj]
    task = (run.info or {}).get("task")
    # The task itself, not its number: number 3 of the airline is not number 3 of the shop.
    group = (
        f"{run.task_id}-{fingerprint(msgspec.json.encode(task))[:8]}" if task else f"{run.task_id}"
    )
    return TrajectoryRecord(
        trajectory_id=identifier(f"{source.label}/{run.task_id}/{run.trial}"),
        group_id=identifier(group),
        workload=context.workload_or("customer-service"),
        prompt_tokens=prompt_of(messages),
        steps=steps_of(generations_of(messages, context.notes, simulated_user=True), context.notes),
        source=source.path.name,
        agent="tau-bench",
        outcome=None if run.reward is None else run.reward >= 1.0,
        reward=reward_of(run.reward),
    )


def _with_failure(message: Message, raw: ChatMessage) -> Message:
    if message.role == "tool":
        message.failed = isinstance(raw.content, str) and raw.content.startswith("Error")
    return message
