"""Program-level least attained service in levels: the least served goes first."""

from bisect import bisect_right

from heddle_core.policy import TrajectoryView


class Autellix:
    """The order of Autellix (arXiv 2502.13965) for programs with one call at a time.

    Attained service is the output tokens of a trajectory so far. Level `i` takes those whose
    attained service is below ``quantum_tokens * (1 + growth + ... + growth**i)``; the last level
    takes the rest. Lower levels go first; within a level, steps go by arrival. It preempts, as the
    original does: a program with little service takes the slot of one with much. Steps of one level
    never evict each other.

    Against starvation, a trajectory whose waiting exceeds `starvation_ratio` times its service goes
    to the first level. A key is computed when a step is queued. It counts the waiting of earlier
    steps only, so a starving step is promoted on its next return. Waiting is a trajectory's age
    minus its tool time and minus an estimate of its own generation, `token_s` for each output
    token. Interference from a large batch counts as waiting once tokens take longer than `token_s`.
    """

    preemptive = True

    def __init__(
        self,
        *,
        quantum_tokens: int = 512,
        growth: float = 2.0,
        levels: int = 8,
        starvation_ratio: float = 4.0,
        token_s: float = 0.02,
    ) -> None:
        """Set the levels; the defaults part 0 to 40,960 tokens into seven of them.

        Raises:
            ValueError: a quantum, growth, ratio or token time that gives no levels or no order.
        """
        if quantum_tokens < 1 or growth < 1.0 or levels < 1:
            raise ValueError("Autellix needs quantum_tokens >= 1, growth >= 1 and levels >= 1")
        if starvation_ratio <= 0.0 or token_s <= 0.0:
            raise ValueError("Autellix needs starvation_ratio > 0 and token_s > 0")
        bounds: list[float] = []
        for level in range(levels - 1):
            bounds.append((bounds[-1] if bounds else 0.0) + quantum_tokens * growth**level)
        self._bounds = tuple(bounds)
        self._starvation_ratio = starvation_ratio
        self._token_s = token_s

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the level, 0 for the first; the estimate is not used."""
        service_s = t.output_tokens * self._token_s
        waiting_s = t.runnable_s - t.arrived_s - t.tool_s - service_s
        if waiting_s > self._starvation_ratio * service_s:
            return 0.0
        return -float(bisect_right(self._bounds, t.output_tokens))
