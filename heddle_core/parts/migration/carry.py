"""KV goes along when placement sends a step elsewhere, where that is quicker than a prefill."""

from heddle_core.ids import EngineId
from heddle_core.policy import EngineView, PolicyContext, TrajectoryView, View


class Carry:
    """Homes never move while a tool runs; when it has returned, KV follows the placement.

    Libra's choice between migration and recomputation (arXiv 2606.03077): the estimated transfer of
    the context against its estimated prefill on the new engine.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._cost = context.cost

    def target(self, t: TrajectoryView, remaining_tokens: float, view: View) -> EngineId | None:
        """Return None: stay."""
        return None

    def carries_kv(self, t: TrajectoryView, target: EngineView, view: View) -> bool:
        """Whether the transfer of the context takes less time than its prefill on `target`."""
        tokens = t.context_tokens
        restore_s = self._cost.by_shape[target.shape].restore_s
        return self._cost.transfer_s(tokens) < restore_s * tokens

    def finished(self, t: TrajectoryView) -> None:
        """Forget nothing: nothing was kept."""
