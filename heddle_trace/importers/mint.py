"""MINT: one run a line, a chat in which the model writes code or proposes a solution.

Source: xingyaoww/mint-bench, `data/outputs/*/results.jsonl`. No counts per generation, no times.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from heddle_trace.importers.generations import Generation, fingerprint, identifier, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.protocol import Desk, Found
from heddle_trace.importers.sources import Source
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

    def records(self, sources: Sequence[Source], desk: Desk) -> Iterator[Found]:
        """One record a line."""
        for source in sources:
            for where, row in source.rows(desk.notes, _ROWS):
                with desk.notes.guard(where):
                    generations = _generations(row.state.history, desk)
                    if not generations:
                        desk.notes.drop("runs without a generation")
                        continue
                    yield Found(where, _record(row, generations, source, desk))


def _record(
    row: _Row, generations: Sequence[Generation], source: Source, desk: Desk
) -> TrajectoryRecord:
    task = row.task
    # Numbers of tasks are told apart by what they ask: every task set counts from 0.
    group = f"{task.task_id}-{fingerprint(task.prompt)[:8]}" if task.prompt else str(task.task_id)
    return TrajectoryRecord(
        trajectory_id=identifier(f"{source.label}/{task.task_id}"),
        group_id=identifier(group),
        workload=desk.workload_or(task.task_name or "mint"),
        prompt_tokens=desk.tokens.count(row.state.history[0].content),
        steps=steps_of(generations, desk.notes),
        source=source.path.name,
        agent="mint",
        outcome=row.state.success,
    )


def _generations(history: Sequence[_Message], desk: Desk) -> list[Generation]:
    generations: list[Generation] = []
    said = ""
    for message in history:
        if message.role == "assistant":
            said = message.content
            generations.append(Generation(output=desk.tokens.count(said)))
        elif generations:
            g = generations[-1]
            g.added = (g.added or 0) + desk.tokens.count(message.content)
            g.tools, g.ok = _called(said, message.content)
    return generations


def _called(said: str, answer: str) -> tuple[tuple[str, ...], bool | None]:
    """What a turn that was answered had called, and whether it worked."""
    code = re.search(r"<execute>(.*?)</execute>", said, re.DOTALL)
    if code:
        return (_SEARCH if _SEARCH in code[1] else "python",), "Traceback" not in answer
    if "<solution>" in said:
        return ("submit",), False
    return (), None
