"""tau2-bench: one JSON document a run, `simulations` in it, each a chat with times and usage.

Source: sierra-research/tau2-bench, `results.json`. In some domains the simulated user has tools
too; their messages never reach the agent's context.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from heddle_trace.importers.chat import Message, Role, generations_of, prompt_of, role_of, text_of
from heddle_trace.importers.clocks import seconds
from heddle_trace.importers.generations import identifier, reward_of, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.openai_messages import Usage
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sources import SourceFile
from heddle_trace.schema import TrajectoryRecord

_CUT_OFF = ("max_steps", "timeout", "too_many_errors", "context_window_exceeded")


class _Call(msgspec.Struct):
    name: str
    arguments: Any = None


class _RawData(msgspec.Struct):
    usage: Usage | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: list[_Call] | None = None
    requestor: str | None = None
    error: bool | None = None
    timestamp: str | float | None = None
    usage: Usage | None = None
    generation_time_seconds: float | None = None
    raw_data: _RawData | None = None


class _Reward(msgspec.Struct):
    reward: float | None = None


class _Simulation(msgspec.Struct):
    id: str
    task_id: str | int
    messages: list[_Message]
    termination_reason: str | None = None
    reward_info: _Reward | None = None


class _Environment(msgspec.Struct):
    domain_name: str | None = None


class _Agent(msgspec.Struct):
    llm: str | None = None


class _Info(msgspec.Struct):
    environment_info: _Environment | None = None
    agent_info: _Agent | None = None


class Tau2:
    """Simulations of tau2-bench; those of a task, in any file of its domain, are a group."""

    assumes = (
        "a tool's time runs from the end of the generation to its message; the simulated user's, "
        "whose own tools are part of it, to their last word",
        "a greeting that no model made is part of the prompt",
    )

    def recognises(self, head: Head) -> bool:
        """A document with `tasks` and `simulations`, or with the `info` that comes before them."""
        if head.has("simulations", "tasks"):
            return True
        return head.has("info", "tasks") and "environment_info" in (head.document["info"] or {})

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a simulation."""
        for source in sources:
            info = source.first("info", _Info) or _Info()
            for where, simulation in source.items(context.notes, "simulations.item", _Simulation):
                with context.notes.guard(where):
                    yield ParsedRecord(where, _record(simulation, info, source, context))


def _record(
    run: _Simulation, info: _Info, source: SourceFile, context: ImportContext
) -> TrajectoryRecord:
    messages = list(_messages(run.messages, context))
    domain = info.environment_info and info.environment_info.domain_name
    group = f"{domain or source.label}-{run.task_id}"
    reward = run.reward_info.reward if run.reward_info else None
    return TrajectoryRecord(
        trajectory_id=identifier(f"{identifier(group)}/{run.id}"),
        group_id=identifier(group),
        workload=context.workload_or("customer-service"),
        prompt_tokens=prompt_of(messages),
        steps=steps_of(generations_of(messages, context.notes, simulated_user=True), context.notes),
        source=source.path.name,
        model=info.agent_info.llm if info.agent_info else None,
        agent="tau2-bench",
        outcome=None if reward is None else reward >= 1.0,
        truncated=run.termination_reason in _CUT_OFF,
        reward=reward_of(reward),
    )


def _messages(raw: Sequence[_Message], context: ImportContext) -> Iterator[Message]:
    spoken = False
    for message in raw:
        role = role_of(message.role)
        if message.requestor == "user" and role == "tool":
            context.notes.drop("answers of the simulated user's own tools")
            continue
        spoken = spoken or role == "user"
        if role == "assistant" and not spoken and message.usage is None:
            role = "system"
        yield _message(message, role, context)


def _message(message: _Message, role: Role, context: ImportContext) -> Message:
    usage = (message.usage if role == "assistant" else None) or Usage()
    raw_usage = (message.raw_data.usage if message.raw_data else None) or Usage()
    calls = (message.tool_calls or []) if role == "assistant" else []
    tokens = 0
    if usage.generated is None:
        tokens = text_of(message.content, context.tokens, context.notes)
        for call in calls:
            tokens += context.tokens.count(call.name + msgspec.json.encode(call.arguments).decode())
    time_s = seconds(message.timestamp)
    took_s = message.generation_time_seconds
    return Message(
        role=role,
        tokens=tokens,
        calls=tuple(call.name for call in calls),
        time_s=time_s,
        start_s=None if time_s is None or took_s is None else time_s - took_s,
        output=usage.generated,
        input=usage.prompt,
        cached=usage.cached if usage.cached is not None else raw_usage.cached,
        failed=message.error,
    )
