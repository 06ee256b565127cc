"""One trajectory's state, and the table of the phases that it goes through.

`Ledger.move` is the only writer of a phase and refuses what `TRANSITIONS` does not list. The
documentation draws its diagram from this table.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId

Phase: TypeAlias = Literal[
    "held",
    "queued",
    "pulling",
    "running",
    "preempting",
    "tool",
    "predicting",
    "migrating",
    "cancelling",
    "finished",
]

TRANSITIONS: Final[Mapping[Phase, Mapping[Phase, str]]] = {
    "held": {
        "queued": "placed on an engine",
        "cancelling": "Cancel: no engine can hold its context",
        "finished": "TrajectoryFinished",
    },
    "queued": {
        "running": "Dispatch",
        "pulling": "Migrate: its KV is on another engine",
        "held": "its engine closed or failed",
        "finished": "TrajectoryFinished",
    },
    "pulling": {
        "running": "MigrationFinished, and Dispatch",
        "migrating": "its engine closed or failed",
        "finished": "TrajectoryFinished",
    },
    "running": {
        "tool": "StepFinished",
        "preempting": "Preempt",
        "queued": "StepPreempted, or its prefill engine failed",
        "held": "EngineFailed, or StepPreempted without an engine",
        "finished": "TrajectoryFinished",
    },
    "preempting": {
        "tool": "StepFinished",
        "queued": "StepPreempted, or its prefill engine failed",
        "held": "EngineFailed, or StepPreempted without an engine",
        "finished": "TrajectoryFinished",
    },
    "tool": {
        "queued": "ToolReturned",
        "predicting": "ToolReturned before Predicted",
        "migrating": "ToolReturned before MigrationFinished",
        "held": "ToolReturned without an engine, or into the backlog",
        "finished": "TrajectoryFinished",
    },
    "predicting": {
        "queued": "Predicted",
        "migrating": "Predicted, and Migrate",
        "held": "Predicted without an engine",
        "finished": "TrajectoryFinished",
    },
    "migrating": {
        "queued": "MigrationFinished",
        "held": "MigrationFinished without an engine",
        "finished": "TrajectoryFinished",
    },
    "cancelling": {
        "finished": "TrajectoryFinished",
    },
    "finished": {},
}
"""From each phase, the phases that may follow and what leads to them."""


@dataclass(slots=True, eq=False, kw_only=True)
class Trajectory:
    """One trajectory's state; policies see it as a `TrajectoryView`."""

    id: TrajectoryId
    rollout: RolloutId
    group: GroupId
    task: str
    weights_version: int
    """Of its rollout."""
    prompt_tokens: int
    arrived_s: float
    context_tokens: int
    runnable_s: float
    phase: Phase = "held"
    step: int = 0
    home: EngineId | None = None
    output_tokens: int = 0
    tool_s: float = 0.0
    tool_started_s: float = 0.0
    remaining_tokens: float = 0.0
    """The last estimate minus the tokens generated since; valid until a newer one arrives."""
    priority: float = 0.0
    """The key of its latest place in a queue."""
    ticket: int = -1
    """Number of its valid entry in a queue; entries with another number are stale."""
    dispatched_s: float = 0.0
    migrating_to: EngineId | None = None
    predictions_due: int = 0
    """Predict commands that have no answer yet."""
    estimated_kv_tokens: int = 0
    """Its share of its engine's KV while it runs, and while parked in a tool."""
    reserved_tokens: int = 0
    """Expected output of its next step, for which KV is reserved."""
    parked: bool = False
    """In a tool, its KV kept at home."""
    keep_until_s: float = math.inf
    """When its KV is no longer kept at home while its tool runs."""
    kv_kept: bool = False
    """Whether its KV was kept at home until its latest tool returned."""
    tier: int = 0
    """Above its place in any order: steps of a higher one go first."""
    arrival: int = 0
    """Arrivals before its own, over all rollouts."""
    home_kv_tokens: int = 0
    """Tokens whose KV its home had when it last knew; some may have been evicted since."""
    prefills_on: EngineId | None = None
    """The prefill engine that its step waits for or has a slot of."""
    prefill_tokens: int = 0
    """Tokens to compute there."""
    prefilled_on: EngineId | None = None
    """The prefill engine that keeps the KV of its step, until its home has it."""
    prefilled_kv_tokens: int = 0
    """Tokens of that KV."""

    @property
    def engine(self) -> EngineId | None:
        """The engine that its step waits for or has a slot of, if there is one."""
        return self.prefills_on if self.prefills_on is not None else self.home
