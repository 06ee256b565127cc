"""Measured steps in columns: about 100 bytes a request."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Final, TypeVar

import numpy as np

from heddle_trace.columns import ColumnsBuilder, Floats, TraceColumn, kinds_of
from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.limits import MAX_WAIT_S
from heddle_trace.observed.core import ParsedObservation
from heddle_trace.observed.schema import (
    TIMES,
    Observation,
    ObservedEngine,
    ObservedHeader,
    ObservedRequest,
    Phase,
)

T = TypeVar("T")

_BLOCK: Final = 4096
_REQUEST: Final = kinds_of(ObservedRequest)
_ENGINE: Final = kinds_of(ObservedEngine)
_VALUES = attrgetter(*_REQUEST)
_PARTS = attrgetter(*TIMES)
_START, _END = (list(_REQUEST).index(name) for name in ("start_s", "end_s"))
_COUNTED: Final = ("time_s", "running", "waiting", "queue_s", "prefill_s", "decode_s")
_MOST: Final = 1e11
_MOST_OVER: Final = 0.01
"""Share of a request by which its parts may exceed it."""


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """All of a source. `start_s` and `end_s` of requests are always known."""

    header: ObservedHeader
    count: int
    """Of requests."""
    requests: dict[str, TraceColumn]
    """Fields that some request has."""
    phases: tuple[Phase, ...]
    engines: dict[str, TraceColumn]

    def column(self, name: str) -> TraceColumn:
        """A field of all requests."""
        found = self.requests.get(name)
        return TraceColumn.nothing(_REQUEST[name], self.count) if found is None else found

    def seconds(self, name: str) -> Floats:
        """A part of all requests; 0 where it is not recorded."""
        return np.asarray(np.nan_to_num(self.column(name).values), np.float64)

    def observations(self) -> Iterator[Observation]:
        """Requests, phases and samples of engines, as they were read."""
        yield from self.phases
        for kind, columns in ((ObservedRequest, self.requests), (ObservedEngine, self.engines)):
            for row in zip(*(column.plain() for column in columns.values()), strict=True):
                yield kind(**{n: v for n, v in zip(columns, row, strict=True) if v is not None})

    @property
    def recorded(self) -> tuple[str, ...]:
        """Parts that some request has."""
        return tuple(name for name in TIMES if name in self.requests)


def observed(
    header: ObservedHeader, seen: Iterable[ParsedObservation], notes: Notes
) -> ObservedSteps:
    """Put observations into columns, each checked: damaged ones go through `notes.guard`.

    A header among them takes the place of `header`.
    """
    requests = ColumnsBuilder(_REQUEST, tuple)
    engines = ColumnsBuilder(_ENGINE, attrgetter(*_ENGINE))
    phases: list[Phase] = []
    ended_s: dict[str, float] = {}
    count, left = 0, iter(seen)
    while block := list(islice(left, _BLOCK)):
        rows, samples = [], []
        for placed in block:
            with notes.guard(placed.where):
                each = placed.seen
                if isinstance(each, ObservedHeader):
                    header = each
                elif isinstance(each, ObservedRequest):
                    rows.append(_row(each, ended_s))
                elif isinstance(each, Phase):
                    phases.append(_checked(_bounded(each, "start_s", "end_s")))
                else:
                    samples.append(_bounded(each, *_COUNTED))
        if rows:
            requests.add(rows)
        if samples:
            engines.add(samples)
        count += len(rows)
    return ObservedSteps(header, count, requests.columns(), tuple(phases), engines.columns())


def _row(request: ObservedRequest, ended_s: dict[str, float]) -> list[Any]:
    """Values of a request with its start and its end.

    Raises:
        DamagedError: its clock goes backwards, or its parts are longer than it is.
    """
    before_s = ended_s.get(request.trajectory_id)
    start_s, end_s = request.start_s, request.end_s
    if start_s is None:
        start_s = before_s or 0.0
    if before_s is not None and start_s < before_s - SLACK_S:
        raise DamagedError(
            f"start_s: begins {before_s - start_s:,.3f} s before the request before it has ended: "
            "the clocks of two hosts differ, or two runs are in one file"
        )
    parts = [part for part in _PARTS(request) if part is not None]
    if not all(0.0 <= part <= MAX_WAIT_S for part in parts):
        raise DamagedError(f"a part takes {min(parts):g} to {max(parts):g} s, which none does")
    parts_s = sum(parts)
    if end_s is None:
        end_s = start_s + parts_s
    if not (abs(start_s) <= _MOST and abs(end_s) <= _MOST):
        raise DamagedError(f"start_s: {start_s:g} or end_s: {end_s:g} is too large, or no number")
    if end_s < start_s - SLACK_S:
        raise DamagedError(f"end_s: the clock goes backwards by {start_s - end_s:,.3f} s")
    over_s = parts_s - (end_s - start_s)
    if over_s > max(SLACK_S, _MOST_OVER * parts_s):
        raise DamagedError(
            f"its parts take {parts_s:,.3f} s, {over_s:,.3f} s more than it lasted: give end_s the "
            "end of its last part"
        )
    ended_s[request.trajectory_id] = end_s = max(start_s, end_s)
    values = list(_VALUES(request))
    values[_START], values[_END] = start_s, end_s
    return values


def _bounded(each: T, *fields: str) -> T:
    """What it is given. Raises DamagedError where a number of it is too large to be one."""
    for field in fields:
        value = getattr(each, field)
        if value is not None and not abs(value) <= _MOST:
            raise DamagedError(f"{field}: {value:g} is too large, or no number")
    return each


def _checked(phase: Phase) -> Phase:
    if phase.end_s < phase.start_s:
        raise DamagedError(f"end_s: the clock goes backwards by {phase.start_s - phase.end_s:g} s")
    return phase
