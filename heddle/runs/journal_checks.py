"""The difference between a damaged journal and a sound one, once its file could be read.

Arrow files have no checksums. A bit that flipped, or a file of something else, may still be a
table; the readers of journals rely on what is checked here.
"""

import json
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from heddle.runs.arrow_arrays import numbers_of
from heddle.runs.journal_entries import restored
from heddle.runs.journal_schema import layouts, schema
from heddle_core.plans import PlanProblem

_OF_ALL_ROWS = ("seq", "time_s", "kind", "name")


def fault(table: pa.Table) -> str | None:
    """What no writer of a journal writes: the first thing found, None for a sound journal.

    Raises:
        pa.ArrowInvalid: codes of words, texts or nulls are not as Arrow has them.
    """
    _validate(table)
    for field in schema():
        if table.schema.field(field.name).type != field.type:
            return f"its column {field.name!r} is not of type {field.type}"
    return _missing(table) or _numbers(table) or _nested(table)


def _validate(table: pa.Table) -> None:
    """As `table.validate(full=True)`, but words that chunks have in common are read once."""
    import pyarrow.compute as pc  # takes a sixth of the import of a comparison

    read: set[tuple[int, int]] = set()
    for column in table.columns:
        if not pa.types.is_dictionary(column.type):
            column.validate(full=True)
            continue
        for chunk in column.chunks:
            coded: Any = chunk
            words, codes = coded.dictionary, coded.indices
            codes.validate(full=True)
            place = words.buffers()[1]
            key = place.address if place is not None else 0, len(words)
            if key not in read:
                words.validate(full=True)
                read.add(key)
            span: Any = pc.min_max(codes)
            if span["min"].is_valid and not (
                0 <= span["min"].as_py() <= span["max"].as_py() < len(words) - words.null_count
            ):
                raise pa.ArrowInvalid("a code of a word is out of bounds")


def _missing(table: pa.Table) -> str | None:
    """A column with more or fewer values than its events and commands have."""
    import pyarrow.compute as pc

    least, most = Counter[str](), Counter[str]()
    for column in _OF_ALL_ROWS:
        least[column] = most[column] = len(table)
    names: Any = pc.value_counts(table.column("name"))
    for name, count in zip(names.field("values").to_pylist(), names.field("counts"), strict=True):
        rows = count.as_py()
        if name not in layouts():
            most.update(dict.fromkeys(set(schema().names) - set(_OF_ALL_ROWS), rows))
            continue  # readers say that they do not know it
        for field in layouts()[name].plain:
            most[field.column] += rows
            least[field.column] += 0 if field.optional else rows
    for column in most:
        values = len(table) - table.column(column).null_count
        if not least[column] <= values <= most[column]:
            return f"its column {column!r} has {values:,} values and not {most[column]:,}"
    return None


def _numbers(table: pa.Table) -> str | None:
    """Rows, steps and seconds out of range."""
    import pyarrow.compute as pc

    row = 0
    for seq in table.column("seq").chunks:
        if not np.array_equal(numbers_of(seq, -1), np.arange(row, row + len(seq))):
            return f"its column 'seq' does not count from {row:,} on"
        row += len(seq)
    steps: Any = pc.min_max(table.column("step"))
    if steps["min"].is_valid and not 0 <= steps["min"].as_py() <= steps["max"].as_py() < row:
        return "its column 'step' has numbers that no step can have"
    for name in table.column_names:
        if (
            name.endswith("_s")
            and not pc.all(pc.is_finite(table.column(name)), min_count=0).as_py()
        ):
            return f"its column {name!r} has values that are no seconds"
    return None


def _nested(table: pa.Table) -> str | None:
    """Nested fields that cannot be read; planning problems are read for a replay only."""
    import pyarrow.compute as pc

    chosen = table.select(["seq", "name", "payload"])
    there = chosen.filter(pc.is_valid(chosen.column("payload")))
    columns: Any = [column.to_pylist() for column in there.columns]
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
