"""The SGLang router's `cache_aware` rule, applied to the prefixes that a scheduler can know."""

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.parts.placement.load_and_pin import OneByOne, loads
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
    trajectory's own context as last sent to an engine, or the prompt of its group. Not modelled:
    prefixes shared across groups (a common system prompt), and the tree's size limit with its
    eviction. Like the router, this part only estimates: the engine may have evicted the KV.
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
        self._contexts: dict[TrajectoryId, dict[EngineId, int]] = {}
        """Context tokens of each unfinished trajectory, as last sent to each engine."""
        self._prompts: dict[GroupId, dict[EngineId, int]] = {}
        """Prompt tokens of each group with an unfinished trajectory, by engine that got them."""
        self._live: dict[GroupId, int] = {}
        """Unfinished trajectories of each group that were placed."""

    def place(self, t: TrajectoryView, view: View) -> EngineId:
        """Return the engine that the rule picks, and record the prefix sent there."""
        best, most = loads(view)
        fewest, chosen = best.in_flight, best.id
        if most - fewest <= self._balance_abs or most <= self._balance_rel * fewest:
            chosen = self._matched(t, view) or chosen
        self._remember(t, chosen)
        return chosen

    def finished(self, t: TrajectoryView) -> None:
        """Forget the trajectory, and its group's prompt with the last of the group.

        The router forgets neither. But samples rarely start after all others of their group have
        ended, too rarely to keep every prompt of a run.
        """
        if self._contexts.pop(t.id, None) is None:
            return
        self._live[t.group] -= 1
        if not self._live[t.group]:
            del self._live[t.group]
            del self._prompts[t.group]

    def _matched(self, t: TrajectoryView, view: View) -> EngineId | None:
        """Return the engine with the longest known prefix if it passes the threshold."""
        context, prompt = t.context_tokens, t.prompt_tokens
        longest, matched = self._cache_threshold * context, None
        for engine, sent in self._contexts.get(t.id, {}).items():
            # A context shorter than one sent before was compacted: only its prompt is still shared.
            tokens = sent if sent <= context else min(prompt, context)
            if tokens > longest and view.engine(engine).accepting:
                longest, matched = tokens, engine
        for engine, sent in self._prompts.get(t.group, {}).items():
            tokens = min(sent, prompt, context)
            if tokens > longest and view.engine(engine).accepting:
                longest, matched = tokens, engine
        return matched

    def _remember(self, t: TrajectoryView, engine: EngineId) -> None:
        sent = self._contexts.get(t.id)
        if sent is None:
            sent = self._contexts[t.id] = {}
            self._live[t.group] = self._live.get(t.group, 0) + 1
        sent[engine] = t.context_tokens
        self._prompts.setdefault(t.group, {}).setdefault(engine, t.prompt_tokens)
