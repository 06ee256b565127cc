"""llm-d's endpoint picker: the engine with the most of three weighted scores."""

from typing import Final

from heddle_core.ids import EngineId
from heddle_core.parts.placement.load_and_pin import OneByOne
from heddle_core.parts.placement.sent_prefixes import SentPrefixes
from heddle_core.policy import TrajectoryView, View

LONGEST_MATCH: Final = 131_072
"""Tokens of a prompt that are looked up at most."""


class WeightedScores(OneByOne):
    """The default profile of llm-d's endpoint picker, with its weights 2 / 2 / 3.

    Each engine has three scores from 0 to 1, and the largest weighted sum gets the step:

    - `queue`: its waiting steps, 1 for the fewest and 0 for the most; 1 for all if equal;
    - `kv`: the share of its KV that was free at its last report;
    - `prefix`: the share of the prompt's blocks that it was sent before (`SentPrefixes`).

    Equal sums take turns. Not modelled: the age of the count of waiting steps (50 ms), and that the
    picker forgets prefixes beyond the size of an engine's KV.
    """

    def __init__(
        self, *, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0, block_tokens: int = 16
    ) -> None:
        """Set the weights.

        Raises:
            ValueError: a weight below 0, or blocks of no token.
        """
        if min(queue, kv, prefix) < 0.0 or block_tokens < 1:
            raise ValueError("give weights of at least 0 and block_tokens of at least 1")
        self._queue, self._kv, self._prefix = queue, kv, prefix
        self._block_tokens = block_tokens
        self._sent = SentPrefixes()
        self._ties = 0

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return an engine with the largest sum, and record the prefix sent there."""
        sums = self._sums(t, view)
        most = max(sums.values())
        equal = [engine for engine, total in sums.items() if total == most]
        chosen = equal[self._ties % len(equal)]
        self._ties += len(equal) > 1
        self._sent.add(t, chosen)
        return chosen

    def finished(self, t: TrajectoryView) -> None:
        self._sent.forget(t)

    def _sums(self, t: TrajectoryView, view: View) -> dict[EngineId, float]:
        waiting = [e.in_flight - e.running_steps for e in view.engines]
        most = max(waiting)
        spread = most - min(waiting)
        blocks = min(t.context_tokens, LONGEST_MATCH) // self._block_tokens
        sent = self._sent.longest(t)
        sums = {}
        for engine, steps in zip(view.engines, waiting, strict=True):
            queue = (most - steps) / spread if spread else 1.0
            kv = 1.0 - engine.reported_kv_used_tokens / engine.kv_capacity_tokens
            matched = min(sent.get(engine.id, 0) // self._block_tokens, blocks)
            prefix = matched / blocks if blocks else 0.0
            sums[engine.id] = self._queue * queue + self._kv * kv + self._prefix * prefix
        return sums
