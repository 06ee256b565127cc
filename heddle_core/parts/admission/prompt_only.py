"""Admit what fits now, as vLLM does: the prompt's KV, nothing for the output."""

from mypy_extensions import mypyc_attr

from heddle_core.policy import TrajectoryView


@mypyc_attr(allow_interpreted_subclasses=True)
class PromptOnly:
    """The prompt must fit beside the running steps; KV of trajectories in a tool may be evicted."""

    keeps_kv = False

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        return 0
