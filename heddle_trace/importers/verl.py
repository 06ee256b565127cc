"""verl's dumps of rollouts and validations, one sequence a line, one file a step of training.

Source: verl 0.9.1, `_log_rollout_data` and `_write_generations` in trainer/ppo/v1/trainer_base.py
and trainer/ppo/ray_trainer.py (`trainer.rollout_data_dir`, `trainer.validation_data_dir`): `input`
and `output` as text without special tokens, `score`, `step`, and what the reward function adds. The
trainer that is the default since 0.9 writes `uid`: the prompt's id, the number of the sample, and
the number of the sequence within it. `output` holds all steps of a sequence and the answers of its
tools, and no mask that separates them.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    fingerprint,
    identifier,
    reward_of,
    rl_step_of,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.protocol import ImportContext, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.importers.tokens import Counter
from heddle_trace.schema import TrajectoryRecord

_CALL_END: Final = "</tool_call>"
_ANSWER, _ANSWER_END = "<tool_response>", "</tool_response>"
_NEXT: Final = re.compile(r"\s*(?:assistant[ \t]*(?:\n|$))?")
"""What a template writes between an answer and the next generation."""

_CALL: Final = re.compile(
    r"<tool_call>\s*(?:<function=(?P<tag>[^>\n]{1,200})>"
    r"|\{(?:[^{}]{0,1000}?)\"name\"\s*:\s*\"(?P<json>[^\"\n]{1,200})\""
    r"|(?P<word>[\w.-]{1,200})\s)"
)
"""A call as Qwen and Hermes write it, as Qwen Coder does, as GLM does."""

_KEY: Final = re.compile(r"(?P<prompt>.+)_(?P<sample>\d+)_(?P<index>\d+)", re.DOTALL)


class _Row(msgspec.Struct):
    input: str
    output: str
    step: int
    score: float | None = None
    uid: str | int | None = None
    request_id: str | int | None = None


class _Generated(msgspec.Struct, array_like=True):
    """A step, without its text: what was generated, and what its tools answered."""

    output: int
    tools: tuple[str, ...] = ()
    added: int | None = None


class _Part(msgspec.Struct, array_like=True):
    """One sequence, without its text."""

    where: str
    group: str
    file: str
    prompt: int
    steps: list[_Generated]
    score: float | None
    step: int


_ROWS = msgspec.json.Decoder(_Row)


class Verl:
    """Sequences of verl's rollouts; those of one prompt in one step of training are a group."""

    assumes = (
        "neither times nor token counts are recorded, nor whether a tool succeeded",
        f"what stands in {_ANSWER} after a call was added by the tool, and all else was generated: "
        "with a chat template that marks answers otherwise, a sequence is one step and its output "
        "contains them",
        "special tokens are not in the texts and are not counted",
        "sequences without a uid are a group where they have the same input in the same step",
    )

    def recognises(self, head: Head) -> bool:
        """Rows of text in, text out, and a score."""
        return any(
            isinstance(row.get("input"), str)
            and isinstance(row.get("output"), str)
            and "score" in row
            and "step" in row
            for row in head.rows
        )

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a sample of a prompt."""
        with Sessions(_Part) as sessions:
            for source in sources:
                for number, (where, row) in enumerate(source.rows(context.notes, _ROWS), start=1):
                    with context.notes.guard(where):
                        name = f"{source.label}/{number}"
                        sessions.add(*_part(row, name, where, source, context.tokens))
            yield from sessions.records(context.notes, partial(_record, context=context))


def _part(
    row: _Row, name: str, where: str, source: SourceFile, tokens: Counter
) -> tuple[str, _Part]:
    """The sample of a sequence, and the sequence's part of it."""
    uid = None if row.uid is None else str(row.uid)
    key = _KEY.fullmatch(uid or "")
    if key is not None:
        group, sample = identifier(key["prompt"]), f"{key['prompt']}_{key['sample']}"
    else:
        same_input = f"step-{row.step}/prompt-{fingerprint(row.input)}"
        group = identifier(uid) if uid is not None else same_input
        sample = str(row.request_id or name)
    return identifier(sample), _Part(
        where=where,
        group=group,
        file=source.path.name,
        prompt=tokens.count(row.input),
        steps=list(_steps(row.output, tokens)),
        score=reward_of(row.score),
        step=row.step,
    )


def _steps(text: str, tokens: Counter) -> Iterator[_Generated]:
    """The steps of a sequence, split at the answers of tools; before a call nothing is one."""
    begin = 0
    while (called := text.find(_CALL_END, begin)) >= 0:
        at = text.find(_ANSWER, called)
        if at < 0:
            break
        generated = _without_user_line(text[begin:at])
        calls = tuple(m["tag"] or m["json"] or m["word"] for m in _CALL.finditer(generated))
        added = begin + len(generated)
        begin, answers = _after_answers(text, at)
        yield _Generated(
            output=tokens.count(generated),
            tools=(*calls, *[UNNAMED] * answers)[:answers],
            added=tokens.count(text[added:begin]),
        )
    if begin == 0 or text[begin:].strip():
        yield _Generated(output=tokens.count(text[begin:]))


def _without_user_line(text: str) -> str:
    """What a template writes before the answers of tools is no part of the generation."""
    kept = text.rstrip()
    named = kept.endswith("user") and kept[:-4].rstrip(" \t").endswith("\n")
    return kept[:-4].rstrip() if named else kept


def _after_answers(text: str, at: int) -> tuple[int, int]:
    """Where the next generation begins after the answers at `at`, and how many they are.

    A sequence that reached its limit can end within an answer.
    """
    answers = 0
    while text.startswith(_ANSWER, at):
        answers += 1
        end = text.find(_ANSWER_END, at)
        if end < 0:
            return len(text), answers
        at = end + len(_ANSWER_END)
        near = text[at : at + 20]
        if near.lstrip().startswith(_ANSWER):
            at += len(near) - len(near.lstrip())
    following = _NEXT.match(text, at)
    return following.end() if following else at, answers


def _record(sample: str, parts: Sequence[_Part], context: ImportContext) -> TrajectoryRecord:
    first = parts[0]
    generations = [
        LoggedGeneration(
            output=step.output,
            input=part.prompt if part is not first and index == 0 else None,
            tools=step.tools,
            added=step.added,
        )
        for part in parts
        for index, step in enumerate(part.steps)
    ]
    if len(parts) > 1:
        context.notes.assume(
            "sequences of a sample joined to one before them, as if the context was replaced",
            len(parts) - 1,
        )
    return TrajectoryRecord(
        trajectory_id=sample,
        group_id=first.group,
        workload=context.workload_or("rollout"),
        prompt_tokens=first.prompt,
        steps=steps_of(generations, context.notes),
        source=first.file,
        agent="verl",
        reward=parts[-1].score,
        step=rl_step_of(first.step),
    )
