"""Records of a trace in columns: a million trajectories in a few hundred megabytes.

A value that is not recorded is `NONE` in columns of whole numbers, flags and codes of words, and
NaN in columns of real numbers. Records are made on demand.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, overload

import msgspec
import numpy as np
import numpy.typing as npt

from heddle_trace.columns import (
    NONE,
    Bools,
    Codes,
    Floats,
    Ints,
    Words,
    by_code,
    constant,
    smallest,
)
from heddle_trace.columns import positions as positions_of
from heddle_trace.schema import StepRecord, TrajectoryRecord

Kind: TypeAlias = Literal["number", "real", "flag", "word"]

_STEP: Final[Mapping[str, Kind]] = {
    "output_tokens": "number",
    "tool": "word",
    "tool_s": "real",
    "tool_tokens": "number",
    "tool_ok": "flag",
    "llm_s": "real",
    "t_s": "real",
    "input_tokens": "number",
    "cached_tokens": "number",
    "n_tools": "number",
}
_TRAJECTORY: Final[Mapping[str, Kind]] = {
    "group_id": "word",
    "workload": "word",
    "prompt_tokens": "number",
    "arrival_s": "real",
    "source": "word",
    "model": "word",
    "agent": "word",
    "outcome": "flag",
    "parent_id": "word",
    "truncated": "flag",
    "reward": "real",
    "reward_s": "real",
    "env_start_s": "real",
    "step": "number",
}
_REQUIRED: Final = ("output_tokens", "group_id", "workload", "prompt_tokens")
_FLAGS: Final = (False, True, None)
"""By code: the last answers to `NONE`."""
_BLOCK: Final = 1024
"""Trajectories that are converted at once."""


@dataclass(frozen=True, slots=True)
class RecordColumn:
    """One field of all trajectories, or of all steps."""

    kind: Kind
    values: npt.NDArray[Any]
    words: Sequence[str] = ()
    """Of a column of words, each at its code."""

    @property
    def known(self) -> Bools:
        """Whether each value is recorded."""
        return ~np.isnan(self.values) if self.kind == "real" else self.values >= 0

    def recorded(self) -> npt.NDArray[Any]:
        """The values that are recorded, in order."""
        return self.values[self.known]

    def occurring(self) -> dict[str, Ints]:
        """Words of the column, in order of first sight, and where each occurs."""
        members = by_code(self.values)
        named = ((int(self.values[own[0]]), own) for own in members)
        return {self.words[code]: own for code, own in named if code >= 0}

    def of(self, positions: Ints | Bools | slice) -> "RecordColumn":
        """The column of some positions."""
        return RecordColumn(self.kind, self.values[positions], self.words)

    def plain(self) -> list[Any]:
        """Python values; None where nothing is recorded."""
        values: list[Any] = self.values.tolist()
        if self.kind in ("flag", "word"):
            names = _FLAGS if self.kind == "flag" else [*self.words, None]
            return [names[code] for code in values]
        known = self.known
        return (
            values
            if known.all()
            else [v if k else None for v, k in zip(values, known, strict=True)]
        )


class Records(Sequence[TrajectoryRecord]):
    """Records of a trace. Do not change its arrays."""

    __slots__ = ("_steps", "_trajectories", "ids", "start", "stop")

    def __init__(
        self,
        ids: Sequence[str],
        start: Ints,
        stop: Ints,
        trajectories: Mapping[str, RecordColumn],
        steps: Mapping[str, RecordColumn],
    ) -> None:
        """Trajectory k has the steps from `start[k]` on, before `stop[k]`.

        Columns that are left out have no recorded value.
        """
        self.ids, self.start, self.stop = ids, start, stop
        self._trajectories, self._steps = trajectories, steps

    @staticmethod
    def of(records: Iterable[TrajectoryRecord]) -> "Records":
        """The records in columns; the same object if they are."""
        if isinstance(records, Records):
            return records
        builder = RecordsBuilder()
        for record in records:
            builder.add(record)
        return builder.build()

    def trajectory(self, name: str) -> RecordColumn:
        """A field of every trajectory but its id."""
        return self._trajectories.get(name) or _nothing(_TRAJECTORY[name], len(self.ids))

    def step(self, name: str) -> RecordColumn:
        """A field of every step, in order of the trajectories."""
        found = self._steps.get(name)
        if found is None:
            return _nothing(_STEP[name], int((self.stop - self.start).sum()))
        at = positions_of(self.start, self.stop)
        whole = isinstance(at, slice) and at == slice(0, len(found.values))
        return found if whole else found.of(at)

    def take(self, chosen: Ints | Bools | slice) -> "Records":
        """Some of the records, in any order; steps are shared."""
        places: Any = np.arange(len(self.ids))[chosen]
        return Records(
            [self.ids[place] for place in places.tolist()],
            self.start[places],
            self.stop[places],
            {name: column.of(places) for name, column in self._trajectories.items()},
            self._steps,
        )

    def changed(self, ids: Sequence[str], columns: Mapping[str, RecordColumn | None]) -> "Records":
        """The records under other ids and with other columns of trajectories, or without some."""
        changed = {**self._trajectories, **columns}
        kept = {name: column for name, column in changed.items() if column is not None}
        return Records(ids, self.start, self.stop, kept, self._steps)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> TrajectoryRecord: ...
    @overload
    def __getitem__(self, index: slice) -> "Records": ...
    def __getitem__(self, index: int | slice) -> "TrajectoryRecord | Records":
        if isinstance(index, slice):
            return self.take(index)
        place = range(len(self.ids))[index]
        return next(self._made(place, place + 1))

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        for first in range(0, len(self.ids), _BLOCK):
            yield from self._made(first, min(first + _BLOCK, len(self.ids)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self.ids):,} records>"

    def _made(self, first: int, last: int) -> Iterator[TrajectoryRecord]:
        own = slice(first, last)
        start, stop = self.start[own], self.stop[own]
        names = [n for n in _STEP if n in self._steps or n in _REQUIRED]
        at = positions_of(start, stop)
        size = int((stop - start).sum())
        listed = [
            self._steps[n].of(at).plain() if n in self._steps else [None] * size for n in names
        ]
        steps = [
            StepRecord(**dict(zip(names, row, strict=True))) for row in zip(*listed, strict=True)
        ]
        known = [n for n in _TRAJECTORY if n in self._trajectories or n in _REQUIRED]
        columns = [self.trajectory(n).of(own).plain() for n in known]
        begin = 0
        for id_, count, *row in zip(
            self.ids[first:last], (stop - start).tolist(), *columns, strict=True
        ):
            end = begin + count
            yield TrajectoryRecord(
                trajectory_id=id_,
                steps=tuple(steps[begin:end]),
                **dict(zip(known, row, strict=True)),
            )
            begin = end


def _nothing(kind: Kind, size: int) -> RecordColumn:
    value, of = (np.nan, np.float64) if kind == "real" else (NONE, np.int8)
    return RecordColumn(kind, constant(value, size, of))


class RecordsBuilder:
    """Puts records into columns, one after another."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._waiting: list[TrajectoryRecord] = []
        self._counts: list[Ints] = []
        self._trajectories = {name: _Parts(kind) for name, kind in _TRAJECTORY.items()}
        self._steps = {name: _Parts(kind) for name, kind in _STEP.items()}

    def add(self, record: TrajectoryRecord) -> None:
        self.ids.append(record.trajectory_id)
        self._waiting.append(record)
        if len(self._waiting) == _BLOCK:
            self._flush()

    def build(self) -> Records:
        """The records so far."""
        self._flush()
        counts = np.concatenate([np.zeros(0, np.int64), *self._counts])
        stop = np.cumsum(counts)
        return Records(
            self.ids,
            stop - counts,
            stop,
            {n: c for n, p in self._trajectories.items() if (c := p.joined()) is not None},
            {n: c for n, p in self._steps.items() if (c := p.joined()) is not None},
        )

    def _flush(self) -> None:
        records, self._waiting = self._waiting, []
        if not records:
            return
        self._counts.append(np.array([len(record.steps) for record in records], np.int64))
        for name, parts in self._trajectories.items():
            parts.add([getattr(record, name) for record in records])
        rows = [msgspec.structs.astuple(step) for record in records for step in record.steps]
        for values, parts in zip(zip(*rows, strict=True), self._steps.values(), strict=True):
            parts.add(values)


