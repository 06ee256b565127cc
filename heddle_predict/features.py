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
from heddle_core.events import ToolReturned
from heddle_core.ids import GroupId
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
class _Group:
    """Sums over the observed steps and tools of all siblings."""

    steps: int = 0
    """Of siblings that have not ended."""
    outputs: int = 0
    """Generations but each first: those are plans, and kept apart."""
    output: float = 0.0
    """Sum of the logarithms of their lengths; other sums are of logarithms too."""
    payloads: int = 0
    payload: float = 0.0
    first_payloads: int = 0
    first_payload: float = 0.0
    known_calls: int = 0
    """Calls of which it is known whether they succeeded."""
    failed: int = 0
    running: int = 0
    """Siblings that have made some tokens and not ended."""
    made: float = 0.0
    """Sum over those siblings."""
    totals: list[int] = field(default_factory=list)
    """Of siblings that ended, ascending."""
    ended_steps: int = 0
    total: float = 0.0


@dataclass(slots=True)
class _Task:
    levels: Levels
    weight: float
    """Of the prior levels, in steps."""
    known: bool
    one_hot: list[float]
    """Which of the known tasks it is: the last columns of a row."""
    step_level: float
    """Logarithms of the levels in force."""
    total_level: float
    payload_level: float
    prompt_level: float
    steps: int = 0
    output_tokens: int = 0
    calls: int = 0
    payload_tokens: int = 0
    outputs: int = 0
    output: float = 0.0
    ended: int = 0
    total: float = 0.0
    groups: dict[GroupId, _Group] = field(default_factory=dict)


@dataclass(slots=True)
class Own:
    """Sums over the observed steps and tools of one unfinished trajectory, as in `_Group`."""

    task: _Task
    group: _Group
    last_tools: list[float]
    """For each known tool, 1 if it is one of the latest call's; a list that others have too."""
    calls_of: list[float]
    """For each known tool, how many of its calls returned; a list that others have too."""
    steps: int = 0
    outputs: int = 0
    output: float = 0.0
    payloads: int = 0
    payload: float = 0.0
    known_calls: int = 0
    failed: int = 0
    failed_in_row: int = 0
    last_failed: float = -1.0
    made: int = 0
    """Tokens; the logarithm follows."""
    log_made: float = 0.0
    in_tool: bool = False
    first_output: float = _UNSEEN
    last_output: float = _UNSEEN
    longest_output: float = _UNSEEN
    first_payload: float = _UNSEEN
    last_payload: float = _UNSEEN
    tool_s: float = 0.0
    last_tool_s: float = 0.0
    tools: tuple[str, ...] = ()
    """Each tool that it has called, once."""


@dataclass(slots=True)
class _Call:
    """What calls of the same tools have in common."""

    tools: tuple[str, ...]
    """Each once."""
    known: list[int]
    """Indices of known ones."""
    last_tools: list[float]


