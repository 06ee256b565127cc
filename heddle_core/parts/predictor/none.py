"""No prediction: for policies that do not look ahead."""

from mypy_extensions import mypyc_attr

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import TrajectoryView


@mypyc_attr(allow_interpreted_subclasses=True)
class NoPrediction:
    """Learns nothing: every trajectory has 0 tokens left."""

    served = False

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Ignore it."""

    def observe_finish(self, t: TrajectoryView) -> None:
        """Ignore it."""

    def remaining_tokens(self, t: TrajectoryView) -> float:
        return 0.0
