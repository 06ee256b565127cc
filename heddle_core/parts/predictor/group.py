"""Seer's rule: a trajectory is as long as the longest of its group that has ended."""

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import GroupId
from heddle_core.policy import TrajectoryView


class GroupPredictor:
    """Estimates a total by the longest finished sibling (Seer, arXiv 2511.14617).

    Until a sibling has ended, the total is `unknown_tokens`, usually the output limit: an unknown
    group counts as long. A trajectory that has made more than its longest finished sibling gets
    `floor_tokens`, since the rule gives no estimate there.
    """

    served = False

    def __init__(self, *, unknown_tokens: float = 40_960.0, floor_tokens: float = 1.0) -> None:
        self._unknown_tokens = unknown_tokens
        self._floor_tokens = floor_tokens
        self._longest_tokens: dict[GroupId, int] = {}

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it: only ends count."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Ignore it."""

    def observe_finish(self, t: TrajectoryView) -> None:
        """Keep the group's longest total."""
        longest = self._longest_tokens.get(t.group, 0)
        self._longest_tokens[t.group] = max(longest, t.output_tokens)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the estimated total minus the output so far, at least the floor."""
        total = self._longest_tokens.get(t.group, self._unknown_tokens)
        return max(float(total - t.output_tokens), self._floor_tokens)
