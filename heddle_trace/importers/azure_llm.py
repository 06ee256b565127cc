"""Azure's LLM inference traces: one request a line of CSV, with its time and two counts.

Source: Azure/AzurePublicDataset, AzureLLMInferenceTrace 2023 and 2024. No sessions: every request
is a trajectory of one step.
"""

from collections.abc import Iterator, Sequence

from heddle_trace.importers.clocks import elapsed, seconds
from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.protocol import ImportContext, ParsedRecord
from heddle_trace.importers.sources import SourceFile
from heddle_trace.schema import StepRecord, TrajectoryRecord

_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class AzureLlm:
    """Requests to a service, without conversations."""

    assumes = ("nothing joins requests: each is a trajectory of one step and a group of its own",)

    def recognises(self, head: Head) -> bool:
        """The header of the table."""
        return head.first_line.replace(" ", "").lower() == _HEADER.lower()

    def records(
        self, sources: Sequence[SourceFile], context: ImportContext
    ) -> Iterator[ParsedRecord]:
        """One record a line; times count from the earliest first line of all files."""
        unreported = Notes(skip_bad=True)
        starts = [next((row[1] for row in _rows(source, unreported)), None) for source in sources]
        began_s = min((start for start in starts if start is not None), default=0.0)
        for source in sources:
            for where, time_s, prompt, generated in _rows(source, context.notes):
                with context.notes.guard(where):
                    number = where.rpartition(" ")[2]
                    name = identifier(f"{source.label}/{number}")
                    record = TrajectoryRecord(
                        trajectory_id=name,
                        group_id=name,
                        workload=context.workload_or("completion"),
                        prompt_tokens=prompt,
                        arrival_s=elapsed(began_s, time_s, "from the first line", context.notes),
                        steps=(StepRecord(output_tokens=generated),),
                        source=source.path.name,
                    )
                    yield ParsedRecord(where, record)


def _rows(source: SourceFile, notes: Notes) -> Iterator[tuple[str, float, int, int]]:
    for where, line in source.lines(notes):
        text = line.decode(errors="replace").strip()
        if text.lower().startswith("timestamp"):
            continue
        notes.read += 1
        with notes.guard(where):
            cells = text.split(",")
            if len(cells) != 3:
                raise DamagedError(f"has {len(cells)} cells; {_HEADER} are expected")
            time_s = seconds(cells[0].strip())
            if time_s is None:
                raise DamagedError("TIMESTAMP is missing")
            yield (
                where,
                time_s,
                _count(cells[1], "ContextTokens"),
                _count(cells[2], "GeneratedTokens"),
            )


def _count(cell: str, field: str) -> int:
    try:
        count = int(cell)
    except ValueError:
        raise DamagedError(f"{field}: found {cell[:40]!r}; give a whole number") from None
    if count < 0:
        raise DamagedError(f"{field}: found {count}; give a number from 0")
    return count
