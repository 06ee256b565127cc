"""Mooncake: one request a line, with its lengths and the hashes of the blocks of its prompt.

Source: kvcache-ai/Mooncake, FAST'25 traces (512 tokens a block); the aliases of the keys and
`session_id`, `delay` are those of Dynamo's replay (ai-dynamo/dynamo, lib/data-gen). A file whose
later rows hold only what was added to a prompt ("mooncake-delta") cannot be distinguished and is
not meant.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from heddle_trace.complete import USER
from heddle_trace.importers.generations import LoggedGeneration, derive_added, identifier, steps_of
from heddle_trace.importers.heads import Head
from heddle_trace.importers.joining import PrefixJoin
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.protocol import ImportContext, Records
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_AGENTIC = frozenset(("wait_for", "tool_wait_ms", "request_kind", "not_before_ms"))
"""Keys of Dynamo's rows of a workflow."""
_BLOCK_TOKENS = 512
_POWERS = (16, 32, 64, 128, 256, 1024, 2048, 4096, 8192)


class _Row(msgspec.Struct, kw_only=True):
    input_length: Tokens | None = None
    input_tokens: Tokens | None = None
    output_length: Tokens | None = None
    output_tokens: Tokens | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None
    hash_ids: list[int] | None = None
    session_id: str | None = None


class _Part(msgspec.Struct, array_like=True):
    where: str
    tree: str
    time_s: float | None
    input: int
    output: int
    cached: int | None
    delay_s: float | None


_ROWS = msgspec.json.Decoder(_Row)


class Mooncake:
    """Requests of a chat service, joined to conversations."""

    assumes = (
        "between two requests of a conversation a person spoke; how long, the source does not "
        "record",
        "requests without a session are joined where one begins with all full blocks of an earlier "
        "one, two or more, and is as long as its prompt and output; a group is a tree of such "
        "conversations; the hashes of each file are its own",
    )

    def recognises(self, head: Head) -> bool:
        """Rows with an input and an output length, and none of Dynamo's workflow keys."""
        return any(
            ("input_length" in row or "input_tokens" in row)
            and ("output_length" in row or "output_tokens" in row)
            and not _AGENTIC.intersection(row)
            and ("hash_ids" in row or "timestamp" in row or "created_time" in row)
            for row in head.rows
        )

    def records(self, sources: Sequence[SourceFile], context: ImportContext) -> Records:
        """One record a conversation; a session id may go on from file to file, hashes may not."""
        began_s = float("inf")
        with Sessions(_Part) as sessions:
            for source in sources:
                join = PrefixJoin()
                for number, (where, row) in enumerate(source.rows(context.notes, _ROWS), start=1):
                    with context.notes.guard(where):
                        trajectory, part = _part(row, f"{source.label}/{number}", where, join)
                        sessions.add(trajectory, part)
                        if part.time_s is not None:
                            began_s = min(began_s, part.time_s)
                join.note_forgotten("requests", context.notes)
            yield from sessions.records(
                context.notes, partial(_record, began_s=began_s, context=context)
            )


def _part(row: _Row, name: str, where: str, join: PrefixJoin) -> tuple[str, _Part]:
    input_tokens = _either(row.input_length, row.input_tokens, "input_length")
    output_tokens = _either(row.output_length, row.output_tokens, "output_length")
    time_ms = row.timestamp if row.timestamp is not None else row.created_time
    delay_ms = row.delay if row.delay is not None else row.delay_ms
    trajectory = tree = identifier(row.session_id) if row.session_id else name
    cached = None
    if row.session_id is None and row.hash_ids:
        block = _block_tokens(input_tokens, len(row.hash_ids))
        place = join.place(
            name,
            row.hash_ids,
            full=min(input_tokens // block, len(row.hash_ids)),
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        trajectory, tree = place.trajectory, place.tree
        cached = place.shared * block if trajectory != name else None
    part = _Part(
        where=where,
        tree=tree,
        time_s=None if time_ms is None else time_ms / 1_000,
        input=input_tokens,
        output=output_tokens,
        cached=cached,
        delay_s=None if delay_ms is None else delay_ms / 1_000,
    )
    return trajectory, part


def _either(value: int | None, alias: int | None, field: str) -> int:
    found = value if value is not None else alias
    if found is None:
        raise DamagedError(f"{field} is missing")
    return found


def _block_tokens(input_tokens: int, blocks: int) -> int:
    """Tokens of a block: 512, or the power of two that fits the number of hashes."""
    for size in (_BLOCK_TOKENS, *_POWERS):
        if -(-input_tokens // size) == blocks or input_tokens // size == blocks:
            return size
    raise DamagedError(
        f"hash_ids: {blocks:,} blocks do not fit a prompt of {input_tokens:,} tokens"
    )


def _record(
    trajectory: str, parts: Sequence[_Part], began_s: float, context: ImportContext
) -> TrajectoryRecord:
    generations = [
        LoggedGeneration(output=p.output, input=p.input, cached=p.cached, start_s=p.time_s)
        for p in parts
    ]
    for g, after in zip(generations, parts[1:], strict=False):
        g.tools = (USER,)
        g.wait_s = after.delay_s
    derive_added(generations)
    first = parts[0]
    return TrajectoryRecord(
        trajectory_id=trajectory,
        group_id=first.tree,
        workload=context.workload_or("conversation"),
        prompt_tokens=first.input,
        arrival_s=None if first.time_s is None else round(first.time_s - began_s, 6),
        steps=steps_of(generations, context.notes),
    )
