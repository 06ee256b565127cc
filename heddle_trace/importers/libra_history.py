"""Libra's history: one training step a line with its sequences, or one sequence a line.

Source: NetX-lab/Libra, infra/observability/history_collector.py and workflow/. Per sequence
`input_len`, `output_len`, `prompt_id` and `tool_returns`, each with type, status, tokens,
and where in the sequence it stands. In the release positions and `total_output_tokens` count what
tools added; in the paper they count generated tokens alone. The sums show which of the two applies.
"""

from collections.abc import Iterator, Sequence

import msgspec

from heddle_trace.importers.generations import (
    UNNAMED,
    LoggedGeneration,
    identifier,
    reward_of,
    rl_step_of,
    steps_of,
)
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import Tokens
from heddle_trace.schema import TrajectoryRecord

_FAILED = ("failure", "failed", "error", "timeout", "timed_out")


class _Return(msgspec.Struct):
    tool_type: str | None = None
    tool: str | None = None
    status: str | None = None
    payload_tokens: Tokens | None = None
    token_position: Tokens | None = None
    remaining_length: Tokens | None = None
    output: str | None = None


class _Sequence(msgspec.Struct):
    input_len: Tokens
    output_len: Tokens
    prompt_id: str | int | None = None
    total_output_tokens: Tokens | None = None
    tool_returns: list[_Return] = []
    reward: float | None = None


class _Row(msgspec.Struct):
    step: int | None = None
    sequences: list[_Sequence] | None = None
    input_len: Tokens | None = None
    output_len: Tokens | None = None
    prompt_id: str | int | None = None
    total_output_tokens: Tokens | None = None
    tool_returns: list[_Return] = []
    reward: float | None = None
    resource_config: dict[str, object] = {}


_ROWS = msgspec.json.Decoder(_Row)


class LibraHistory:
    """Sequences of Libra's rollouts; those of one prompt, in any training step, are a group."""

    assumes = (
        "no times are recorded; the last tokens of a sequence follow its last tool return",
        "sequences without a prompt id are groups of their own",
    )

    def recognises(self, head: Head) -> bool:
        """Rows with sequences, or rows that are one."""
        return head.any_row("step", "sequences") or head.any_row("input_len", "output_len")

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a sequence."""
        for source in sources:
            for number, (where, row) in enumerate(source.rows(context.notes, _ROWS), start=1):
                sequences: Sequence[_Sequence] = ()
                with context.notes.guard(where):
                    sequences = _sequences(row)
                    if not sequences:
                        context.notes.drop("training steps without sequences")
                for index, sequence in enumerate(sequences):
                    at = f"{where}: sequence {index}" if row.sequences else where
                    with context.notes.guard(at):
                        name = f"{source.label}/{number}/{index}"
                        record = _record(sequence, name, row.step, source, context)
                        yield ParsedRecord(at, record)


def _sequences(row: _Row) -> Sequence[_Sequence]:
    if row.sequences is not None:
        return row.sequences
    if row.input_len is None or row.output_len is None:
        raise DamagedError("has neither sequences nor input_len and output_len")
    return [
        _Sequence(
            input_len=row.input_len,
            output_len=row.output_len,
            prompt_id=row.prompt_id,
            total_output_tokens=row.total_output_tokens,
            tool_returns=row.tool_returns,
            reward=row.reward,
        )
    ]


def _record(
    sequence: _Sequence,
    name: str,
    step: int | None,
    source: SourceFile,
    context: ImportContext,
) -> TrajectoryRecord:
    prompt = sequence.prompt_id
    generations = _generations(sequence, context)
    return TrajectoryRecord(
        trajectory_id=identifier(name),
        group_id=identifier(name if prompt in (None, "") else str(prompt)),
        workload=context.workload_or("rollout"),
        prompt_tokens=sequence.input_len,
        steps=steps_of(generations, context.notes),
        source=source.path.name,
        agent="libra",
        reward=reward_of(sequence.reward),
        step=rl_step_of(step),
    )


def _generations(sequence: _Sequence, context: ImportContext) -> list[LoggedGeneration]:
    returns = sequence.tool_returns
    if not returns:
        return [LoggedGeneration(output=sequence.output_len)]
    sizes = [_payload(r, context) for r in returns]
    outputs = _outputs(sequence, sizes, context)
    generations = [
        LoggedGeneration(
            output=output,
            tools=(r.tool_type or r.tool or UNNAMED,),
            ok=None if r.status is None else r.status.lower() not in _FAILED,
            added=size,
        )
        for r, output, size in zip(returns, outputs, sizes, strict=False)
    ]
    if outputs[-1]:
        generations.append(LoggedGeneration(output=outputs[-1]))
    return generations


def _payload(r: _Return, context: ImportContext) -> int:
    return r.payload_tokens if r.payload_tokens is not None else context.tokens.count(r.output)


def _outputs(sequence: _Sequence, sizes: Sequence[int], context: ImportContext) -> list[int]:
    """Tokens generated before each tool return and after the last, from where returns stand."""
    added = sum(sizes)
    generated = sequence.output_len
    total = sequence.total_output_tokens
    with_tools = _cut(sequence, generated + added if total is None else total, sizes)
    if with_tools is not None and sum(with_tools) == generated:
        return with_tools
    without = _cut(sequence, generated, [0] * len(sizes))
    if without is not None:
        context.notes.assume("sequences whose positions count generated tokens alone")
        return without
    raise DamagedError(
        f"tool_returns: their positions do not fit {generated:,} generated tokens"
        f"{'' if total is None else f' of {total:,}'} and {added:,} added by tools"
    )


def _cut(sequence: _Sequence, total: int, sizes: Sequence[int]) -> list[int] | None:
    """Spans between positions without the tools' tokens; None where one would be negative."""
    outputs, end = [], 0
    for r, size in zip(sequence.tool_returns, sizes, strict=True):
        position = r.token_position
        if position is None and r.remaining_length is not None:
            position = total - r.remaining_length
        if position is None:
            raise DamagedError("tool_returns: one has neither token_position nor remaining_length")
        outputs.append(position - end - size)
        end = position
    outputs.append(total - end)
    return outputs if min(outputs) >= 0 else None
