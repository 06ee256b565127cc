"""MINT: one run a line, a chat in which the model writes code or proposes a solution.

Source: xingyaoww/mint-bench, `data/outputs/*/results.jsonl`. No counts per generation, no times.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from heddle_trace.importers.generations import LoggedGeneration, fingerprint, identifier, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sources import SourceFile
from heddle_trace.schema import TrajectoryRecord

_SEARCH = "wikipedia_search"


class _Message(msgspec.Struct):
    role: str
    content: str


class _State(msgspec.Struct):
    history: list[_Message]
    success: bool | None = None


class _Task(msgspec.Struct):
    task_id: str | int
    task_name: str | None = None
    prompt: str | None = None


class _Row(msgspec.Struct):
    state: _State
    task: _Task
    model: Any = None


_ROWS = msgspec.json.Decoder(_Row)


class Mint:
    """Runs of MINT; those of one task, in any file, are a group."""

    assumes = (
        "no times are recorded; code is the tool 'python', or 'wikipedia_search' where it calls "
        "that, and a solution that was not the last word the tool 'submit', which failed",
        "code failed where its output shows a traceback; a turn without code or solution called "
        "nothing, and what answered it is counted as added",
    )

    def recognises(self, head: Head) -> bool:
        """Rows with a task and a state that has a history."""
        return any(
            isinstance(row.get("state"), dict) and "history" in row["state"] and "task" in row
            for row in head.rows
        )

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a line."""
        for source in sources:
            for where, row in source.rows(context.notes, _ROWS):
                with context.notes.guard(where):
                    generations = _generations(row.state.history, context)
                    if not generations:
                        context.notes.drop("runs without a generation")
                        continue
                    yield ParsedRecord(where, _record(row, generations, source, context))


def _record(
    row: _Row, generations: Sequence[LoggedGeneration], source: SourceFile, context: ImportContext
) -> TrajectoryRecord:
    task = row.task
    # Task numbers are unique only with their prompts: every task set counts from 0.
    group = f"{task.task_id}-{fingerprint(task.prompt)[:8]}" if task.prompt else str(task.task_id)
    return TrajectoryRecord(
        trajectory_id=identifier(f"{source.label}/{task.task_id}"),
        group_id=identifier(group),
        workload=context.workload_or(task.task_name or "mint"),
        prompt_tokens=context.tokens.count(row.state.history[0].content),
        steps=steps_of(generations, context.notes),
        source=source.path.name,
        agent="mint",
        outcome=row.state.success,
    )


def _generations(history: Sequence[_Message], context: ImportContext) -> list[LoggedGeneration]:
    generations: list[LoggedGeneration] = []
    generated = ""
    for message in history:
        if message.role == "assistant":
            generated = message.content
            generations.append(LoggedGeneration(output=context.tokens.count(generated)))
        elif generations:
            g = generations[-1]
            g.added = (g.added or 0) + context.tokens.count(message.content)
            g.tools, g.ok = _called(generated, message.content)
    return generations


def _called(generated: str, answer: str) -> tuple[tuple[str, ...], bool | None]:
    """The tool calls of an answered generation, and whether they succeeded."""
    code = re.search(r"<execute>(.*?)</execute>", generated, re.DOTALL)
    if code:
        return (_SEARCH if _SEARCH in code[1] else "python",), "Traceback" not in answer
    if "<solution>" in generated:
        return ("submit",), False
    return (), None
