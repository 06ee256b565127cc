"""Admit what fits now, as vLLM does: the prompt's KV, nothing for what is still to come."""

from heddle_core.policy import TrajectoryView


class PromptOnly:
    """The prompt must fit beside what runs; KV in a tool's gap is given away."""

    keeps_kv = False

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        """Return 0."""
        return 0
