"""The dispatches that an engine has not ended yet, with what has been heard of each."""

import time
from dataclasses import dataclass, field

from heddle_core.ids import TrajectoryId
from heddle_runtime.engine import StepEnd
from heddle_runtime.process import wire
from heddle_runtime.process.wire import unpack_ids


@dataclass(slots=True, eq=False)
class Dispatch:
    """A step that runs there. Moments are of `time.monotonic`; 0 before they are known."""

    id: int
    trajectory: TrajectoryId
    sent_s: float
    made: list[int] = field(default_factory=list)
    started_s: float = 0.0
    first_s: float = 0.0


class InFlight:
    """Dispatches by trajectory and by number: an engine has one of a trajectory at a time."""

    def __init__(self) -> None:
        self._by_trajectory: dict[TrajectoryId, Dispatch] = {}
        self._by_id: dict[int, Dispatch] = {}

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self._by_trajectory

    def begin(self, id_: int, trajectory: TrajectoryId) -> Dispatch:
        """Note a dispatch that is sent now."""
        dispatch = Dispatch(id_, trajectory, time.monotonic())
        self._by_trajectory[trajectory] = self._by_id[id_] = dispatch
        return dispatch

    def get(self, trajectory: TrajectoryId) -> Dispatch | None:
        """Return the trajectory's dispatch, if it has one."""
        return self._by_trajectory.get(trajectory)

    def keep(self, progress: wire.Progress) -> None:
        """Keep tokens that were made so far."""
        for made in progress.made:
            dispatch = self._by_id[made.id]
            dispatch.made += unpack_ids(made.tokens)
            dispatch.started_s, dispatch.first_s = made.started_s, made.first_s

    def end(self, report: wire.Ended) -> StepEnd:
        """Put together what a dispatch came to, and forget it."""
        dispatch = self._by_id.pop(report.id)
        del self._by_trajectory[dispatch.trajectory]
        made = (*dispatch.made, *unpack_ids(report.tokens))
        return StepEnd(
            dispatch.trajectory,
            len(made),
            report.finished,
            report.queued_s,
            report.prefill_s,
            report.decode_s,
            report.cached_tokens,
            report.recomputes,
            made,
            report.error,
        )

    def salvage(self) -> list[tuple[TrajectoryId, StepEnd]]:
        """Empty it; what was heard of each is what is left of it, the newest tokens missing."""
        salvaged = []
        for dispatch in self._by_trajectory.values():
            queued_s, prefill_s, decode_s = split_time(
                dispatch.sent_s, dispatch.started_s, dispatch.first_s, time.monotonic()
            )
            made = tuple(dispatch.made)
            end = StepEnd(
                dispatch.trajectory, len(made), False, queued_s, prefill_s, decode_s, 0, 0, made
            )
            salvaged.append((dispatch.trajectory, end))
        self._by_trajectory.clear()
        self._by_id.clear()
        return salvaged


def split_time(
    sent_s: float, started_s: float, first_s: float, ended_s: float
) -> tuple[float, float, float]:
    """Return seconds queued, in prefill and in decode; a moment that never came is 0."""
    moments = [sent_s]
    for moment_s in (started_s or ended_s, first_s or ended_s, ended_s):
        moments.append(max(moments[-1], moment_s))
    return moments[1] - moments[0], moments[2] - moments[1], moments[3] - moments[2]
