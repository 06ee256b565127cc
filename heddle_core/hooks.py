"""What a part may have beside its protocol: methods that the controller calls where they are there.

Most parts have none of them. The controller looks once, when it is made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol, TypeAlias

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, TrajectoryId
from heddle_core.policy import EngineView, Policy, TrajectoryView, View


class Observer(Protocol):
    """Any part that learns, as a predictor does; it needs only those methods that it uses.

    Each is called once for an event, for the parts in the order of `Policy`.
    """

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> object:
        """Learn from a finished generation."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> object:
        """Learn from a tool's result, before the next step is placed."""

    def observe_finish(self, t: TrajectoryView) -> object:
        """Learn from a trajectory's end, and forget it."""


class CarriesKv(Protocol):
    """A migration part that may move KV along when placement changes a home."""

    def carries_kv(self, t: TrajectoryView, target: EngineView, view: View) -> bool:
        """Whether the KV of `t` moves from its home to `target`, where its next step was placed.

        Called when its tool has returned. The step waits for the move. If not, `target` prefills.
        """
        ...


class KeepsKvFor(Protocol):
    """An admission part whose `keeps_kv` is true, for a limited time."""

    def keep_kv_s(self, t: TrajectoryView, tool: str, view: View) -> float:
        """Seconds for which the KV of `t` counts as in use while `tool` runs; 0: not at all.

        Called when the tool starts. Infinity: until it returns.
        """
        ...


class Chunks(Protocol):
    """An admission part that ends every dispatch after so many tokens."""

    @property
    def chunk_tokens(self) -> int:
        """Output tokens of a dispatch at most. What is left of the step is placed anew."""
        ...


class Backlog(Protocol):
    """A placement whose `place` may return None: the step then waits in a backlog of all engines.

    While no step is at any engine, it must let one go there, or have a `review_s`.
    """

    @property
    def review_s(self) -> float:
        """Seconds between calls of `release` at least, for rules that depend on time; 0: none."""
        ...

    def release(
        self, backlog: Mapping[TrajectoryId, TrajectoryView], view: View
    ) -> Sequence[tuple[TrajectoryId, EngineId]]:
        """Choose steps of the backlog, which is in order of arrival, that go to an engine now.

        Called when a step or a trajectory has ended and the backlog is not empty, and every
        `review_s` in any case; again, until it chooses none.
        """
        ...


FURTHER: Final[Mapping[str, tuple[type, ...]]] = {
    "placement": (Backlog,),
    "migration": (CarriesKv,),
    "admission": (KeepsKvFor, Chunks),
}
"""Protocols of further methods by the kind of part; a part has all methods of one, or none."""

Observe: TypeAlias = Callable[..., None]
Release: TypeAlias = Callable[
    [Mapping[TrajectoryId, TrajectoryView], View], Sequence[tuple[TrajectoryId, EngineId]]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The optional methods of a policy's parts."""

    observe_step: tuple[Observe, ...]
    observe_tool: tuple[Observe, ...]
    observe_finish: tuple[Observe, ...]
    carries_kv: Callable[[TrajectoryView, EngineView, View], bool] | None
    keep_kv_s: Callable[[TrajectoryView, str, View], float] | None
    chunk_tokens: int | None
    release: Release | None
    review_s: float

    @classmethod
    def of(cls, policy: Policy) -> "Hooks":
        """Look for them in the parts of a policy."""
        parts = [getattr(policy, kind.name) for kind in fields(policy)]
        return cls(
            observe_step=_all(parts, "observe_step"),
            observe_tool=_all(parts, "observe_tool"),
            observe_finish=_all(parts, "observe_finish"),
            carries_kv=getattr(policy.migration, "carries_kv", None),
            keep_kv_s=getattr(policy.admission, "keep_kv_s", None),
            chunk_tokens=getattr(policy.admission, "chunk_tokens", None),
            release=getattr(policy.placement, "release", None),
            review_s=getattr(policy.placement, "review_s", 0.0),
        )


def _all(parts: Sequence[Any], name: str) -> tuple[Observe, ...]:
    return tuple(getattr(part, name) for part in parts if hasattr(part, name))