_MOST_CALLS: Final = 1_000
"""Kept: names of tools are the agents'."""
_MOST_COUNTS: Final = 10_000
"""Numbers of calls that are kept."""


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
        self._calls: dict[str, _Call] = {}
        self._counts: dict[tuple[float, ...], list[float]] = {}
        self._no_tools = [0.0] * len(self._tool_index)

    def begin(self, t: TrajectoryView) -> Own:
        """Return the sums of a trajectory that was not observed yet."""
        task = self._tasks.get(t.task)
        if task is None:
            task = self._tasks[t.task] = self._new_task(t.task)
        group = task.groups.get(t.group)
        if group is None:
            group = task.groups[t.group] = _Group()
        return Own(task, group, last_tools=self._no_tools, calls_of=self._no_tools)

    def learn_step(self, own: Own, t: TrajectoryView) -> None:
        """Add a generation; its length is the output of `t` since its last one."""
        task, group = own.task, own.group
        made = t.output_tokens
        length = made - own.made
        output = math.log1p(length)
        log_made = math.log1p(made)
        if own.made == 0:
            group.running += 1
            group.made += log_made
        else:
            group.made += log_made - own.log_made
        own.made, own.log_made = made, log_made
        own.in_tool = True
        own.last_output = output
        if own.steps == 0:
            own.first_output = output
        else:
            if output > own.longest_output:
                own.longest_output = output
            own.outputs += 1
            own.output += output
            group.outputs += 1
            group.output += output
            task.outputs += 1
            task.output += output
        own.steps += 1
        group.steps += 1
        _learn_levels(task, length)

    def learn_tool(self, own: Own, t: TrajectoryView, event: ToolReturned) -> None:
        """Add a tool's result: its size, outcome and time."""
        task, group = own.task, own.group
        payload = math.log1p(event.observation_tokens)
        own.in_tool = False
        own.last_payload = payload
        if own.payloads == 0:
            own.first_payload = payload
            group.first_payloads += 1
            group.first_payload += payload
        own.payloads += 1
        own.payload += payload
        group.payloads += 1
        group.payload += payload
        task.calls += 1
        task.payload_tokens += event.observation_tokens
        ok = event.ok
        if ok is None:
            own.last_failed = -1.0
            own.failed_in_row = 0
        else:
            failed = 0 if ok else 1
            own.last_failed = float(failed)
            own.failed_in_row = own.failed_in_row + 1 if failed else 0
            own.known_calls += 1
            own.failed += failed
            group.known_calls += 1
            group.failed += failed
        tool_s = t.tool_s
        own.last_tool_s = math.log(max(tool_s - own.tool_s, _LEAST_S))
        own.tool_s = tool_s
        call = self._calls.get(event.tool)
        if call is None:
            call = self._new_call(event.tool)
        if call.known:
            own.calls_of = self._counted(own.calls_of, call.known)
        own.last_tools = call.last_tools
        if not own.tools:
            own.tools = call.tools  # the same object for many trajectories
        elif own.tools != call.tools:
            own.tools += tuple([name for name in call.tools if name not in own.tools])

    def learn_end(self, own: Own, t: TrajectoryView) -> None:
        """Move a trajectory from the siblings that run to those that ended."""
        if own.made == 0:
            return
        task, group = own.task, own.group
        group.running -= 1
        group.steps -= own.steps
        group.made -= own.log_made
        made = t.output_tokens
        insort(group.totals, made)
        total = math.log(made)
        group.total += total
        task.total += total
        group.ended_steps += own.steps
        task.ended += 1

    def row(self, own: Own, t: TrajectoryView, survival: float) -> list[float]:
        """Return the row of a trajectory that has not ended.

        `survival` is the logarithm of the estimate of `ProgressivePredictor`, one of the inputs.
        """
        task = own.task
        made = t.output_tokens
        row = _of_own(t, own, made)
        row += _of_siblings(own, made)
        ended = task.ended
        row += (
            math.log1p(ended),
            _shrunk_mean(task.total, ended, task.total_level, 10.0),
            _shrunk_mean(task.output, task.outputs, task.step_level, 10.0),
            survival - task.total_level,
        )
        row += own.last_tools
        row += own.calls_of
        row += task.one_hot
        return row

    def _counted(self, calls_of: list[float], tools: list[int]) -> list[float]:
        """The numbers with a call more of each of these tools."""
        counts = [*calls_of]
        for index in tools:
            counts[index] += 1.0
        if len(self._counts) == _MOST_COUNTS:
            self._counts.clear()
        return self._counts.setdefault(tuple(counts), counts)

    def _new_call(self, tools: str) -> _Call:
        names = tools.split("+")  # parallel calls
        known = [self._tool_index[name] for name in names if name in self._tool_index]
        last = [float(index in known) for index in range(len(self._no_tools))]
        if len(self._calls) == _MOST_CALLS:
            self._calls.clear()
        call = self._calls[tools] = _Call(tuple(dict.fromkeys(names)), known, last)
        return call

    def _new_task(self, name: str) -> _Task:
        index = self._task_index.get(name, -1)
        levels = self._vocabulary.tasks.get(name, self._vocabulary.anywhere)
        return _Task(
            levels,
            _KNOWN_WEIGHT if index >= 0 else _STRANGER_WEIGHT,
            known=index >= 0,
            one_hot=[float(i == index) for i in range(len(self._task_index))],
            step_level=math.log1p(levels.step_tokens),
            total_level=math.log(levels.total_tokens),
            payload_level=math.log1p(levels.payload_tokens),
            prompt_level=math.log1p(levels.prompt_tokens),
        )


