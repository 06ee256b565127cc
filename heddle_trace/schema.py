"""Types of traces: records as read from a file, and complete scripts to replay.

A *record* holds what a source recorded, with None for the rest. A *script* has no
gaps: `heddle_trace.complete` makes it from a record by stated rules, and drivers replay it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from heddle_trace.limits import (
    MAX_STEPS,
    ClockSeconds,
    Name,
    Reward,
    RlStep,
    Tokens,
    ToolCount,
    WaitSeconds,
)


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One generation and the tool call it ended in. None: the source does not record it."""

    output_tokens: Tokens | None
    tool: Name | None = None
    tool_s: WaitSeconds | None = None
    tool_tokens: Tokens | None = None
    tool_ok: bool | None = None
    llm_s: WaitSeconds | None = None
    t_s: ClockSeconds | None = None
    input_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    n_tools: ToolCount | None = None


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of one prompt; `steps` in order. `step` is the RL step it was recorded in."""

    trajectory_id: Name
    group_id: Name
    workload: Name
    prompt_tokens: Tokens | None
    arrival_s: ClockSeconds | None = None
    steps: Annotated[tuple[StepRecord, ...], msgspec.Meta(min_length=1, max_length=MAX_STEPS)]
    source: str | None = None
    model: str | None = None
    agent: str | None = None
    outcome: bool | None = None
    parent_id: str | None = None
    truncated: bool | None = None
    reward: Reward | None = None
    reward_s: WaitSeconds | None = None
    env_start_s: WaitSeconds | None = None
    step: RlStep | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """A named collection of records. `sha256` is over the uncompressed bytes it was read from."""

    name: str
    records: Sequence[TrajectoryRecord]
    """Made on demand from columns (`heddle_trace.table.Records`) when it was read from a file."""
    sha256: str


@dataclass(frozen=True, slots=True)
class StepScript:
    """One step to replay: sizes in tokens, `tool_s` in seconds.

    `prompt_tokens` is the whole context of this generation; its first `shared_tokens` repeat the
    context as it stood at the end of the step before (less than all of it after a compaction).
    `tool` is None when the environment answered at once or the trajectory ended here.
    """

    prompt_tokens: int
    shared_tokens: int
    output_tokens: int
    tool: str | None
    tool_s: float
    tool_ok: bool | None
    tool_tokens: int


@dataclass(frozen=True, slots=True)
class TrajectoryScript:
    """One trajectory to replay; `truncated` when its source cut it off.

    The last four are for RL loops, None where the source does not record them; `rl_step` is the
    step of training that it was recorded in.
    """

    id: str
    group: str
    task: str
    arrival_s: float
    steps: Sequence[StepScript]
    truncated: bool
    reward: float | None = None
    reward_s: float | None = None
    env_start_s: float | None = None
    rl_step: int | None = None
