"""Plays recorded trajectories as a rollout, in order of time, to whoever watches.

Nothing here depends on a cluster: every trajectory generates at one speed and its tools take their
recorded time. What a watcher sees at a question is what a controller would have shown it by then.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId
from heddle_core.policy import TrajectoryView
from heddle_core.trajectory import Trajectory
from heddle_trace.schema import TrajectoryScript

Moment: TypeAlias = Literal["queued", "in tool"]
"""When a controller asks: as a step is queued, and as its tool starts."""


class Watcher(Protocol):
    """Sees what a predictor sees, and is asked when one is."""

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """A generation ended."""
        ...

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """A tool answered."""
        ...

    def observe_finish(self, t: TrajectoryView) -> None:
        """A trajectory ended."""
        ...

    def asked(self, t: TrajectoryView, index: int, moment: Moment) -> None:
        """A controller would ask about `t` now, the trajectory of script number `index`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a rollout is played."""

    slots: float = 1.0
    """Share of the trajectories that run at once; the others wait in order of arrival."""
    tokens_per_s: float = 50.0


def play(scripts: Sequence[TrajectoryScript], pace: Pace, watcher: Watcher) -> None:
    """Play a rollout of `scripts` to `watcher`, from the first arrival to the last end."""
    ts = [_arrived(script) for script in scripts]
    waiting = iter(range(len(ts)))
    queue: list[tuple[float, int]] = []

    def start(index: int, now_s: float) -> None:
        t = ts[index]
        watcher.asked(t, index, "queued")
        step_s = scripts[index].steps[t.step].output_tokens / pace.tokens_per_s
        heapq.heappush(queue, (now_s + step_s, index))

    for index in (next(waiting) for _ in range(max(1, round(pace.slots * len(ts))))):
        start(index, 0.0)
    while queue:
        now_s, index = heapq.heappop(queue)
        t, steps = ts[index], scripts[index].steps
        if t.phase == "tool":
            _return(t, scripts[index], now_s, watcher)
            start(index, now_s)
            continue
        step = steps[t.step]
        ends = t.step + 1 == len(steps)
        t.phase = "tool"
        t.output_tokens += step.output_tokens
        t.context_tokens += step.output_tokens
        event = StepFinished(
            time_s=now_s,
            trajectory=t.id,
            step=t.step,
            engine=EngineId("e0"),
            output_tokens=step.output_tokens,
            reason="answer" if ends else "tool_call",
        )
        watcher.observe_step(t, event)
        if not ends:
            watcher.asked(t, index, "in tool")
            heapq.heappush(queue, (now_s + step.tool_s, index))
            continue
        t.phase = "finished"
        watcher.observe_finish(t)
        following = next(waiting, None)
        if following is not None:
            start(following, now_s)


def total_tokens(script: TrajectoryScript) -> int:
    """Output of a trajectory."""
    return sum(step.output_tokens for step in script.steps)


def _arrived(script: TrajectoryScript) -> Trajectory:
    prompt = script.steps[0].prompt_tokens
    return Trajectory(
        id=TrajectoryId(script.id),
        rollout=RolloutId("rollout"),
        group=GroupId(script.group),
        task=script.task,
        weights_version=0,
        prompt_tokens=prompt,
        arrived_s=0.0,
        context_tokens=prompt,
        runnable_s=0.0,
    )


def _return(t: Trajectory, script: TrajectoryScript, now_s: float, watcher: Watcher) -> None:
    step = script.steps[t.step]
    t.step += 1
    t.phase = "queued"
    t.tool_s += step.tool_s
    t.context_tokens = script.steps[t.step].prompt_tokens
    event = ToolReturned(
        time_s=now_s,
        trajectory=t.id,
        step=t.step - 1,
        tool=step.tool or "",
        ok=step.tool_ok,
        observation_tokens=step.tool_tokens,
        context_tokens=t.context_tokens,
    )
    watcher.observe_tool(t, event)
