"""Steps that an engine has not ended yet, with the tokens it has reported of each."""

import time
from dataclasses import dataclass, field
from typing import Any

from heddle_core.ids import TrajectoryId
from heddle_rollout.engines import StepResult
from heddle_runtime.generation import Generation, GenerationEnd, report_tokens
from heddle_runtime.process import wire
from heddle_runtime.process.stepped_engine import Finish, TopLogprobs
from heddle_runtime.process.wire import unpack_floats, unpack_ids

LEAST_LOGPROB = -9999.0
"""What vLLM reports for a log-prob of minus infinity, which JSON does not have."""


@dataclass(slots=True, eq=False)
class RunningStep:
    """A dispatched step. Times are of this process's `time.monotonic`; 0 until known."""

    id: int
    trajectory: TrajectoryId
    sent_s: float
    payload: Any = None
    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    started_s: float = 0.0
    first_s: float = 0.0

    def end(self, finish: Finish, stop_reason: int | str | None = None) -> GenerationEnd | None:
        """What the agent that sent the payload is to know; None without one."""
        if not isinstance(self.payload, Generation):
            return None
        return GenerationEnd(
            finish_reason=finish or "abort",
            stop_reason=stop_reason,
            logprobs=tuple(map(logprob_object, self.top)),
        )


class RunningSteps:
    """Steps by trajectory and by id; an engine has at most one of a trajectory."""

    def __init__(self) -> None:
        self._by_trajectory: dict[TrajectoryId, RunningStep] = {}
        self._by_id: dict[int, RunningStep] = {}

    def __contains__(self, trajectory: TrajectoryId) -> bool:
        return trajectory in self._by_trajectory

    def begin(self, id_: int, trajectory: TrajectoryId, payload: Any = None) -> RunningStep:
        step = RunningStep(id_, trajectory, time.monotonic(), payload)
        self._by_trajectory[trajectory] = self._by_id[id_] = step
        return step

    def get(self, trajectory: TrajectoryId) -> RunningStep | None:
        """Return the trajectory's step, if it has one."""
        return self._by_trajectory.get(trajectory)

    def keep(self, progress: wire.Progress) -> None:
        """Add the tokens generated since the last report."""
        now_s = time.monotonic()
        for made in progress.made:
            step = self._by_id[made.id]
            tokens = unpack_ids(made.tokens)
            step.made += tokens
            step.logprobs += unpack_floats(made.logprobs)
            step.top += made.top
            step.first_s = now_s - made.decode_s
            step.started_s = step.first_s - made.prefill_s
            logprobs = [logprob_object(top) for top in made.top]
            report_tokens(step.payload, tokens, logprobs)

    def end(self, report: wire.Ended) -> StepResult:
        step = self._by_id.pop(report.id)
        del self._by_trajectory[step.trajectory]
        made = (*step.made, *unpack_ids(report.tokens))
        inside_s = report.prefill_s + report.decode_s
        since_s = time.monotonic() - step.sent_s
        step.top += report.top
        return StepResult(
            trajectory=step.trajectory,
            tokens=len(made),
            finished=report.finished,
            queued_s=max(0.0, since_s - inside_s),
            prefill_s=report.prefill_s,
            decode_s=report.decode_s,
            cached_tokens=report.cached_tokens,
            recomputes=report.recomputes,
            output_ids=made,
            output_logprobs=(*step.logprobs, *unpack_floats(report.logprobs)),
            extras=step.end(report.finish, report.stop_reason),
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
                extras=step.end("abort"),
            )
            salvaged.append((step.trajectory, result))
        self._by_trajectory.clear()
        self._by_id.clear()
        return salvaged


def logprob_object(top: TopLogprobs) -> dict[str, Any]:
    """Log-probs of one token in vLLM's form of `logprobs.content`."""
    by_token = {token: (logprob, rank) for token, logprob, rank in top}
    chosen = top[0][0]
    several = list(by_token.items())[: max(1, len(top) - 1)]
    return {
        **_candidate(chosen, *by_token[chosen]),
        "top_logprobs": [_candidate(token, *entry) for token, entry in several],
    }


def _candidate(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": max(logprob, LEAST_LOGPROB), "rank": rank or None}


def split_time(
    sent_s: float, started_s: float, first_s: float, ended_s: float
) -> tuple[float, float, float]:
    """Return seconds queued, in prefill and in decode; 0 for a time that was not reached."""
    moments = [sent_s]
    for moment_s in (started_s or ended_s, first_s or ended_s, ended_s):
        moments.append(max(moments[-1], moment_s))
    return moments[1] - moments[0], moments[2] - moments[1], moments[3] - moments[2]
