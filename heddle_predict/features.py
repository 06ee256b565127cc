"""Inputs of a learned predictor: one row of numbers for a trajectory, from events alone.

The same class makes the rows in a run and in training (`heddle_predict`), so that inputs of both
agree exactly. Sizes enter as natural logarithms relative to the *levels* of their task, so that a
model of one workload also fits another scale.
"""

import math
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import Final

from heddle_core.estimate.history import Levels
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.policy import TrajectoryView
from heddle_predict.model import Vocabulary

_UNSEEN: Final = -math.inf
"""Inside a record: not observed yet. A row then holds 0, the level of the task."""
_LEAST_S: Final = 1e-3
"""No tool answers faster; keeps logarithms finite."""

_KNOWN_WEIGHT: Final = 500.0
_STRANGER_WEIGHT: Final = 10.0
"""Weight of a prior level in steps, for tasks of the model and for others: lengths drift as a
policy is trained, and a rollout soon gives better levels."""


@dataclass(slots=True)
class _Mean:
    """A sum and the number of its terms."""

    count: int = 0
    total: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value


@dataclass(slots=True)
class _Shown:
    """Sums over observed steps and tools, of one trajectory or of a whole group."""

    outputs: _Mean = field(default_factory=_Mean)
    payloads: _Mean = field(default_factory=_Mean)
    first_payloads: _Mean = field(default_factory=_Mean)
    known_calls: int = 0
    """Calls of which it is known whether they succeeded."""
    failed: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Own(_Shown):
    made: int = 0
    in_tool: bool = False
    first_output: float = _UNSEEN
    last_output: float = _UNSEEN
    longest_output: float = _UNSEEN
    first_payload: float = _UNSEEN
    last_payload: float = _UNSEEN
    last_failed: float = -1.0
    failed_in_row: int = 0
    tool_s: float = 0.0
    last_tool_s: float = 0.0
    tools: dict[str, None] = field(default_factory=dict)
    last_tools: tuple[int, ...] = ()
    calls_of: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Group(_Shown):
    running: int = 0
    running_steps: int = 0
    running_made: float = 0.0
    """Sum of log tokens over siblings that have made some and not ended."""
    totals: list[int] = field(default_factory=list)
    """Of siblings that ended, ascending."""
    ended_steps: int = 0
    log_totals: float = 0.0


@dataclass(slots=True)
class _Task:
    index: int
    """Column among the known tasks; -1 for any other."""
    levels: Levels
    step: float
    """Logarithms of the levels in force."""
    total: float
    payload: float
    prompt: float | None
    ended: int = 0
    log_totals: float = 0.0
    outputs: _Mean = field(default_factory=_Mean)
    seen_outputs: _Mean = field(default_factory=_Mean)
    seen_payloads: _Mean = field(default_factory=_Mean)
    groups: dict[GroupId, _Group] = field(default_factory=dict)


