"""Trajectories of Harbor in ATIF, the Agent Trajectory Interchange Format.

Source: https://harborframework.com/docs/trajectory-format and its specification, versions 1.0 to
1.7 (docs/rfcs/0001-trajectory-format.md of https://github.com/laude-institute/harbor): `steps`
by a system, a user, or the agent; those of the agent hold the calls, what came of them, and the
counts of the provider. Harbor writes `agent/trajectory.json` in the folder of a trial, `TASK__ID`.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, Final

import msgspec

from heddle_trace.importers.chat import Message, generations_of, prompt_of, text_of
from heddle_trace.importers.generations import (
    UNNAMED,
    fingerprint,
    identifier,
    reward_in,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.objects import objects
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sources import SourceFile, converted
from heddle_trace.importers.span_fields import named_in
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_VERSION: Final = "ATIF-"
_TRIAL: Final = re.compile(r"(?P<task>.+)__[^_]+")


class _Call(msgspec.Struct):
    function_name: str = UNNAMED
    arguments: Any = None


class _Result(msgspec.Struct):
    content: Any = None
    subagent_trajectory_ref: Any = None


class _Observation(msgspec.Struct):
    results: list[_Result] = []


class _Metrics(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None


class _Step(msgspec.Struct):
    source: str
    message: Any = None
    reasoning_content: str | None = None
    model_name: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None


class _Agent(msgspec.Struct):
    name: str
    model_name: str | None = None


class _Trajectory(msgspec.Struct):
    schema_version: str
    agent: _Agent
    steps: list[_Step]
    extra: dict[str, Any] | None = None
    subagent_trajectories: list["_Trajectory"] | None = None


class Atif:
    """Trajectories, and those of sub-agents within them."""

    assumes = (
        "a step has one time for its generation and its tools together, so how long a tool took is "
        "not recorded, nor whether it succeeded",
        "steps that were copied from an earlier trajectory are part of the prompt, and steps of "
        "the agent without a call of a model are what the step before them added",
        "trajectories without a group or task id are a group where they are trials of one task by "
        "the names of their folders, else where they begin with the same messages",
    )

    def recognises(self, head: Head) -> bool:
        """A schema version of ATIF's."""
        rows = head.objects or (head.item(),)
        return any(str(row.get("schema_version")).startswith(_VERSION) for row in rows)

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a trajectory or sub-agent."""
        for source in sources:
            for number, (where, raw) in enumerate(objects(source, context.notes), start=1):
                with context.notes.guard(where):
                    name = source.label if number == 1 else f"{source.label}/{number}"
                    trajectory = converted(raw, _Trajectory)
                    for record in _records(trajectory, name, None, source, context):
                        yield ParsedRecord(where, record)


def _records(
    trajectory: _Trajectory,
    name: str,
    parent: str | None,
    source: SourceFile,
    context: ImportContext,
) -> Iterator[TrajectoryRecord]:
    """The records of a trajectory and of the sub-agents that it embeds."""
    messages = [m for step in trajectory.steps for m in _messages(step, context)]
    generations = generations_of(messages, context.notes)
    own = identifier(name)
    if generations:
        extra = trajectory.extra or {}
        group = _group(trajectory, source)
        yield TrajectoryRecord(
            trajectory_id=own,
            group_id=group if parent is None else identifier(f"{group}/{trajectory.agent.name}"),
            workload=context.workload_or("agent"),
            prompt_tokens=prompt_of(messages),
            steps=steps_of(generations, context.notes),
            source=source.path.name,
            model=_model(trajectory),
            agent=trajectory.agent.name,
            reward=reward_in(extra),
            parent_id=parent,
        )
    else:
        context.notes.drop("trajectories without a generation")
    for number, inner in enumerate(trajectory.subagent_trajectories or (), start=1):
        at = f"{name}/{inner.agent.name}-{number}"
        yield from _records(inner, at, own if generations else parent, source, context)


def _messages(step: _Step, context: ImportContext) -> Iterator[Message]:
    """The step as messages: what was said, and the result of each call."""
    made = context.tokens.count(step.reasoning_content)
    made += text_of(step.message, context.tokens, context.notes)
    results = step.observation.results if step.observation else []
    added = [text_of(result.content, context.tokens, context.notes) for result in results]
    if step.source != "agent" or step.is_copied_context or step.llm_call_count == 0:
        yield Message(role="user" if step.source == "user" else "system", tokens=made + sum(added))
        return
    metrics = step.metrics or _Metrics()
    calls = step.tool_calls or []
    written = sum(
        context.tokens.count(call.function_name + _json(call.arguments)) for call in calls
    )
    yield Message(
        role="assistant",
        tokens=made + written,
        calls=tuple(call.function_name for call in calls),
        output=metrics.completion_tokens,
        input=metrics.prompt_tokens,
        cached=metrics.cached_tokens,
    )
    for tokens in added:
        yield Message(role="tool", tokens=tokens)


def _model(trajectory: _Trajectory) -> str | None:
    named = (step.model_name for step in trajectory.steps if step.model_name)
    return trajectory.agent.model_name or next(named, None)


def _group(trajectory: _Trajectory, source: SourceFile) -> str:
    _, group = named_in([trajectory.extra, trajectory.extra and trajectory.extra.get("metadata")])
    if group is not None:
        return identifier(group)
    folder = source.path.absolute().parent
    trial = _TRIAL.fullmatch(folder.parent.name) if folder.name == "agent" else None
    if trial is not None:
        return identifier(trial["task"])
    first = takewhile(lambda step: step.source != "agent", trajectory.steps)
    return f"prompt-{fingerprint(*((step.source, _json(step.message)) for step in first))}"


def _json(value: Any) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()
