"""FireAct: one JSON object a run, question id to a ReAct trajectory, as a text or as messages.

Source: anchen1011/FireAct, `trajs/`. No counts, no times.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec

from heddle_trace.importers.generations import (
    LoggedGeneration,
    identifier,
    reward_of,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.openai_messages import ChatMessage
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sources import SourceFile
from heddle_trace.schema import TrajectoryRecord

_ACTION = re.compile(r"^Action:\s*(\w+)", re.MULTILINE)
_PART = re.compile(r"^(?=Thought:)|^(?=Observation:)", re.MULTILINE)
_LAST = "finish"


class _Run(msgspec.Struct):
    traj: str | list[ChatMessage]
    reward: bool | None = None


class Fireact:
    """ReAct runs over questions; the runs of a question, in any file, are a group."""

    assumes = (
        "no times are recorded; the action 'finish' ends a run and is no tool",
        "the prompt is what stands before the first thought, without the examples",
    )

    def recognises(self, head: Head) -> bool:
        """An object of objects with a trajectory and a prompt."""
        if not isinstance(head.document, dict) or not head.document:
            return False
        first = next(iter(head.document.values()))
        return isinstance(first, dict) and "traj" in first and "prompt" in first

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a question and file."""
        for source in sources:
            for where, (question, run) in source.pairs(context.notes, _Run):
                with context.notes.guard(where):
                    generations, prompt = _generations(run, context)
                    if not generations:
                        context.notes.drop("runs without a generation")
                        continue
                    yield ParsedRecord(
                        where,
                        TrajectoryRecord(
                            trajectory_id=identifier(f"{source.label}/{question}"),
                            group_id=identifier(question),
                            workload=context.workload_or("search-hotpotqa"),
                            prompt_tokens=prompt,
                            steps=steps_of(generations, context.notes),
                            source=source.path.name,
                            agent="fireact",
                            outcome=run.reward,
                            reward=reward_of(run.reward),
                        ),
                    )


def _generations(run: _Run, context: ImportContext) -> tuple[list[LoggedGeneration], int]:
    """Thoughts with their actions, and the observations between them."""
    if isinstance(run.traj, str):
        prompt, *parts = [part.strip() for part in _PART.split(run.traj)]
    else:
        texts = [str(message.content or "") for message in run.traj]
        prompt, parts = (texts[0], texts[1:]) if texts else ("", [])
    generations: list[LoggedGeneration] = []
    for part in parts:
        if part.startswith("Observation:"):
            if generations and generations[-1].tools:
                generations[-1].added = context.tokens.count(part)
            continue
        action = _ACTION.search(part)
        named = action[1].lower() if action else None
        tools = (named,) if named and named != _LAST else ()
        generations.append(LoggedGeneration(output=context.tokens.count(part), tools=tools))
    return generations, context.tokens.count(prompt)
