"""Measured steps as data, `heddle.observed/1`: JSON lines, of which the first is the header.

Times are seconds on the clock of the source. A part that is not recorded is absent, not zero.
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from heddle_trace.limits import Name, RlStep, Tokens, WaitSeconds

SCHEMA: Final = "heddle.observed/1"

Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Clock: TypeAlias = Literal["shared", "trajectory"]
"""``shared``: one clock, on which trajectories overlap. ``trajectory``: each has its own zero, or
is measured by itself."""
AverageName: TypeAlias = Literal["env_start", "llm", "tool", "rollout", "tail"]
"""Of rollouts whose trajectories were not recorded one by one: averages over them; ``rollout``:
no part is known."""
PhaseName: TypeAlias = Literal["step", "training", "update", "reward", "other"] | AverageName
"""``step``: a whole step of training; ``update``: weights to engines; ``other``: validation,
checkpoints and the like."""

TIMES: Final = (
    *("env_start_s", "queue_s", "prefill_s", "decode_s"),
    *("llm_s", "lost_s", "tool_s", "reward_s"),
)
"""Parts of a request, in the order in which they pass."""


class ObservedHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="observed"):
    """What a file of measured steps was made from."""

    schema: Literal["heddle.observed/1"]
    source: Name
    clock: Clock


class ObservedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="request"):
    """One request of a trajectory to an engine, and what passed until the next one.

    A step that was preempted has a request for each time that it ran; `step` counts from 0. Parts
    pass in the order of `TIMES` from `start_s` on; what `end_s` leaves over is unaccounted.
    """

    trajectory_id: Name
    step: RlStep
    group_id: Name | None = None
    rl_step: RlStep | None = None
    start_s: Moment | None = None
    """When it could have run; None: at the end of the request before."""
    end_s: Moment | None = None
    """None: after the last of its parts."""
    env_start_s: WaitSeconds | None = None
    queue_s: WaitSeconds | None = None
    """Waiting for an engine, and in its queue."""
    prefill_s: WaitSeconds | None = None
    decode_s: WaitSeconds | None = None
    llm_s: WaitSeconds | None = None
    """Generation, where queue, prefill and decode were not recorded apart."""
    lost_s: WaitSeconds | None = None
    """On an engine that failed."""
    tool_s: WaitSeconds | None = None
    reward_s: WaitSeconds | None = None
    tool: Name | None = None
    tool_ok: bool | None = None
    engine: Name | None = None
    input_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class Phase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="phase"):
    """A time of the trainer, or of a rollout as a whole."""

    phase: PhaseName
    start_s: Moment
    end_s: Moment
    rl_step: RlStep | None = None


class ObservedEngine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="engine"):
    """An engine at a moment. Seconds are of requests that ended since its last sample."""

    engine: Name
    time_s: Moment
    running: Annotated[float, msgspec.Meta(ge=0)]
    waiting: Annotated[float, msgspec.Meta(ge=0)]
    queue_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    prefill_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    decode_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


Observation: TypeAlias = ObservedRequest | Phase | ObservedEngine
