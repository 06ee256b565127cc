"""The difference between a damaged journal and a sound one, once its file could be read.

Arrow files have no checksums. A bit that flipped, or a file of something else, may still be a
table; the readers of journals rely on what is checked here.
"""

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from heddle.runs.arrow_arrays import number_array, numbers_of
from heddle.runs.journal_entries import restored
from heddle.runs.journal_schema import layouts, schema
from heddle_core.plans import PlanProblem

_OF_ALL_ROWS = ("seq", "time_s", "kind", "name")
_NO_STEP = "its column 'step' has numbers that no step can have"


class JournalFaults:
    """What no writer of a journal writes, looked for in its batches in their order."""

    def __init__(self) -> None:
        self._rows = 0
        self._last_step = -1
        self._read: set[tuple[int, int]] = set()
        """Places and numbers of words that were read."""

    def of(self, batch: pa.RecordBatch) -> str | None:
        """The first thing found in the next batch; None for a sound one.

        Raises:
            pa.ArrowInvalid: codes of words, texts or nulls are not as Arrow has them.
        """
        self._validate(batch)
        if batch.schema != schema():
            for field in schema():
                if batch.schema.field(field.name).type != field.type:
                    return f"its column {field.name!r} is not of type {field.type}"
        return _missing(batch) or self._numbers(batch) or _nested(batch)

    def at_end(self) -> str | None:
        """What only the whole journal shows."""
        return _NO_STEP if self._last_step >= self._rows else None

    def _validate(self, batch: pa.RecordBatch) -> None:
        """As `batch.validate(full=True)`, but words that batches have in common are read once."""
        import pyarrow.compute as pc  # takes a sixth of the import of a comparison

        columns: list[Any] = batch.columns
        coded = {at: c for at, c in enumerate(columns) if isinstance(c, pa.DictionaryArray)}
        for at, column in coded.items():
            columns[at] = column.indices
        pa.RecordBatch.from_arrays(columns, batch.schema.names).validate(full=True)
        for at, column in coded.items():
            words, codes = column.dictionary, columns[at]
            place = words.buffers()[1]
            key = place.address if place is not None else 0, len(words)
            if key not in self._read:
                words.validate(full=True)
                self._read.add(key)
            if codes.null_count == len(codes):
                continue
            span: Any = pc.min_max(codes)
            least, most = span["min"].as_py(), span["max"].as_py()
            if not 0 <= least <= most < len(words) - words.null_count:
                raise pa.ArrowInvalid("a code of a word is out of bounds")

    def _numbers(self, batch: pa.RecordBatch) -> str | None:
        """Rows, steps and seconds out of range."""
        import pyarrow.compute as pc

        first, self._rows = self._rows, self._rows + len(batch)
        if not np.array_equal(numbers_of(batch.column("seq"), -1), np.arange(first, self._rows)):
            return f"its column 'seq' does not count from {first:,} on"
        steps: Any = pc.min_max(batch.column("step"))
        if steps["min"].is_valid:
            self._last_step = max(self._last_step, steps["max"].as_py())
            if steps["min"].as_py() < 0:
                return _NO_STEP
        for name in schema().names:
            if name.endswith("_s") and not np.isfinite(numbers_of(batch.column(name), 0.0)).all():
                return f"its column {name!r} has values that are no seconds"
        return None


def _missing(batch: pa.RecordBatch) -> str | None:
    """A column with more or fewer values than its events and commands have."""
    import pyarrow.compute as pc

    least, most = Counter[str](), Counter[str]()
    for column in _OF_ALL_ROWS:
        least[column] = most[column] = len(batch)
    names: Any = pc.value_counts(batch.column("name"))
    for name, count in zip(names.field("values").to_pylist(), names.field("counts"), strict=True):
        rows = count.as_py()
        if name not in layouts():
            most.update(dict.fromkeys(set(schema().names) - set(_OF_ALL_ROWS), rows))
            continue  # readers say that they do not know it
        for field in layouts()[name].plain:
            most[field.column] += rows
            least[field.column] += 0 if field.optional else rows
    for column in most:
        values = len(batch) - batch.column(column).null_count
        if not least[column] <= values <= most[column]:
            return f"its column {column!r} has {values:,} values and not {most[column]:,}"
    return None


def _nested(batch: pa.RecordBatch) -> str | None:
    """Nested fields that cannot be read; planning problems are read for a replay only."""
    import pyarrow.compute as pc

    if batch.column("payload").null_count == len(batch):
        return None
    chosen = batch.select(["seq", "name", "payload"])
    there = chosen.filter(pc.is_valid(chosen.column("payload")))
    names: Any = there.column("name")
    texts: Any = there.column("payload")
    codes = numbers_of(texts.dictionary_encode().indices, -1)
    pairs = numbers_of(names.indices, -1).astype(np.int64) * len(codes) + codes
    first = np.sort(np.unique(pairs, return_index=True)[1])  # most are the same
    columns: Any = [column.to_pylist() for column in there.take(number_array(first)).columns]
    for row, name, text in zip(*columns, strict=True):
        layout = layouts().get(name)
        try:
            values = json.loads(text)
            for field, hint in layout.nested if layout is not None else ():
                if hint is not PlanProblem:
                    restored(values[field], hint)
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            return f"the payload of row {row:,} cannot be read: {type(e).__name__}: {e}"
    return None
