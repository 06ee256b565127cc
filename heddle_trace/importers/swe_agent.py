"""SWE-agent: one `.traj` file a trajectory, a JSON document.

Source: SWE-agent/SWE-agent, `docs/usage/trajectories.md` and its test data. `trajectory` holds the
steps with `response`, `action`, `observation`, since version 1 also `execution_time`; `history` the
messages; `info.model_stats` totals of tokens.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from heddle_trace.importers.chat import text_of
from heddle_trace.importers.generations import UNNAMED, LoggedGeneration, identifier, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.protocol import ImportContext, ParsedRecord, Records
from heddle_trace.importers.sources import SourceFile
from heddle_trace.importers.tokens import apportioned
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_COMMAND = re.compile(r"\s*([A-Za-z_][\w.-]{0,63})")


class _Step(msgspec.Struct):
    action: str | None = None
    observation: Any = None
    response: str | None = None
    execution_time: float | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None


class _Stats(msgspec.Struct):
    tokens_received: Tokens | None = None


class _Info(msgspec.Struct):
    exit_status: str | None = None
    model_stats: _Stats | None = None


class _Problem(msgspec.Struct):
    id: str | None = None


class _Model(msgspec.Struct):
    name: str | None = None


class _AgentConfig(msgspec.Struct):
    model: _Model | None = None


class _Config(msgspec.Struct):
    problem_statement: _Problem | None = None
    agent: _AgentConfig | None = None


class SweAgent:
    """Runs of SWE-agent; those of one task are a group."""

    assumes = (
        "a tool is named by the first word of its command; its time is `execution_time`, which "
        "versions before 1 do not record; whether it succeeded is not recorded",
        "the prompt is what `history` holds before the first answer, without schemas of tools",
        "generated tokens are counted over response and command, and brought to the total of "
        "`tokens_received` where the file has one",
    )

    def recognises(self, head: Head) -> bool:
        """A document whose `trajectory` has actions and observations."""
        if not head.has("trajectory") or not isinstance(head.document["trajectory"], list):
            return False
        steps = head.document["trajectory"]
        return not steps or (isinstance(steps[0], dict) and "action" in steps[0])

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a file."""
        for source in sources:
            before = context.notes.damaged
            steps = source.items(context.notes, "trajectory.item", _Step)
            generations = []
            for where, step in steps:
                with context.notes.guard(where):
                    generations.append(_generation(step, context))
            if context.notes.damaged > before:
                context.notes.drop("trajectories of which a part is damaged")
                continue
            with context.notes.guard(str(source.path)):
                yield ParsedRecord(str(source.path), _record(source, generations, context))


def _record(
    source: SourceFile, generations: Sequence[LoggedGeneration], context: ImportContext
) -> TrajectoryRecord:
    info = source.first("info", _Info) or _Info()
    received = info.model_stats.tokens_received if info.model_stats else None
    if received and generations:
        shares = apportioned(received, [g.output or 0 for g in generations])
        for g, share in zip(generations, shares, strict=True):
            g.output = share
        context.notes.assume(
            "outputs from a recorded total, shared out by length", len(generations)
        )
    config = _config(source)
    problem = config.problem_statement.id if config.problem_statement else None
    return TrajectoryRecord(
        trajectory_id=identifier(source.label),
        group_id=identifier(problem or source.label.rpartition("/")[2]),
        workload=context.workload_or("coding"),
        prompt_tokens=_prompt(source, context),
        steps=steps_of(generations, context.notes),
        source=source.path.name,
        model=config.agent.model.name if config.agent and config.agent.model else None,
        agent="swe-agent",
        truncated="exit_" in (info.exit_status or ""),
    )


def _prompt(source: SourceFile, context: ImportContext) -> int | None:
    """Tokens before the first answer; None when the file has no history."""
    tokens = None
    unreported = Notes(skip_bad=True)  # the pass over the steps reports damage
    for _, message in source.items(unreported, "history.item", _Message):
        if message.role == "assistant":
            break
        tokens = (tokens or 0) + text_of(message.content, context.tokens, context.notes)
    return tokens


def _generation(step: _Step, context: ImportContext) -> LoggedGeneration:
    response, action = step.response or "", step.action or ""
    # With function calling the command is in the call, and not in the words of the response.
    text = response if action.strip() in response else f"{response}\n{action}"
    command = _COMMAND.match(action)
    added = text_of(step.observation, context.tokens, context.notes)
    g = LoggedGeneration(output=context.tokens.count(text), added=added, wait_s=step.execution_time)
    if action.strip():
        g.tools = (command[1] if command else UNNAMED,)
    return g


def _config(source: SourceFile) -> _Config:
    """The configuration of the run, which some versions keep as a text of JSON."""
    found = source.first("replay_config", object)
    try:
        if isinstance(found, str):
            return msgspec.json.decode(found, type=_Config)
        return msgspec.convert(found, _Config)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return _Config()
