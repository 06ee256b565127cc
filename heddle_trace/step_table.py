"""Steps of scripts in one array, of which a row is read much faster than numpy reads it."""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, ClassVar, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from heddle_trace.columns import NONE, OK, ColumnsBuilder, Kind, TraceColumn
from heddle_trace.schema import StepScript

StepRow: TypeAlias = tuple[int, int, int, int, int, int, float]
"""Prompt, shared, output and tool tokens, codes of tool and `tool_ok`, and `tool_s`."""


class StepTable:
    """Steps of many scripts, a row each. Do not change its arrays.

    `rows` has a field for each of `StepScript`; tools are codes into `tools`, `tool_ok` is 0, 1 or
    `NONE`. `tools` has a last word more, None, for the code `NONE`.
    """

    __slots__ = ("_bytes", "_read", "_size", "rows", "tools")

    FIELDS: ClassVar[Mapping[str, Kind]] = {
        "prompt_tokens": "number",
        "shared_tokens": "number",
        "output_tokens": "number",
        "tool_tokens": "number",
        "tool": "word",
        "tool_ok": "flag",
        "tool_s": "real",
    }
    VALUES = attrgetter(*FIELDS)
    """Of a `StepScript`."""

    def __init__(self, rows: npt.NDArray[Any], tools: Sequence[str | None]) -> None:
        self.rows, self.tools = rows, tools
        number = "i" if rows.dtype["tool"] == np.int32 else "q"
        row = Struct(f"={6 * number}d")
        self._read, self._size = row.unpack_from, row.size
        self._bytes: memoryview = rows.view(np.uint8).data

    @staticmethod
    def made(columns: Mapping[str, TraceColumn]) -> "StepTable":
        size = max((len(column.values) for column in columns.values()), default=0)
        counts = (c.values for name, c in columns.items() if name.endswith("_tokens"))
        largest = max((int(values.max(initial=0)) for values in counts), default=0)
        number = np.int32 if largest < 2**31 else np.int64
        kinds = [
            (name, np.float64 if kind == "real" else number)
            for name, kind in StepTable.FIELDS.items()
        ]
        rows = np.empty(size, np.dtype(kinds))
        for name, _ in kinds:
            rows[name] = columns[name].values if name in columns else NONE
        return StepTable(rows, [*(columns["tool"].words if "tool" in columns else ()), None])

    def get(self, name: str) -> TraceColumn:
        kind = self.FIELDS[name]
        words: Any = self.tools[:-1] if kind == "word" else ()
        return TraceColumn(kind, self.rows[name], words)

    def row(self, number: int) -> StepRow:
        return self._read(self._bytes, number * self._size)

    def step(self, number: int) -> StepScript:
        prompt, shared, output, added, tool, ok, tool_s = self.row(number)
        return StepScript(prompt, shared, output, self.tools[tool], tool_s, OK[ok], added)

    def __reduce__(self) -> tuple[Any, ...]:
        return StepTable, (self.rows, self.tools)


class ScriptSteps(Sequence[StepScript]):
    """The steps of one trajectory, made on demand."""

    __slots__ = ("start", "stop", "table")

    def __init__(self, table: StepTable, start: int, stop: int) -> None:
        """The rows of `table` from `start` on, before `stop`."""
        self.table, self.start, self.stop = table, start, stop

    @staticmethod
    def of(steps: Sequence[StepScript]) -> "ScriptSteps":
        """The steps in a table; the same object if they are in one."""
        if isinstance(steps, ScriptSteps):
            return steps
        builders = ColumnsBuilder(StepTable.FIELDS, StepTable.VALUES)
        builders.add(steps)
        return ScriptSteps(StepTable.made(builders.columns()), 0, len(steps))

    def __len__(self) -> int:
        return self.stop - self.start

    @overload
    def __getitem__(self, index: SupportsIndex) -> StepScript: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepScript, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> StepScript | tuple[StepScript, ...]:
        rows = range(self.start, self.stop)[index]
        if isinstance(rows, range):
            return tuple(map(self.table.step, rows))
        return self.table.step(rows)

    def __iter__(self) -> Iterator[StepScript]:
        return map(self.table.step, range(self.start, self.stop))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
