"""Admit with headroom: room for what the step will make, and KV kept through tool calls.

An engine filled to the brim with prompts runs out of KV as they grow, takes the KV of the youngest
away and prefills it again; a trajectory that returns from a short tool finds its KV given to
another. On 6,400 coding trajectories on 64 H100 (Qwen3-14B) that was a fifth of the makespan.
"""

from heddle_core.policy import PolicyContext, TrajectoryView

STEPS_AHEAD = 1.5
"""Headroom in mean steps: step lengths are skewed, and one mean step is often too small."""

UNKNOWN_STEP_TOKENS = 512.0
"""Mean output of a step when no history tells."""


class ReserveOutput:
    """Reserve for the step's output, and keep the KV of trajectories that are in a tool."""

    keeps_kv = True

    def __init__(self, context: PolicyContext) -> None:
        history = context.history
        self._step_tokens = history.step_output_tokens if history else UNKNOWN_STEP_TOKENS

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        """Return some mean steps of this trajectory or of the workload, whichever is more."""
        own = t.output_tokens / t.step if t.step else 0.0
        ahead = STEPS_AHEAD * max(own, self._step_tokens)
        # An estimate of nothing left is an estimate: the step that runs will still make something.
        return int(min(max(remaining_tokens, self._step_tokens), ahead))
