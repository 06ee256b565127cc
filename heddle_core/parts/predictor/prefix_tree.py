"""Libra's causal prefix tree: remaining lengths after the same sequence of tool results."""

from typing import Final

from heddle_core.estimate.state_tree import StateTree
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import TrajectoryView

_LEAST_TOKENS: Final = 1.0  # a trajectory that has not ended makes one more


class PrefixTreePredictor:
    """Estimates by trajectories with the same tool results (Libra, arXiv 2606.03077).

    The estimate is the mean of `StateTree` at the longest known prefix of the trajectory's own
    sequence of tool results, minus the output since; before any trajectory has ended it is
    `unknown_tokens`. This is Libra's estimate alone: its buckets (placement `buckets`) move
    trajectories when mean and 90th percentile agree.
    """

    served = False

    def __init__(
        self, *, medium_tokens: int = 500, large_tokens: int = 5_000, unknown_tokens: float = 0.0
    ) -> None:
        self._tree = StateTree(medium_tokens=medium_tokens, large_tokens=large_tokens)
        self._unknown_tokens = unknown_tokens

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it: states are tool results."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Advance by one state."""
        self._tree.advance(event, t.output_tokens)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Add its remaining length at every state that it passed."""
        self._tree.end(t.id, t.group, t.output_tokens)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean at the deepest known state, minus the output since."""
        node, made = self._tree.deepest(t.id, t.group)
        mean = node.mean if node.visits else self._unknown_tokens
        return max(mean - (t.output_tokens - made), _LEAST_TOKENS)
