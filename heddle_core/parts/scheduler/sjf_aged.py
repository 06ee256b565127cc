"""Shortest job first, with a bound on how long a long one waits for shorter ones."""

from typing import Final

from heddle_core.policy import TrajectoryView

TOKEN_S: Final = 0.04
"""Seconds of age that count as much as one remaining token: two decode iterations of an engine
that takes 20 ms for each."""


class ShortestAged:
    """The least goes first of arrival time plus `token_s` for each remaining token.

    Between two that arrived together it is `ShortestFirst`. But a trajectory passes only those that
    arrived before it by less than `token_s` for each token by which it is shorter, so a long one is
    not passed for ever. It goes up as it makes progress. It never evicts.
    """

    preemptive = False

    def __init__(self, *, token_s: float = TOKEN_S) -> None:
        """Set the weight of length against age.

        Raises:
            ValueError: it is below 0.
        """
        if token_s < 0.0:
            raise ValueError(f"token_s is {token_s}; give 0 or more seconds")
        self._token_s = token_s

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        """Return minus the time, in seconds of the run's clock."""
        return -(t.arrived_s + self._token_s * remaining_tokens)
