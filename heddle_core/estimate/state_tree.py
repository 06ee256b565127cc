"""Remaining lengths after the same tool results: the prefix tree of Libra (arXiv 2606.03077)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from heddle_core.events import ToolReturned
from heddle_core.ids import GroupId, TrajectoryId

State: TypeAlias = tuple[str, int, bool]
"""A tool result: the tool, the class of its payload, and whether the call failed."""

RECENT: Final = 200
"""Remaining lengths of which a node has the 90th percentile."""


@dataclass(slots=True)
class StateNode:
    """Remaining lengths of the trajectories that passed a sequence of states."""

    visits: int = 0
    mean: float = 0.0
    recent: list[int] = field(default_factory=list)
    """The last `RECENT` of them, oldest first."""
    after: dict[State, "StateNode"] = field(default_factory=dict)

    def add(self, remaining: int) -> None:
        """Take one more remaining length, in tokens."""
        self.visits += 1
        self.mean += (remaining - self.mean) / self.visits
        self.recent.append(remaining)
        if len(self.recent) > RECENT:
            del self.recent[0]

    def p90(self) -> float:
        """The 90th percentile of `recent`, interpolated linearly between its neighbours."""
        ordered = sorted(self.recent)
        at = 0.9 * (len(ordered) - 1)
        below = int(at)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (at - below) * (ordered[above] - ordered[below])


@dataclass(slots=True)
class Path:
    """States of one trajectory, and its output at each."""

    states: list[State] = field(default_factory=list)
    made: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EndedPath:
    """States of a trajectory that has ended, and what it had left at the start and at each."""

    group: GroupId
    states: Sequence[State]
    remaining: Sequence[int]


class StateTree:
    """A tree for each prompt and one for all, over the sequences of their tool results.

    A payload is small up to `medium_tokens`, medium up to `large_tokens`, else large.
    """

    def __init__(self, *, medium_tokens: int = 500, large_tokens: int = 5_000) -> None:
        self._bounds = (medium_tokens, large_tokens)
        self._paths: dict[TrajectoryId, Path] = {}
        self._all = StateNode()
        self._groups: dict[GroupId, StateNode] = {}

    def advance(self, event: ToolReturned, made: int) -> None:
        """Advance the path of a trajectory, which has made so many tokens, by one state."""
        path = self._paths.setdefault(event.trajectory, Path())
        size = sum(event.observation_tokens > bound for bound in self._bounds)
        path.states.append((event.tool, size, event.ok is False))
        path.made.append(made)

    def end(self, trajectory: TrajectoryId, group: GroupId, total: int) -> EndedPath | None:
        """Forget a path and insert it; None for a trajectory without output or tool results."""
        path = self._paths.pop(trajectory, None)
        if path is None or total == 0:
            return None
        ended = EndedPath(group, path.states, [total, *(total - made for made in path.made)])
        self.insert(ended)
        return ended

    def insert(self, ended: EndedPath) -> None:
        """Add the remaining lengths of an ended trajectory at every state that it passed."""
        for node in (self._all, self._groups.setdefault(ended.group, StateNode())):
            node.add(ended.remaining[0])
            for state, remaining in zip(ended.states, ended.remaining[1:], strict=True):
                node = node.after.setdefault(state, StateNode())
                node.add(remaining)

    def clear(self) -> None:
        """Forget all that was inserted, but not the paths under way."""
        self._all = StateNode()
        self._groups.clear()

    def deepest(self, trajectory: TrajectoryId, group: GroupId) -> tuple[StateNode, int]:
        """Return the node of the longest known prefix of a path, and the output there.

        It is one of the prompt's tree, or of the common one for a prompt without an ended
        trajectory. The node has no visits before any trajectory has ended.
        """
        node, at = self._groups.get(group, self._all), 0
        path = self._paths.get(trajectory)
        if path is not None:
            for state, made in zip(path.states, path.made, strict=True):
                further = node.after.get(state)
                if further is None:
                    break
                node, at = further, made
        return node, at
