"""Rows that prime-rl writes: traces of rollouts, episodes of them, and metrics of a step.

Source: as in `prime_rl`.
"""

from typing import Annotated, Any, TypeAlias

import msgspec

from heddle_trace.limits import RlStep, Tokens, WaitSeconds

Unix: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class Span(msgspec.Struct):
    """`end` is 0 where it never ended."""

    start: Unix = 0.0
    end: Unix = 0.0


class Usage(msgspec.Struct):
    """Tokens of a call; `prompt_tokens` are those that no cache had."""

    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_input_tokens: Tokens | None = None


class Call(msgspec.Struct):
    """A request to the model."""

    time: Span
    usage: Usage | None = None


class Timing(msgspec.Struct):
    """When a rollout began, and its scoring."""

    start: Unix = 0.0
    scoring: Span = msgspec.field(default_factory=Span)


class Trace(msgspec.Struct):
    """A rollout of an agent."""

    id: str = ""
    calls: list[Call] = []
    timing: Timing = msgspec.field(default_factory=Timing)
    kind: str = "train"
    group_id: str | int | None = None


class PrimeRlRow(Trace):
    """A trace, an episode of several, or metrics of a step."""

    traces: list[Trace] | None = None
    group: dict[str, Any] = {}
    run: dict[str, Any] = {}
    step: RlStep | None = None
    time: Unix = 0.0
    step_s: WaitSeconds | None = msgspec.field(default=None, name="time/step")
    training_s: WaitSeconds | None = msgspec.field(default=None, name="time/forward_backward")
    update_s: WaitSeconds = msgspec.field(default=0.0, name="time/broadcast_weights")
    saving_s: WaitSeconds = msgspec.field(default=0.0, name="time/save_ckpt")
    waiting_s: WaitSeconds = msgspec.field(default=0.0, name="time/wait_for_batch")
