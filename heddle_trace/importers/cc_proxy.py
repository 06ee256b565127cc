"""Coding sessions captured by a proxy between client and model: one JSON document a session.

Source: callanjfox/kv-cache-tester. `requests` in order, sub-agents nested among them; `think_time`
is the client's delay before a request, `api_time` the request's own, both in seconds; `hash_ids`
name blocks of the prompt.
"""

from collections.abc import Iterator, Sequence

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    derive_added,
    identifier,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord


class _Request(msgspec.Struct, kw_only=True):
    type: str
    t: float | None = None
    input: Tokens | None = msgspec.field(name="in", default=None)
    output: Tokens | None = msgspec.field(name="out", default=None)
    model: str | None = None
    hash_ids: list[int] = []
    input_types: list[str] = []
    stop: str | None = None
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str | None = None
    subagent_type: str | None = None
    requests: list["_Request"] = []


class _Agent(msgspec.Struct):
    """A session, or a sub-agent of one, while its requests come in."""

    id: str
    agent: str
    parent: str | None
    generations: list[LoggedGeneration]
    last: _Request | None = None
    model: str | None = None


class CcProxy:
    """Sessions of a coding client; sub-agents are trajectories of their own."""

    assumes = (
        "the wait after a generation is the client's delay before its next request: the tool, what "
        "the client adds, and at times a person who approves a call; whole seconds",
        "names of tools are not recorded; a generation that ended its turn waited for a person",
        "nothing is known to be repeated: every session is a group of its own",
    )

    def recognises(self, head: Head) -> bool:
        """A document with `requests` and the size of its hashed blocks."""
        return head.has("requests", "block_size") or head.has("id", "block_size", "hash_id_scope")

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """The session of each file, after the sub-agents it called."""
        for source in sources:
            where = str(source.path)
            block = source.first("block_size", int) or 64
            name = source.first("id", str) or source.label
            main = _Agent(id=identifier(name), agent="claude-code", parent=None, generations=[])
            nested: list[_Agent] = []
            before = context.notes.damaged
            for at, request in source.items(context.notes, "requests.item", _Request):
                with context.notes.guard(at):
                    _take(main, request, block, nested, context)
            for agent in (*nested, main):
                with context.notes.guard(where):
                    if agent is main and context.notes.damaged > before:
                        context.notes.drop("trajectories of which a part is damaged")
                    elif agent.generations:
                        yield ParsedRecord(where, _record(agent, context))
                    else:
                        context.notes.drop("sessions without a generation")


def _take(
    agent: _Agent, request: _Request, block: int, nested: list[_Agent], context: ImportContext
) -> None:
    if request.type == "subagent":
        number = len(nested) + 1
        child = _Agent(
            id=f"{agent.id}/{identifier(request.agent_id or f'agent_{number:03d}')}",
            agent=f"{agent.agent.partition('/')[0]}/{request.subagent_type or 'sub-agent'}",
            parent=agent.id,
            generations=[],
        )
        nested.append(child)
        for inner in request.requests:
            _take(child, inner, block, nested, context)
        return
    if request.output is None:
        context.notes.drop("requests without a count of output tokens")
        return
    shared = 0
    if agent.last is not None:
        shared = _shared(agent.last.hash_ids, request.hash_ids)
        _close(agent.generations[-1], agent.last, request, shared, block)
    agent.model = agent.model or request.model
    agent.generations.append(
        LoggedGeneration(
            output=request.output,
            input=request.input,
            cached=shared * block if agent.last is not None and request.hash_ids else None,
            start_s=request.t,
            end_s=None
            if request.t is None or request.api_time is None
            else request.t + request.api_time,
        )
    )
    agent.last = request


def _close(g: LoggedGeneration, before: _Request, after: _Request, shared: int, block: int) -> None:
    """Record what happened between two requests of one agent."""
    by_user = before.stop == "end_turn" and "tool_result" not in after.input_types
    g.tools = (USER,) if by_user else (UNNAMED,)
    g.wait_s = after.think_time
    pair = [g, LoggedGeneration(output=None, input=after.input)]
    # Where the next prompt does not begin with this one, the added tokens are unknown. The last
    # block may differ: what follows it decides how its end was cut into tokens.
    if before.input is None or shared + 1 >= min(before.input // block, len(before.hash_ids)):
        derive_added(pair)


def _shared(before: Sequence[int], after: Sequence[int]) -> int:
    for index, (a, b) in enumerate(zip(before, after, strict=False)):
        if a != b:
            return index
    return min(len(before), len(after))


def _record(agent: _Agent, context: ImportContext) -> TrajectoryRecord:
    return TrajectoryRecord(
        trajectory_id=agent.id,
        group_id=agent.id,
        workload=context.workload_or("coding-session"),
        prompt_tokens=agent.generations[0].input,
        steps=steps_of(agent.generations, context.notes),
        model=agent.model,
        agent=agent.agent,
        parent_id=agent.parent,
    )
