"""The SGLang router's `cache_aware` rule, applied to the prefixes that a scheduler can know."""

from heddle_core.ids import EngineId
from heddle_core.parts.placement.load_and_pin import OneByOne, loads
from heddle_core.parts.placement.sent_prefixes import SentPrefixes
from heddle_core.policy import TrajectoryView, View


class CacheAware(OneByOne):
    """Follow the longest prefix sent to any engine if it is long enough and the loads are even.

    1. Largest load minus smallest > `balance_abs` and largest > `balance_rel` x smallest: to the
       least loaded engine. Load is steps in flight.
    2. Else the engine that was sent the longest prefix of this step's prompt, when that prefix is
       more than `cache_threshold` of the prompt.
    3. Else to the least loaded engine (older versions of the router: to the smallest tree).

    Defaults are those of the router's Python arguments in August 2026 (0.3 / 64 / 1.5).

    The router keeps an approximate radix tree over request *text* per engine. Here a prefix is a
    trajectory's own context as last sent to an engine, or the prompt of its group
    (`SentPrefixes`). Not modelled: prefixes shared across groups (a common system prompt), and the
    tree's size limit with its eviction. Like the router, this part only estimates: the engine may
    have evicted the KV.
    """

    def __init__(
        self, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5
    ) -> None:
        if not 0.0 <= cache_threshold <= 1.0:
            raise ValueError(f"cache_threshold is {cache_threshold}; give a share from 0 to 1")
        if balance_abs < 0 or not balance_rel >= 1.0:
            raise ValueError(
                f"balance_abs is {balance_abs} and balance_rel {balance_rel}; "
                "give at least 0 and at least 1"
            )
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel
        self._sent = SentPrefixes()

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the engine that the rule picks, and record the prefix sent there."""
        best, most = loads(view)
        fewest, chosen = best.in_flight, best.id
        if most - fewest <= self._balance_abs or most <= self._balance_rel * fewest:
            chosen = self._matched(t, view) or chosen
        self._sent.add(t, chosen)
        return chosen

    def finished(self, t: TrajectoryView) -> None:
        self._sent.forget(t)

    def _matched(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine with the longest known prefix if it passes the threshold."""
        longest, matched = self._cache_threshold * t.context_tokens, None
        for engine, tokens in self._sent.of(t):
            if tokens > longest and view.engine(engine).accepting:
                longest, matched = tokens, engine
        return matched
