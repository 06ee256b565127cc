"""Files of measured steps: `heddle.observed/1`, written and read."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from heddle_trace.errors import TraceError
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import Notes
from heddle_trace.importers.sources import SourceFile, decoded
from heddle_trace.observed.protocol import Observations, Placed
from heddle_trace.observed.schema import Clock, EngineSample, Header, Observation, Phase, Request
from heddle_trace.writing import packed, whole

_DECODER = msgspec.json.Decoder(Header | Request | Phase | EngineSample)


def write_observed(path: str | Path, header: Header, seen: Iterable[Observation]) -> int:
    """Write observations, plain or gzip by suffix, and return their number.

    The file appears whole or not at all. Raises OSError when the disk refuses.
    """
    place, count = Path(path), 0
    encode = msgspec.json.Encoder().encode
    with ExitStack() as stack:
        stream = stack.enter_context(whole(place))
        if place.name.endswith(".gz"):
            stream = stack.enter_context(packed(stream))
        stream.write(encode(header) + b"\n")
        for each in seen:
            stream.write(encode(each) + b"\n")
            count += 1
    return count


class ObservedFile:
    """The format of `write_observed`."""

    clock: Clock = "shared"
    one_file = True

    def recognises(self, head: Head) -> bool:
        """A header in the first line."""
        first = head.rows[0] if head.rows else {}
        return first.get("type") == "observed" and str(first.get("schema")).startswith("heddle.")

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """All of the file; the first, of type `Header`, is left out."""
        for where, line in sources[0].lines(notes):
            notes.read += 1
            with notes.guard(where):
                seen = decoded(line, _DECODER)
                if not isinstance(seen, Header):
                    yield Placed(where, seen)


def header_of(source: SourceFile) -> Header:
    """The header of a file. Raises TraceError, naming the fault."""
    for where, line in source.lines(notes := Notes()):
        with notes.guard(where):
            seen = decoded(line, _DECODER)
            if isinstance(seen, Header):
                return seen
        break
    raise TraceError(f"{source.path}: line 1: is no header of heddle.observed/1")
