"""Steps that an engine has not ended yet, with the tokens it has reported of each."""

import time
from dataclasses import dataclass, field

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_runtime.process import wire
from heddle_runtime.process.wire import unpack_floats, unpack_ids


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A dispatched step. Times are of `time.monotonic`; 0 until known."""

    id: int
    trajectory: TrajectoryId
    sent_s: float
    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    started_s: float = 0.0
    first_s: float = 0.0


class InFlight:
    """Steps by trajectory and by id; an engine has at most one of a trajectory."""

    def __init__(self) -> None:
        self._by_trajectory: dict[TrajectoryId, InFlightStep] = {}
        self._by_id: dict[int, InFlightStep] = {}

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self._by_trajectory

    def begin(self, id_: int, trajectory: TrajectoryId) -> InFlightStep:
        """Add a step that is sent now."""
        step = InFlightStep(id_, trajectory, time.monotonic())
        self._by_trajectory[trajectory] = self._by_id[id_] = step
        return step

    def get(self, trajectory: TrajectoryId) -> InFlightStep | None:
        """Return the trajectory's step, if it has one."""
        return self._by_trajectory.get(trajectory)

    def keep(self, progress: wire.Progress) -> None:
        """Add the tokens generated since the last report."""
        for made in progress.made:
            step = self._by_id[made.id]
            step.made += unpack_ids(made.tokens)
            step.logprobs += unpack_floats(made.logprobs)
            step.started_s, step.first_s = made.started_s, made.first_s

    def end(self, report: wire.Ended) -> StepResult:
        """Remove a step and return its result."""
        step = self._by_id.pop(report.id)
        del self._by_trajectory[step.trajectory]
        made = (*step.made, *unpack_ids(report.tokens))
        return StepResult(
            trajectory=step.trajectory,
            tokens=len(made),
            finished=report.finished,
            queued_s=report.queued_s,
            prefill_s=report.prefill_s,
            decode_s=report.decode_s,
            cached_tokens=report.cached_tokens,
            recomputes=report.recomputes,
            output_ids=made,
            output_logprobs=(*step.logprobs, *unpack_floats(report.logprobs)),
            error=report.error,
        )

    def salvage(self) -> list[tuple[TrajectoryId, StepResult]]:
        """Remove all steps; return of each what was reported, without the newest tokens."""
        salvaged = []
        for step in self._by_trajectory.values():
            queued_s, prefill_s, decode_s = split_time(
                step.sent_s, step.started_s, step.first_s, time.monotonic()
            )
            made = tuple(step.made)
            result = StepResult(
                trajectory=step.trajectory,
                tokens=len(made),
                finished=False,
                queued_s=queued_s,
                prefill_s=prefill_s,
                decode_s=decode_s,
                output_ids=made,
                output_logprobs=tuple(step.logprobs),
            )
            salvaged.append((step.trajectory, result))
        self._by_trajectory.clear()
        self._by_id.clear()
        return salvaged


def split_time(
    sent_s: float, started_s: float, first_s: float, ended_s: float
) -> tuple[float, float, float]:
    """Return seconds queued, in prefill and in decode; 0 for a time that was not reached."""
    moments = [sent_s]
    for moment_s in (started_s or ended_s, first_s or ended_s, ended_s):
        moments.append(max(moments[-1], moment_s))
    return moments[1] - moments[0], moments[2] - moments[1], moments[3] - moments[2]
