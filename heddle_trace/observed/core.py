"""What formats of measured steps share: their interface, and records grouped by trajectory."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import zip_longest
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.importers.generations import identifier
from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sessions import Sessions
from heddle_trace.importers.sources import SourceFile
from heddle_trace.limits import MAX_WAIT_S
from heddle_trace.observed.schema import (
    Clock,
    Observation,
    ObservedHeader,
    ObservedRequest,
    Phase,
    PhaseName,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParsedObservation:
    """An observation and its place in the source, for messages."""

    where: str
    seen: Observation | ObservedHeader


Observations: TypeAlias = Iterator[ParsedObservation]


class ObservedFormat(ABC):
    """One format. Its module cites the description of the format."""

    clock: ClassVar[Clock] = "shared"
    """Of its requests."""
    one_file: ClassVar[bool] = False
    """Whether each file is a run of its own, with a clock of its own."""

    @abstractmethod
    def recognises(self, head: Head) -> bool:
        """Whether a file that begins like this is of the format. Never raises."""

    @abstractmethod
    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """All observations, read as a stream; requests of a trajectory in order.

        Damaged records go through `notes.guard`. Raises TraceError for a file as a whole.
        """


def number_in(text: str) -> float:
    """A number. Raises DamagedError for what is none."""
    with suppress(ValueError):
        return float(text)
    raise DamagedError(f"{text[:40]!r} is no number")


class TimedGeneration(NamedTuple):
    """A generation of a trajectory: its time, and its tokens as far as they are known."""

    start_s: float
    end_s: float
    counts: Mapping[str, int | None] = {}


def requests_of_generations(
    made: Iterable[TimedGeneration],
    name: str,
    begun_s: float = 0.0,
    scored_s: float = 0.0,
    **more: Any,
) -> Iterator[ObservedRequest]:
    """Requests of generations; from one to the next of them is the time of tools.

    Those that overlap, of sub-agents, are trajectories of their own. Raises DamagedError.
    """
    lanes: list[list[TimedGeneration]] = []
    ended: list[tuple[float, int]] = []
    for each in sorted(made, key=attrgetter("start_s")):
        if not 0.0 <= each.end_s - each.start_s <= MAX_WAIT_S:
            raise DamagedError(f"lasts {each.end_s - each.start_s:g} s, which no generation does")
        if ended and ended[0][0] <= each.start_s:
            _, at = heappop(ended)
        else:
            at = len(lanes)
            lanes.append([])
        lanes[at].append(each)
        heappush(ended, (each.end_s, at))
    for at, lane in enumerate(lanes):
        own = {**more, "trajectory_id": identifier(f"{name}/{at}" if at else name)}
        for step, (each, after) in enumerate(zip_longest(lane, lane[1:])):
            start_s = each.start_s
            parts: dict[str, Any] = {"llm_s": each.end_s - start_s}
            if after is not None:
                parts["tool_s"] = after.start_s - each.end_s
            elif not at and scored_s > 0.0:
                parts["reward_s"] = scored_s
            if not at and not step and 0.0 < begun_s <= start_s:
                start_s, parts["env_start_s"] = begun_s, start_s - begun_s
            yield ObservedRequest(start_s=start_s, step=step, **own, **parts, **each.counts)


def grouped(
    kind: type[T], rows: Iterable[tuple[str, str, T]]
) -> Iterator[tuple[str, list[tuple[str, T]]]]:
    """Rows, each with its trajectory and its place, by trajectory; memory does not grow."""
    part: Any = tuple[str, kind]  # type: ignore[valid-type]
    with Sessions(part) as sessions:
        for trajectory, where, row in rows:
            sessions.add(trajectory, (where, row))
        yield from sessions


class StepClock:
    """Steps of which a log has only durations: they follow one another from 0 on."""

    def __init__(self) -> None:
        self._end_s = 0.0

    def phases(
        self, label: int, total_s: float, parts: Mapping[PhaseName, float]
    ) -> Iterator[Phase]:
        """A step and its parts, one after the other.

        Raises DamagedError where its parts exceed it.
        """
        if not all(0.0 <= part_s <= MAX_WAIT_S for part_s in (total_s, *parts.values())):
            raise DamagedError(f"step {label} or a part of it takes a time that none does")
        parts_s = sum(parts.values())
        if parts_s - total_s > max(SLACK_S, 0.01 * total_s):
            raise DamagedError(
                f"the parts of step {label} take {parts_s:,.1f} s, the step {total_s:,.1f} s: the "
                "lines of two runs are in one log"
            )
        at_s = self._end_s
        self._end_s += max(total_s, parts_s)
        yield Phase(phase="step", start_s=at_s, end_s=self._end_s, rl_step=label)
        for name, part_s in parts.items():
            if part_s:
                yield Phase(phase=name, start_s=at_s, end_s=at_s + part_s, rl_step=label)
                at_s += part_s
