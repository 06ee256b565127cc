"""Libra's causal prefix tree: remaining lengths after the same sequence of tool results."""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import GroupId, TrajectoryId
from heddle_core.policy import TrajectoryView

State: TypeAlias = tuple[str, int, bool]
"""Tool, class of its payload, and whether the call failed."""

_LEAST_TOKENS: Final = 1.0  # a trajectory that has not ended makes one more


@dataclass(slots=True)
class _Node:
    visits: int = 0
    mean: float = 0.0
    after: dict[State, "_Node"] = field(default_factory=dict)

    def add(self, remaining: int) -> None:
        self.visits += 1
        self.mean += (remaining - self.mean) / self.visits


@dataclass(slots=True)
class _Path:
    states: list[State] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    """Output at each state."""


class PrefixTreePredictor:
    """Estimates by trajectories with the same tool results (Libra, arXiv 2606.03077).

    A tool result is a state: the tool, its payload's class (up to `medium_tokens`, up to
    `large_tokens`, or more) and whether it failed. A tree for each prompt and one for all prompts
    hold, at every sequence of states, the remaining lengths of the trajectories that passed it. The
    estimate is the mean at the longest known prefix of the trajectory's own sequence, minus the
    output since. It comes from the prompt's tree or, for a prompt without an ended trajectory, from
    the common one; before any has ended it is `unknown_tokens`. This is Libra's estimate alone: its
    buckets move trajectories when mean and 90th percentile agree.
    """

    served = False

    def __init__(
        self, *, medium_tokens: int = 500, large_tokens: int = 5_000, unknown_tokens: float = 0.0
    ) -> None:
        self._bounds = (medium_tokens, large_tokens)
        self._unknown_tokens = unknown_tokens
        self._all = _Node()
        self._groups: dict[GroupId, _Node] = {}
        self._paths: dict[TrajectoryId, _Path] = {}

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it: states are tool results."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Advance by one state."""
        path = self._paths.setdefault(t.id, _Path())
        size = sum(event.observation_tokens > bound for bound in self._bounds)
        path.states.append((event.tool, size, event.ok is False))
        path.made.append(t.output_tokens)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Add its remaining length at every state that it passed."""
        path = self._paths.pop(t.id, _Path())
        if t.output_tokens == 0:
            return
        for root in (self._all, self._groups.setdefault(t.group, _Node())):
            node = root
            node.add(t.output_tokens)
            for state, made in zip(path.states, path.made, strict=True):
                node = node.after.setdefault(state, _Node())
                node.add(t.output_tokens - made)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean at the deepest known state, minus the output since."""
        node, made = self._deepest(t)
        mean = node.mean if node.visits else self._unknown_tokens
        return max(mean - (t.output_tokens - made), _LEAST_TOKENS)

    def _deepest(self, t: TrajectoryView) -> tuple[_Node, int]:
        """Return the deepest node of the sequence of `t`, and the output of `t` at that state."""
        node, at = self._groups.get(t.group, self._all), 0
        path = self._paths.get(t.id)
        if path is not None:
            for state, made in zip(path.states, path.made, strict=True):
                further = node.after.get(state)
                if further is None:
                    break
                node, at = further, made
        return node, at
