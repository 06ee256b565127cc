"""A trace in columns: a million trajectories in a few hundred megabytes; rows are made on demand.

`Records` hold what a source recorded, with gaps. `Scripts` are complete; their steps lie in one
array (`heddle_trace.step_table`).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, Self, SupportsIndex, TypeAlias, TypeVar, overload

import msgspec
import numpy as np

from heddle_trace.columns import (
    Bools,
    ColumnsBuilder,
    Ints,
    Kind,
    TraceColumn,
    kinds_of,
    positions,
    sums,
)
from heddle_trace.schema import StepRecord, TrajectoryRecord, TrajectoryScript
from heddle_trace.step_table import ScriptSteps, StepTable

RowT = TypeVar("RowT")
TableT = TypeVar("TableT", bound="Table[Any]")
Columns: TypeAlias = Mapping[str, TraceColumn]

_BLOCK: Final = 1024
"""Trajectories that are converted at once."""


class Table(Sequence[RowT]):
    """Trajectories in columns. Do not change its arrays.

    Trajectory k has the steps from `start[k]` on, before `stop[k]`, of the columns in `table`.
    """

    __slots__ = ("_trajectories", "ids", "start", "stop", "table")
    ROW: ClassVar[Callable[..., Any]]
    ID: ClassVar[str]
    """The field of a row that is its id."""
    FIELDS: ClassVar[Mapping[str, Kind]]
    """Of a row, beside its id and its steps."""
    STEP_FIELDS: ClassVar[Mapping[str, Kind]]
    STEP_VALUES: ClassVar[Any]
    """The values of the fields of a step."""
    table: Any

    def __init__(
        self, ids: Sequence[str], start: Ints, stop: Ints, trajectories: Columns, table: Any
    ) -> None:
        """Columns that are left out have no recorded value."""
        self.ids, self.start, self.stop = ids, start, stop
        self._trajectories, self.table = trajectories, table

    @classmethod
    def of(cls, rows: Iterable[RowT]) -> Self:
        """The rows in columns; the same object if they are."""
        if isinstance(rows, cls):
            return rows
        builder = TableBuilder(cls)
        for row in rows:
            builder.add(row)
        return builder.build()

    @property
    def counts(self) -> Ints:
        """The number of steps of each trajectory."""
        return self.stop - self.start

    @property
    def first(self) -> Ints:
        """The place of each trajectory's first step in the columns of `step`."""
        counts = self.counts
        return np.asarray(np.cumsum(counts) - counts, np.int64)

    def has(self, name: str) -> bool:
        """Whether a field of trajectories was recorded for any."""
        return name in self._trajectories

    def trajectory(self, name: str) -> TraceColumn:
        """A field of every trajectory but its id."""
        found = self._trajectories.get(name)
        return TraceColumn.nothing(self.FIELDS[name], len(self.ids)) if found is None else found

    def step(self, name: str) -> TraceColumn:
        """A field of every step, in order of the trajectories."""
        found: TraceColumn | None = self.table.get(name)
        if found is None:
            return TraceColumn.nothing(self.STEP_FIELDS[name], int(self.counts.sum()))
        at = positions(self.start, self.stop)
        whole = isinstance(at, slice) and at == slice(0, len(found.values))
        return found if whole else found.of(at)

    def take(self, chosen: Ints | Bools | slice) -> Self:
        """Some of the trajectories, in any order; steps are shared."""
        places: Any = np.arange(len(self.ids))[chosen]
        return type(self)(
            [self.ids[place] for place in places.tolist()],
            self.start[places],
            self.stop[places],
            {name: column.of(places) for name, column in self._trajectories.items()},
            self.table,
        )

    def changed(self, ids: Sequence[str], columns: Mapping[str, TraceColumn | None]) -> Self:
        """The trajectories under other ids and with other columns, or without some."""
        changed = {**self._trajectories, **columns}
        kept = {name: column for name, column in changed.items() if column is not None}
        return type(self)(ids, self.start, self.stop, kept, self.table)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: SupportsIndex) -> RowT: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> RowT | Self:
        if isinstance(index, slice):
            return self.take(index)
        place = range(len(self.ids))[index]
        return next(self._rows(slice(place, place + 1)))

    def __iter__(self) -> Iterator[RowT]:
        for first in range(0, len(self.ids), _BLOCK):
            yield from self._rows(slice(first, first + _BLOCK))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self.ids))

    def __repr__(self) -> str:
        return f"<{len(self.ids):,} {type(self).__name__.lower()}>"

    def _rows(self, own: slice) -> Iterator[RowT]:
        names = (self.ID, "steps", *self._trajectories)
        columns = [column.of(own).plain() for column in self._trajectories.values()]
        steps = self._steps(self.start[own], self.stop[own])
        for row in zip(self.ids[own], steps, *columns, strict=True):
            yield self.ROW(**dict(zip(names, row, strict=False)))

    @abstractmethod
    def _steps(self, start: Ints, stop: Ints) -> Iterable[Sequence[Any]]:
        """The steps of each of some trajectories."""

    @classmethod
    @abstractmethod
    def table_of(cls, steps: Columns) -> Any:
        """What `table` is to be."""


