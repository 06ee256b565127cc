"""Files of measured steps: `heddle.observed/1`, written and read."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sources import SourceFile
from heddle_trace.observed.core import Observations, ObservedFormat, ParsedObservation
from heddle_trace.observed.schema import (
    Observation,
    ObservedEngine,
    ObservedHeader,
    ObservedRequest,
    Phase,
)
from heddle_trace.writing import packed, whole

_DECODER = msgspec.json.Decoder(ObservedHeader | ObservedRequest | Phase | ObservedEngine)


def write_observed(path: str | Path, header: ObservedHeader, seen: Iterable[Observation]) -> None:
    """Write observations, plain or gzip by suffix: whole or not at all.

    Raises OSError when the disk refuses.
    """
    place = Path(path)
    with ExitStack() as stack:
        stream = stack.enter_context(whole(place))
        if place.name.endswith(".gz"):
            stream = stack.enter_context(packed(stream))
        stream.write(msgspec.json.encode(header) + b"\n")
        for each in seen:
            stream.write(msgspec.json.encode(each) + b"\n")


class ObservedFile(ObservedFormat):
    """The format of `write_observed`; its header comes first."""

    one_file = True

    def recognises(self, head: Head) -> bool:
        """A header in the first line."""
        first = head.rows[0] if head.rows else {}
        return first.get("type") == "observed" and str(first.get("schema")).startswith("heddle.")

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        header = None
        for where, seen in sources[0].rows(notes, _DECODER):
            with notes.guard(where):
                if isinstance(seen, ObservedHeader):
                    if header not in (None, seen):
                        raise DamagedError("is the header of a second run: keep the lines of one")
                    header = seen
                yield ParsedObservation(where, seen)
