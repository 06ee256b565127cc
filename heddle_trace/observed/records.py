"""Traces and measured steps, each made of the other."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from heddle_trace.complete import USER
from heddle_trace.importers.generations import LoggedGeneration, derive_added, steps_of
from heddle_trace.importers.notes import Notes
from heddle_trace.observed.columns import ObservedSteps
from heddle_trace.observed.schema import ObservedRequest
from heddle_trace.schema import TrajectoryRecord


def requests_of(record: TrajectoryRecord) -> Iterator[ObservedRequest]:
    """The requests of a recorded trajectory; what follows a person is a trajectory of its own."""
    part, step, name = 0, 0, record.trajectory_id
    arrival_s = record.arrival_s or 0.0
    for number, each in enumerate(record.steps):
        first, last = number == 0, number == len(record.steps) - 1
        begun_s = None if each.t_s is None else arrival_s + each.t_s
        if first:
            begun_s = (arrival_s if begun_s is None else begun_s) - (record.env_start_s or 0.0)
        person = each.tool == USER
        yield ObservedRequest(
            trajectory_id=name,
            group_id=record.group_id,
            step=step,
            rl_step=record.step,
            start_s=begun_s,
            env_start_s=record.env_start_s if first else None,
            llm_s=each.llm_s,
            tool=None if person else each.tool,
            tool_s=None if person else each.tool_s,
            tool_ok=None if person else each.tool_ok,
            reward_s=record.reward_s if last else None,
            input_tokens=record.prompt_tokens if first else each.input_tokens,
            cached_tokens=each.cached_tokens,
            output_tokens=each.output_tokens,
        )
        step += 1
        if person:
            part, step = part + 1, 0
            name = f"{record.trajectory_id}/{part}"


def records_of(seen: ObservedSteps, workload: str) -> list[TrajectoryRecord]:
    """A trace of the trajectories whose output tokens were recorded, in order of their starts."""
    plain = {name: seen.column(name).plain() for name in _FIELDS}
    rows: dict[str, list[int]] = defaultdict(list)
    for at, name in enumerate(plain["trajectory_id"]):
        rows[name].append(at)
    return [
        TrajectoryRecord(
            trajectory_id=name,
            group_id=plain["group_id"][own[0]] or name,
            workload=workload,
            prompt_tokens=plain["input_tokens"][own[0]],
            steps=steps_of(_generations(plain, own), Notes()),
        )
        for name, own in rows.items()
        if any(plain["output_tokens"][at] for at in own)
    ]


_FIELDS = (
    *("trajectory_id", "group_id", "step", "input_tokens", "cached_tokens", "output_tokens"),
    *("tool", "tool_s", "tool_ok"),
)


def _generations(plain: dict[str, list[Any]], own: Sequence[int]) -> list[LoggedGeneration]:
    """A generation a step: requests of a step that was preempted are one."""
    found: list[LoggedGeneration] = []
    step: int | None = None
    for at in own:
        _, _, number, given, cached, made, tool, tool_s, ok = (plain[name][at] for name in _FIELDS)
        if number != step or not found:
            found.append(LoggedGeneration(output=made, input=given, cached=cached))
        elif made is not None:
            found[-1].output = (found[-1].output or 0) + made
        step = number
        if tool is not None or tool_s is not None:
            found[-1].tools, found[-1].wait_s = (str(tool or ""),), tool_s
            found[-1].ok = ok
    derive_added(found)
    return found