class _Parts:
    """A column in parts."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._words = Words()
        self._parts: list[npt.NDArray[Any]] = []
        self._known = False

    def add(self, values: Sequence[Any]) -> None:
        nothing = values.count(None)
        if nothing == len(values):
            self._parts.append(_nothing(self._kind, nothing).values)
            return
        self._known = True
        self._parts.append(self._encoded(values, bool(nothing)))

    def joined(self) -> RecordColumn | None:
        """The whole column; None where nothing is recorded."""
        if not self._known:
            return None
        values = np.concatenate(self._parts)
        self._parts = []
        if len(values) and (values == values[0]).all():
            values = constant(values[0], len(values), values.dtype)
        return RecordColumn(self._kind, values, self._words.listed())

    def _encoded(self, values: Sequence[Any], gaps: bool) -> npt.NDArray[Any]:
        match self._kind:
            case "word":
                return self._words.codes(values)
            case "flag":
                return np.array([NONE if v is None else v for v in values], np.int8)
            case "real":
                return np.array(values, np.float64)
            case "number":
                known = [NONE if v is None else v for v in values] if gaps else values
                return smallest(np.array(known, np.int64))


def codes(column: RecordColumn) -> Codes:
    """Codes of a column of words."""
    return np.asarray(column.values, np.int32)


def numbers(column: RecordColumn) -> Ints:
    """Whole numbers of a column; `NONE` where nothing is recorded."""
    return np.asarray(column.values, np.int64)


def reals(column: RecordColumn) -> Floats:
    """Real numbers of a column, such as seconds; NaN where nothing is recorded."""
    return np.asarray(column.values, np.float64)