class Features:
    """Observes a run as a predictor does and makes rows of `Vocabulary.names()`.

    A row depends only on past observations. Siblings that ended count with their totals, siblings
    that run with their output so far.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tool_index = {tool: i for i, tool in enumerate(vocabulary.tools)}
        self._task_index = {task: i for i, task in enumerate(vocabulary.tasks)}
        self._tasks: dict[str, _Task] = {}
        self._own: dict[TrajectoryId, _Own] = {}
        self._nothing = (_Group(), self._new_own())

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Add a generation; its length is the output of `t` since its last one."""
        task, group, own = self._records(t)
        length = t.output_tokens - own.made
        output = math.log1p(length)
        if own.made == 0:
            group.running += 1
            group.running_made += math.log1p(t.output_tokens)
        else:
            group.running_made += math.log1p(t.output_tokens) - math.log1p(own.made)
        own.made = t.output_tokens
        own.in_tool = True
        own.last_output = output
        if own.steps == 0:
            own.first_output = output
        else:  # first generations are plans: they are kept apart from the others
            own.longest_output = max(own.longest_output, output)
            for shown in (own.outputs, group.outputs, task.outputs):
                shown.add(output)
        own.steps += 1
        group.running_steps += 1
        self._learn_levels(task, length)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Add a tool's result: its size, outcome and time."""
        task, group, own = self._records(t)
        payload = math.log1p(event.observation_tokens)
        own.in_tool = False
        own.last_payload = payload
        if own.payloads.count == 0:
            own.first_payload = payload
            group.first_payloads.add(payload)
        own.payloads.add(payload)
        group.payloads.add(payload)
        task.seen_payloads.add(event.observation_tokens)
        own.last_failed = -1.0 if event.ok is None else float(not event.ok)
        for shown in (own, group):
            shown.known_calls += event.ok is not None
            shown.failed += event.ok is False
        own.failed_in_row = own.failed_in_row + 1 if event.ok is False else 0
        own.last_tool_s = math.log(max(t.tool_s - own.tool_s, _LEAST_S))
        own.tool_s = t.tool_s
        names = event.tool.split("+")  # parallel calls
        known = [self._tool_index[name] for name in names if name in self._tool_index]
        own.last_tools = tuple(dict.fromkeys(known))
        for index in known:
            own.calls_of[index] += 1
        for name in names:
            own.tools[name] = None

    def observe_finish(self, t: TrajectoryView) -> None:
        """Move a trajectory from the siblings that run to those that ended."""
        own = self._own.pop(t.id, None)
        if own is None or own.made == 0:
            return
        task = self._tasks[t.task]
        group = task.groups[t.group]
        group.running -= 1
        group.running_steps -= own.steps
        group.running_made -= math.log1p(own.made)
        made = t.output_tokens
        insort(group.totals, made)
        group.log_totals += math.log(made)
        task.log_totals += math.log(made)
        group.ended_steps += own.steps
        task.ended += 1

    def row(self, t: TrajectoryView, survival: float) -> list[float]:
        """Return the row of a trajectory that has not ended.

        `survival` is the logarithm of the estimate of `ProgressivePredictor`, one of the inputs.
        """
        task = self._tasks.get(t.task) or self._new_task(t.task)
        no_group, nothing = self._nothing
        group = task.groups.get(t.group, no_group)
        own = self._own.get(t.id, nothing)
        row = self._of_own(t, task, own)
        row += self._of_siblings(t, task, group, own)
        ended = task.ended
        row += (
            math.log1p(ended),
            _shrunk_mean(task.log_totals, ended, task.total, 10.0),
            _shrunk_mean(task.outputs.total, task.outputs.count, task.step, 10.0),
            survival - task.total,
        )
        last = [0.0] * len(own.calls_of)
        for index in own.last_tools:
            last[index] = 1.0
        row += last
        row += own.calls_of
        known = [0.0] * len(self._task_index)
        if task.index >= 0:
            known[task.index] = 1.0
        row += known
        return row

    def _of_own(self, t: TrajectoryView, task: _Task, own: _Own) -> list[float]:
        made = t.output_tokens
        calls = own.payloads.count
        return [
            float(own.steps),
            math.log1p(made) - task.total,
            math.log1p(made - own.made),
            float(own.in_tool),
            math.log1p(t.prompt_tokens) - task.prompt if task.prompt is not None else 0.0,
            math.log1p(t.context_tokens) - task.total,
            _relative(own.first_output, task.step),
            _relative(own.last_output, task.step),
            _shrunk_mean(own.outputs.total, own.outputs.count, task.step, 0.0),
            _relative(own.longest_output, task.step),
            _relative(own.first_payload, task.payload),
            _relative(own.last_payload, task.payload),
            _shrunk_mean(own.payloads.total, calls, task.payload, 0.0),
            float(calls),
            own.last_failed,
            float(own.failed_in_row),
            own.failed / own.known_calls if own.known_calls else -1.0,
            float(len(own.tools)),
            own.last_tool_s,
            math.log(max(own.tool_s / calls, _LEAST_S)) if calls else 0.0,
        ]

    def _of_siblings(self, t: TrajectoryView, task: _Task, group: _Group, own: _Own) -> list[float]:
        """Sums over the others of the group: the group's sums minus its own."""
        totals, made = group.totals, t.output_tokens
        ended = len(totals)
        longer = totals[bisect_right(totals, made) :] if ended else totals
        running = group.running - (own.made > 0)
        known_calls = group.known_calls - own.known_calls
        outputs, payloads, firsts = group.outputs, group.payloads, group.first_payloads
        first = own.first_payload if own.payloads.count else 0.0
        return [
            float(ended),
            _shrunk_mean(group.log_totals, ended, task.total, 1.0),
            math.log(totals[-1]) - task.total if ended else 0.0,
            len(longer) / ended if ended else 1.0,
            math.log(sum(longer) / len(longer) - made) - task.total if longer else 0.0,
            group.ended_steps / ended if ended else -1.0,
            float(running),
            _shrunk_mean(group.running_made - math.log1p(own.made), running, task.total, 0.0),
            (group.running_steps - own.steps) / running if running else -1.0,
            _shrunk_mean(
                outputs.total - own.outputs.total, outputs.count - own.outputs.count, task.step, 4.0
            ),
            _shrunk_mean(
                payloads.total - own.payloads.total,
                payloads.count - own.payloads.count,
                task.payload,
                4.0,
            ),
            _shrunk_mean(
                firsts.total - first, firsts.count - (own.payloads.count > 0), task.payload, 2.0
            ),
            (group.failed - own.failed) / known_calls if known_calls > 0 else -1.0,
        ]

    def _records(self, t: TrajectoryView) -> tuple[_Task, _Group, _Own]:
        task = self._tasks.get(t.task)
        if task is None:
            task = self._tasks[t.task] = self._new_task(t.task)
        group = task.groups.get(t.group)
        if group is None:
            group = task.groups[t.group] = _Group()
        own = self._own.get(t.id)
        if own is None:
            own = self._own[t.id] = self._new_own()
        return task, group, own

    def _new_own(self) -> _Own:
        return _Own(calls_of=[0] * len(self._vocabulary.tools))

    def _new_task(self, name: str) -> _Task:
        index = self._task_index.get(name, -1)
        levels = self._vocabulary.tasks.get(name, self._vocabulary.anywhere)
        return _Task(
            index,
            levels,
            step=math.log1p(levels.step_tokens),
            total=math.log(levels.total_tokens),
            payload=math.log1p(levels.payload_tokens),
            prompt=math.log1p(levels.prompt_tokens) if index >= 0 else None,
        )

    def _learn_levels(self, task: _Task, length: int) -> None:
        """Move the levels towards the observations of this rollout."""
        task.seen_outputs.add(length)
        seen, paid, levels = task.seen_outputs, task.seen_payloads, task.levels
        weight = _KNOWN_WEIGHT if task.index >= 0 else _STRANGER_WEIGHT
        step = (weight * levels.step_tokens + seen.total) / (weight + seen.count)
        payload = (weight * levels.payload_tokens + paid.total) / (weight + paid.count)
        task.step = math.log1p(step)
        task.payload = math.log1p(payload)
        task.total = math.log(levels.total_tokens * step / levels.step_tokens)


def _relative(value: float, level: float) -> float:
    """A logarithm less its level; 0 for what was not observed."""
    return value - level if value > _UNSEEN else 0.0


def _shrunk_mean(total: float, count: int, level: float, weight: float) -> float:
    """A mean minus its level, shrunk to 0 by `weight` additional values at the level."""
    return (total - count * level) / (count + weight) if count > 0 else 0.0
