"""Finds the faults of a trace's text. Slow and thorough; readers use it only after a failure.

A line is decoded with the types of `schema.py`; only a line that fails is taken apart, field by
field, so that the message of a bad line has all of its faults.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from heddle_core.json_faults import NO_JSON
from heddle_trace.limits import (
    MAX_CLOCK_S,
    MAX_PARALLEL_TOOLS,
    MAX_REWARD,
    MAX_RL_STEP,
    MAX_STEP_TOKENS,
    MAX_STEPS,
    MAX_WAIT_S,
)
from heddle_trace.schema import StepRecord, TrajectoryRecord

RECORD_DECODER: Final = msgspec.json.Decoder(TrajectoryRecord)

EMPTY: Final = "holds no trajectories; write one JSON object a line"

_TOKENS = f"whole tokens from 0 to {MAX_STEP_TOKENS:,}, or null if the source lacks it"
_WAIT = f"seconds from 0 to {MAX_WAIT_S:,.0f} (30 days), or null if the source lacks it"
_CLOCK = f"seconds since the start of the trace, 0 to {MAX_CLOCK_S:,.0f} (a year), or null"
_NAME = "a text of 1 to 1,000 characters"
_FLAG = "true, false or null"
_EXPECTED: Final = {
    "trajectory_id": f"{_NAME}, unique in the file",
    "group_id": f"{_NAME}; the samples of one prompt share it",
    "workload": f"{_NAME}, such as coding, search or math",
    "steps": f"a list of 1 to {MAX_STEPS:,} steps; leave out a trajectory that never generated",
    "reward": f"a number from -{MAX_REWARD:g} to {MAX_REWARD:g}, or null",
    "step": f"a whole number from 0 to {MAX_RL_STEP:,}, the step of training, or null",
    "tool": f"{_NAME}, 'unspecified' when its name is not known, or null when nothing ran",
    "n_tools": f"a whole number from 0 to {MAX_PARALLEL_TOOLS:,}, or null",
    **dict.fromkeys(("prompt_tokens", "output_tokens", "tool_tokens"), _TOKENS),
    **dict.fromkeys(("input_tokens", "cached_tokens"), _TOKENS),
    **dict.fromkeys(("reward_s", "env_start_s", "tool_s", "llm_s"), _WAIT),
    **dict.fromkeys(("arrival_s", "t_s"), _CLOCK),
    **dict.fromkeys(("outcome", "truncated", "tool_ok"), _FLAG),
}
"""Of each field; others are names or null."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault. `line` counts from 1; 0 means the file as a whole. `field` may be empty."""

    line: int
    field: str
    message: str

    def __str__(self) -> str:
        parts = (f"line {self.line}" if self.line else "", self.field, self.message)
        return ": ".join(part for part in parts if part)


def problems_in(lines: Callable[[], Iterable[bytes]], limit: int) -> list[Problem]:
    """The first `limit` faults of a trace's uncompressed lines; none when it is sound.

    `lines` begins anew with each call; lines come without their end.
    """
    return list(islice(_problems(lines), limit))


def _problems(lines: Callable[[], Iterable[bytes]]) -> Iterator[Problem]:
    begin, blank = 0, True
    for number, line in enumerate(lines(), start=1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            message = f"not UTF-8 at byte {begin + error.start}; save the file in UTF-8"
            yield Problem(number, "", message)
            return
        begin += len(line) + 1
        blank = blank and (not line or line.isspace())
    seen: dict[str, int] = {}
    for number, line in enumerate(lines(), start=1):
        if line and not line.isspace():
            yield from line_problems(number, line, seen)
    if blank:
        yield Problem(0, "", EMPTY)


def line_problems(number: int, line: bytes, seen: dict[str, int]) -> Iterator[Problem]:
    """Faults of one line; `seen` has the line of each id so far, and gets this one's."""
    try:
        name: object = RECORD_DECODER.decode(line).trajectory_id
    except NO_JSON as error:
        parsed, faults = _taken_apart(line)
        for field, message in faults or [("", f"{error}")]:
            yield Problem(number, field, message)
        name = parsed.get("trajectory_id")
    if isinstance(name, str) and name:
        first = seen.setdefault(name, number)
        if first != number:
            message = f"{name!r} is taken by line {first} already; give every trajectory its own id"
            yield Problem(number, "trajectory_id", message)


def _taken_apart(line: bytes) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The readable part of a refused line, and the (field, message) of each fault."""
    if line.startswith(b"\xef\xbb\xbf"):
        return {}, [("", "starts with a byte-order mark; save the file as UTF-8 without one")]
    try:
        parsed = json.loads(line)
    except json.JSONDecodeError as error:
        message = f"malformed JSON at column {error.colno} ({error.msg})"
        return {}, [("", f"{message}; a line must hold one whole JSON object")]
    except (ValueError, RecursionError) as error:
        return {}, [("", f"not readable as JSON ({error}); a line must hold one small JSON object")]
    if not isinstance(parsed, dict):
        return {}, [("", f"found {_shown(parsed)}; a line must hold one JSON object")]
    faults = list(_field_faults(parsed, TrajectoryRecord, ""))
    steps = parsed.get("steps")
    for index, step in enumerate(steps if isinstance(steps, list) else []):
        if isinstance(step, dict):
            faults.extend(_field_faults(step, StepRecord, f"steps[{index}]."))
        else:
            faults.append((f"steps[{index}]", f"found {_shown(step)}; give an object"))
    return parsed, faults


def _field_faults(
    parsed: dict[str, Any], struct: type[msgspec.Struct], prefix: str
) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(struct):
        expected = _EXPECTED.get(field.name, f"{_NAME} or null")
        where = prefix + field.name
        if field.name not in parsed:
            if field.required:
                yield where, f"is missing; give {expected}"
            continue
        value = parsed[field.name]
        if field.name == "steps" and isinstance(value, list) and 0 < len(value) <= MAX_STEPS:
            continue
        if isinstance(value, float) and not math.isfinite(value):
            yield where, f"found {value}, which JSON does not have; give {expected}"
            continue
        try:
            msgspec.convert(value, field.type)
        except (msgspec.ValidationError, UnicodeEncodeError):  # half of a character is no text
            yield where, f"found {_shown(value)}; give {expected}"


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
