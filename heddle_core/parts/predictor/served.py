"""Served: any predictor behind a service, so that its estimates take time."""

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import Predictor, TrajectoryView


class Served:
    """The same estimates as `inner`, asked for by `Predict` and answered by `Predicted`.

    The controller asks when a tool starts; the driver charges the latency of the service, which
    overlaps with the tool. Until the answer comes, the last estimate less what was made since
    holds; an answer that comes after the tool has returned is late and re-orders the queue then.
    """

    served = True

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Pass it on."""
        self.inner.observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Pass it on."""
        self.inner.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        """Pass it on."""
        self.inner.observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return what `inner` estimates."""
        return self.inner.remaining_tokens(t)
