"""Plays recorded trajectories as a rollout, in order of time.

This file drives a real controller, with a predictor that forwards every call. Nothing depends on a
cluster: one engine takes every step at once, every trajectory generates at one speed, and its tools
take their recorded time.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from heddle_core.commands import Dispatch
from heddle_core.controller import Controller
from heddle_core.events import (
    EngineReady,
    Event,
    RolloutStarted,
    StepFinished,
    ToolReturned,
    ToolStarted,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.hooks import Observer
from heddle_core.ids import EngineId, EngineShape, GroupId, RolloutId, TrajectoryId
from heddle_core.parts.admission import PromptOnly
from heddle_core.parts.migration import Never
from heddle_core.parts.placement.load_and_pin import LeastLoaded
from heddle_core.parts.scheduler import Fcfs
from heddle_core.plans import EngineSpec, ResourcePlan
from heddle_core.policy import Policy, TrajectoryView
from heddle_trace.schema import TrajectoryScript

ROLLOUT, ENGINE, SHAPE = RolloutId("played"), EngineId("e0"), EngineShape("any", 1)
UNLIMITED = 2**62

Moment: TypeAlias = Literal["queued", "in tool"]
"""When a controller needs an estimate: as a step is queued, and as its tool starts."""


OnQuestion: TypeAlias = Callable[[TrajectoryView, int, Moment], None]
"""Called when a controller needs an estimate of a trajectory, with the number of its script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a rollout is played."""

    slots: float = 1.0
    """Share of the trajectories that run at once; the others wait in order of arrival."""
    tokens_per_s: float = 50.0


def play(
    scripts: Sequence[TrajectoryScript],
    pace: Pace,
    learner: Observer,
    on_question: OnQuestion | None = None,
) -> None:
    """Play a rollout of `scripts`, from the first arrival to the last end: `learner` observes it,
    such as a predictor, and `on_question` is called where an estimate is needed."""
    played = _Played(scripts, pace, learner, on_question)
    for _ in range(max(1, round(pace.slots * len(scripts)))):
        played.start_next(0.0)
    while played.queue:
        played.step()


class _Played:
    """One rollout: the ends that are due, and the controller that receives the events."""

    def __init__(
        self,
        scripts: Sequence[TrajectoryScript],
        pace: Pace,
        learner: Observer,
        on_question: OnQuestion | None,
    ) -> None:
        self.queue: list[tuple[float, int]] = []
        """When the step or tool of a script ends, and the script's number."""
        self._scripts, self._pace = scripts, pace
        self._index = {TrajectoryId(s.id): i for i, s in enumerate(scripts)}
        self._at = [0] * len(scripts)
        """The step of each script that runs, or whose tool runs."""
        self._in_tool = [False] * len(scripts)
        self._waiting = iter(range(len(scripts)))
        self._controller = Controller(
            Policy(
                predictor=_Shown(learner, on_question, self._index),
                scheduler=Fcfs(),
                admission=PromptOnly(),
                placement=LeastLoaded(),
                migration=Never(),
                planner=_OneEngine(),
            )
        )
        self._handle(RolloutStarted(time_s=0.0, rollout=ROLLOUT, trajectories=None))
        self._handle(
            EngineReady(
                time_s=0.0,
                engine=ENGINE,
                shape=SHAPE,
                kv_capacity_tokens=UNLIMITED,
                max_running=UNLIMITED,
            )
        )

    def start_next(self, now_s: float) -> None:
        """Let the next trajectory arrive, if there is one."""
        index = next(self._waiting, None)
        if index is not None:
            script = self._scripts[index]
            self._handle(
                TrajectoryArrived(
                    time_s=now_s,
                    rollout=ROLLOUT,
                    trajectory=TrajectoryId(script.id),
                    group=GroupId(script.group),
                    task=script.task,
                    prompt_tokens=script.steps[0].prompt_tokens,
                )
            )

    def step(self) -> None:
        now_s, index = heapq.heappop(self.queue)
        if self._in_tool[index]:
            self._in_tool[index] = False
            self._return(index, now_s)
            return
        script, number = self._scripts[index], self._at[index]
        trajectory, step = TrajectoryId(script.id), script.steps[number]
        ends = number + 1 == len(script.steps)
        self._handle(
            StepFinished(
                time_s=now_s,
                trajectory=trajectory,
                step=number,
                engine=ENGINE,
                output_tokens=step.output_tokens,
                reason="answer" if ends else "tool_call",
            )
        )
        if ends:
            self._handle(
                TrajectoryFinished(time_s=now_s, trajectory=trajectory, outcome="completed")
            )
            self.start_next(now_s)
            return
        self._handle(
            ToolStarted(time_s=now_s, trajectory=trajectory, step=number, tool=step.tool or "")
        )
        self._in_tool[index] = True
        heapq.heappush(self.queue, (now_s + step.tool_s, index))

    def _return(self, index: int, now_s: float) -> None:
        script, number = self._scripts[index], self._at[index]
        step = script.steps[number]
        self._at[index] += 1
        self._handle(
            ToolReturned(
                time_s=now_s,
                trajectory=TrajectoryId(script.id),
                step=number,
                tool=step.tool or "",
                ok=step.tool_ok,
                observation_tokens=step.tool_tokens,
                context_tokens=script.steps[number + 1].prompt_tokens,
            )
        )

    def _handle(self, event: Event) -> None:
        for command in self._controller.handle(event):
            if isinstance(command, Dispatch):
                index = self._index[command.trajectory]
                tokens = self._scripts[index].steps[command.step].output_tokens
                step_s = tokens / self._pace.tokens_per_s
                heapq.heappush(self.queue, (event.time_s + step_s, index))


class _Shown:
    """A predictor that forwards every call; its estimate is always 0."""

    served = False

    def __init__(
        self, learner: Observer, on_question: OnQuestion | None, index: dict[TrajectoryId, int]
    ) -> None:
        self._learner, self._on_question, self._index = learner, on_question, index
        self._moments: dict[TrajectoryId, Moment] = {}
        """Moment of the next question; trajectories that have just arrived have none yet."""

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self._moments[t.id] = "in tool"
        self._learner.observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._moments[t.id] = "queued"
        self._learner.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        del self._moments[t.id]
        self._learner.observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Forward the question, except the one on arrival: the step is queued right after it."""
        moment = self._moments.get(t.id)
        if moment is None:
            self._moments[t.id] = "queued"
        elif self._on_question is not None:
            self._on_question(t, self._index[t.id], moment)
        return 0.0


class _OneEngine:
    """A planner of one engine, on which nothing ever waits."""

    needs_all = False

    def plan(self, ts: Sequence[TrajectoryView], remaining: Sequence[float]) -> ResourcePlan:
        return ResourcePlan(
            engines=(EngineSpec(engine=ENGINE, shape=SHAPE, max_running=UNLIMITED),)
        )


def total_tokens(script: TrajectoryScript) -> int:
    return sum(step.output_tokens for step in script.steps)
