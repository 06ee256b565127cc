"""KV that Progress-TTL reserves on an engine for what active trajectories will grow."""

import math
from collections import deque
from dataclasses import dataclass, field

from heddle_core.estimate.cost import StepCost
from heddle_core.parts.placement.program_scheduling import ENOUGH


@dataclass(slots=True)
class GrowthReserve:
    """From the last `ENOUGH` steps of an engine; nothing is reserved before."""

    steps: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=ENOUGH))
    """Tokens that the prompt grew, 0 where unknown; rounds since a time-to-live; decode seconds."""
    growth: float = 0.0
    """Tokens in a round."""
    rounds: float = 0.0
    """For one trajectory, from its admission."""
    left: float = 0.0
    """Of all active ones."""
    decode_s: float = 0.0
    """Of a step."""

    def review(self, max_rounds: int) -> None:
        """Take the means of the last steps."""
        n = len(self.steps)
        if n < ENOUGH:
            return
        grown = [tokens for tokens, _, _ in self.steps if tokens]
        self.growth = sum(grown) / max(len(grown), 1)
        mean_rounds = sum([rounds for _, rounds, _ in self.steps]) / n
        self.rounds = float(min(max(math.ceil(2.0 * mean_rounds), 1), max_rounds))
        self.decode_s = sum([decode_s for _, _, decode_s in self.steps]) / n

    def prefills_more(self, free: float, free_with: float) -> float:
        """By which share active ones pause more often when `free` tokens become `free_with`."""
        before = min(self.left, free / self.growth)
        after = min(self.left, max(free_with, 0.0) / self.growth)
        if after <= 0.0:
            return math.inf if before > 0.0 else 0.0
        return (before - after) / after


def speedup(cost: StepCost, batch: int, batch_tokens: int, context_tokens: int) -> float:
    """By which share a batch of steps decodes more tokens a second with one step more in it."""
    if not batch:
        return 0.0
    step_s = cost.t0_s + cost.t1_s * batch + cost.t2_s * batch_tokens
    larger_s = step_s + cost.t1_s + cost.t2_s * context_tokens
    return max((batch + 1) / batch * step_s / larger_s - 1.0, 0.0)