class Records(Table[TrajectoryRecord]):
    """Records of a trace; `table` is a mapping of columns."""

    __slots__ = ()
    ROW = partial(TrajectoryRecord, prompt_tokens=None)
    ID = "trajectory_id"
    FIELDS = kinds_of(TrajectoryRecord, but=("trajectory_id", "steps"))
    STEP_FIELDS = kinds_of(StepRecord)
    STEP_VALUES = msgspec.structs.astuple
    table: Columns

    @classmethod
    def table_of(cls, steps: Columns) -> Columns:
        return steps

    def _steps(self, start: Ints, stop: Ints) -> Iterator[tuple[StepRecord, ...]]:
        names = [n for n in self.STEP_FIELDS if n in self.table or n == "output_tokens"]
        at = positions(start, stop)
        nothing = TraceColumn.nothing("number", int((stop - start).sum()))
        columns = [(self.table[n].of(at) if n in self.table else nothing).plain() for n in names]
        steps = [
            StepRecord(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)
        ]
        first = 0
        for count in (stop - start).tolist():
            yield tuple(steps[first : first + count])
            first += count


class Scripts(Table[TrajectoryScript]):
    """Scripts of a workload. Pickled with protocol 5, its arrays can be shared."""

    __slots__ = ()
    ROW = TrajectoryScript
    ID = "id"
    FIELDS = kinds_of(TrajectoryScript, but=("id", "steps"))
    STEP_FIELDS = StepTable.FIELDS
    STEP_VALUES = StepTable.VALUES
    table: StepTable

    @classmethod
    def table_of(cls, steps: Columns) -> StepTable:
        return StepTable.made(steps)

    def total(self, name: str) -> Ints:
        """The sum over the steps of each trajectory, of a field of tokens."""
        return sums(self.table.rows[name], self.start, self.stop)

    def largest_context(self) -> Ints:
        """Tokens that each trajectory's context grows to."""
        context = self.step("prompt_tokens").values + self.step("output_tokens").ints
        return np.asarray(np.maximum.reduceat(context, self.first), np.int64)

    def _steps(self, start: Ints, stop: Ints) -> Iterator[ScriptSteps]:
        for first, last in zip(start.tolist(), stop.tolist(), strict=True):
            yield ScriptSteps(self.table, first, last)


class TableBuilder(Generic[TableT]):
    """Puts rows into a table, one after another."""

    def __init__(self, kind: type[TableT]) -> None:
        self._kind = kind
        self.ids: list[str] = []
        self._id = attrgetter(kind.ID)
        self._waiting: list[Any] = []
        self._counts: list[int] = []
        self._trajectories = ColumnsBuilder(kind.FIELDS, attrgetter(*kind.FIELDS))
        self._steps = ColumnsBuilder(kind.STEP_FIELDS, kind.STEP_VALUES)

    def add(self, row: Any) -> None:
        self.ids.append(self._id(row))
        self._waiting.append(row)
        if len(self._waiting) == _BLOCK:
            self._flush()

    def build(self) -> TableT:
        self._flush()
        counts = np.array(self._counts, np.int64)
        stop = np.cumsum(counts)
        table = self._kind.table_of(self._steps.columns())
        return self._kind(self.ids, stop - counts, stop, self._trajectories.columns(), table)

    def _flush(self) -> None:
        rows, self._waiting = self._waiting, []
        self._counts += [len(row.steps) for row in rows]
        self._trajectories.add(rows)
        self._steps.add(chain.from_iterable(row.steps for row in rows))