def _learn_levels(task: _Task, length: int) -> None:
    """Move the levels towards the observations of this rollout."""
    task.steps += 1
    task.output_tokens += length
    weight, levels = task.weight, task.levels
    step = (weight * levels.step_tokens + task.output_tokens) / (weight + task.steps)
    payload = (weight * levels.payload_tokens + task.payload_tokens) / (weight + task.calls)
    task.step_level = math.log1p(step)
    task.payload_level = math.log1p(payload)
    task.total_level = math.log(levels.total_tokens * step / levels.step_tokens)


def _of_own(t: TrajectoryView, own: Own, made: int) -> list[float]:
    task = own.task
    total, step, payload = task.total_level, task.step_level, task.payload_level
    calls, known_calls = own.payloads, own.known_calls
    return [
        float(own.steps),
        (own.log_made if made == own.made else math.log1p(made)) - total,
        math.log1p(made - own.made),
        float(own.in_tool),
        math.log1p(t.prompt_tokens) - task.prompt_level if task.known else 0.0,
        math.log1p(t.context_tokens) - total,
        own.first_output - step if own.steps else 0.0,
        own.last_output - step if own.steps else 0.0,
        _shrunk_mean(own.output, own.outputs, step, 0.0),
        own.longest_output - step if own.outputs else 0.0,
        own.first_payload - payload if calls else 0.0,
        own.last_payload - payload if calls else 0.0,
        _shrunk_mean(own.payload, calls, payload, 0.0),
        float(calls),
        own.last_failed,
        float(own.failed_in_row),
        own.failed / known_calls if known_calls else -1.0,
        float(len(own.tools)),
        own.last_tool_s,
        math.log(max(own.tool_s / calls, _LEAST_S)) if calls else 0.0,
    ]


def _of_siblings(own: Own, made: int) -> list[float]:
    """Sums over the others of the group: the group's sums minus its own."""
    task, group = own.task, own.group
    total, step, payload = task.total_level, task.step_level, task.payload_level
    ended_share, longer_share, longest, rest = -1.0, 1.0, 0.0, 0.0
    totals = group.totals
    ended = len(totals)
    if ended:
        ended_share = group.ended_steps / ended
        longest = math.log(totals[-1]) - total
        first = bisect_right(totals, made)
        longer = ended - first
        longer_share = longer / ended
        if longer:
            rest = math.log(sum(totals[first:]) / longer - made) - total
    seen = 1 if own.payloads else 0
    running = group.running - (1 if own.made else 0)
    known_calls = group.known_calls - own.known_calls
    return [
        float(ended),
        _shrunk_mean(group.total, ended, total, 1.0),
        longest,
        longer_share,
        rest,
        ended_share,
        float(running),
        _shrunk_mean(group.made - own.log_made, running, total, 0.0),
        (group.steps - own.steps) / running if running else -1.0,
        _shrunk_mean(group.output - own.output, group.outputs - own.outputs, step, 4.0),
        _shrunk_mean(group.payload - own.payload, group.payloads - own.payloads, payload, 4.0),
        _shrunk_mean(
            group.first_payload - (own.first_payload if seen else 0.0),
            group.first_payloads - seen,
            payload,
            2.0,
        ),
        (group.failed - own.failed) / known_calls if known_calls > 0 else -1.0,
    ]


def _shrunk_mean(total: float, count: int, level: float, weight: float) -> float:
    """A mean minus its level, shrunk to 0 by `weight` additional values at the level."""
    return (total - count * level) / (count + weight) if count > 0 else 0.0
