"""Columns of a trace, and slices of a column, one of each trajectory.

A value that is not recorded is `NONE` in columns of whole numbers, flags and codes of words, and
NaN in columns of real numbers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Literal, TypeAlias, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Codes: TypeAlias = npt.NDArray[np.int32]
Kind: TypeAlias = Literal["number", "real", "flag", "word"]

NONE: Final = -1
OK: Final = (False, True, None)
"""Flags by code: the last answers to `NONE`."""


class Words(dict[str | None, int]):
    """Codes of words, from 0 in order of first sight; a word gets its code when it is looked up."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        super().__init__({None: NONE})
        for word in words:
            self[word]

    def __missing__(self, word: str) -> int:
        code = self[word] = len(self) - 1
        return code

    def codes(self, words: Iterable[str | None]) -> Codes:
        return np.fromiter(map(self.__getitem__, words), np.int32)

    def listed(self) -> list[str]:
        """The words, each at its code."""
        return [word for word in self if word is not None]


_KINDS: Final[Mapping[type, Kind]] = {int: "number", float: "real", bool: "flag", str: "word"}


def kinds_of(row: type, *, but: Sequence[str] = ()) -> Mapping[str, Kind]:
    """The kind of column of each field of a class, by its type; those of `but` have none."""
    found: dict[str, Kind] = {}
    for name, hint in get_type_hints(row).items():
        if name not in but:
            kind, *_ = (each for each in get_args(hint) or (hint,) if each is not NoneType)
            found[name] = _KINDS[kind]
    return found


@dataclass(frozen=True, slots=True)
class TraceColumn:
    """One field of all trajectories, or of all steps."""

    kind: Kind
    values: npt.NDArray[Any]
    words: Sequence[str] = ()
    """Of a column of words, each at its code."""

    @staticmethod
    def nothing(kind: Kind, size: int) -> "TraceColumn":
        """A column without a recorded value."""
        value, of = (np.nan, np.float64) if kind == "real" else (NONE, np.int8)
        return TraceColumn(kind, constant(value, size, of))

    @property
    def known(self) -> Bools:
        """Whether each value is recorded."""
        return ~np.isnan(self.values) if self.kind == "real" else self.values >= 0

    @property
    def ints(self) -> Ints:
        """The values as whole numbers of 64 bits."""
        return np.asarray(self.values, np.int64)

    def recorded(self) -> npt.NDArray[Any]:
        """The values that are recorded, in order."""
        return self.values[self.known]

    def occurring(self) -> dict[str, Ints]:
        """Words of the column, in order of first sight, and where each occurs."""
        members = by_code(self.values)
        named = ((int(self.values[own[0]]), own) for own in members)
        return {self.words[code]: own for code, own in named if code >= 0}

    def of(self, positions: Ints | Bools | slice) -> "TraceColumn":
        return TraceColumn(self.kind, self.values[positions], self.words)

    def plain(self) -> list[Any]:
        """Python values; None where nothing is recorded."""
        values: list[Any] = self.values.tolist()
        if self.kind == "flag":
            return [OK[code] for code in values]
        if self.kind == "word":
            words = self.words
            return [words[code] if code >= 0 else None for code in values]
        known = self.known
        return (
            values
            if known.all()
            else [v if k else None for v, k in zip(values, known, strict=True)]
        )


class ColumnBuilder:
    """Puts values into a column, part after part, in memory that grows in place."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._words = Words()
        self._held = bytearray()
        self._of = np.dtype(np.float64 if kind == "real" else np.int8)
        self._unknown = 0
        """Values before the first that is recorded."""

    def add(self, values: Sequence[Any]) -> None:
        nothing = values.count(None)
        if nothing < len(values):
            part = self._encoded(values, bool(nothing))
            self._append(TraceColumn.nothing(self._kind, self._unknown).values)
            self._append(part)
            self._unknown = 0
        elif self._held:
            self._append(TraceColumn.nothing(self._kind, nothing).values)
        else:
            self._unknown += nothing

    def joined(self) -> TraceColumn | None:
        """The whole column; None where nothing is recorded."""
        if not self._held:
            return None
        values = np.frombuffer(self._held, self._of)
        self._held = bytearray()
        if (values == values[0]).all():
            values = constant(values[0], len(values), values.dtype)
        return TraceColumn(self._kind, values, self._words.listed())

    def _append(self, part: npt.NDArray[Any]) -> None:
        wide = np.promote_types(self._of, part.dtype)
        if wide != self._of:
            self._held = bytearray(np.frombuffer(self._held, self._of).astype(wide))
            self._of = wide
        self._held += part.astype(wide).data

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


class ColumnsBuilder:
    """Columns of several fields of objects."""

    def __init__(self, fields: Mapping[str, Kind], values: Callable[[Any], Sequence[Any]]) -> None:
        self._values = values
        self._builders = {name: ColumnBuilder(kind) for name, kind in fields.items()}

    def add(self, objects: Iterable[Any]) -> None:
        columns = zip(*map(self._values, objects), strict=True)
        for values, builder in zip(columns, self._builders.values(), strict=False):
            builder.add(values)

    def columns(self) -> dict[str, TraceColumn]:
        """Those with a recorded value."""
        joined = ((name, builder.joined()) for name, builder in self._builders.items())
        return {name: column for name, column in joined if column is not None}


def constant(value: Any, size: int, kind: Any) -> Any:
    """A read-only column of one value, which takes no memory."""
    return np.broadcast_to(np.array(value, kind), size)


def smallest(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Whole numbers in 32 bits if they fit, else in 64."""
    if values.dtype == np.int32:
        return values
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    return values.astype(np.int32 if low >= -(2**31) and high < 2**31 else np.int64)


def positions(start: Ints, stop: Ints) -> Ints | slice:
    """Positions of the slices `start` to `stop`, one after the other; a slice if they are one."""
    if not len(start):
        return slice(0, 0)
    if (start[1:] == stop[:-1]).all():
        return slice(int(start[0]), int(stop[-1]))
    count = stop - start
    before = np.cumsum(count) - count
    return np.repeat(start - before, count) + np.arange(int(count.sum()))


def sums(values: npt.NDArray[Any], start: Ints, stop: Ints) -> Ints:
    """The sum of whole numbers over each slice."""
    total = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=total[1:])
    return np.asarray(total[stop] - total[start], np.int64)


def by_code(codes: npt.NDArray[Any]) -> list[Ints]:
    """Positions of each code that occurs, ascending; codes in order of first sight."""
    order = np.argsort(codes, kind="stable")
    edges = np.flatnonzero(np.diff(codes[order])) + 1
    members = np.split(order, edges) if len(order) else []
    return sorted(members, key=lambda own: int(own[0]))


def carried(known: Bools, base: Ints, growth: Ints) -> Ints:
    """`base` where it is known, else the item before and its growth; the first one is known."""
    grown = np.cumsum(growth) - growth
    since = np.maximum.accumulate(np.where(known, np.arange(len(known)), 0))
    return np.asarray(base[since] + grown - grown[since], np.int64)
