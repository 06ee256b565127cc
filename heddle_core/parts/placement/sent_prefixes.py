"""Prefixes that engines were sent, as far as a scheduler knows them."""

from heddle_core.ids import EngineId, GroupId, TrajectoryId
from heddle_core.policy import TrajectoryView


class SentPrefixes:
    """Contexts of unfinished trajectories and prompts of their groups, as last sent to each engine.

    Prefixes shared across groups are not known, and not whether an engine has evicted the KV.
    """

    def __init__(self) -> None:
        self._contexts: dict[TrajectoryId, dict[EngineId, int]] = {}
        """Context tokens of each unfinished trajectory, as last sent to each engine."""
        self._prompts: dict[GroupId, dict[EngineId, int]] = {}
        """Prompt tokens of each group with an unfinished trajectory, by engine that got them."""
        self._live: dict[GroupId, int] = {}
        """Unfinished trajectories of each group that were sent."""

    def of(self, t: TrajectoryView) -> list[tuple[EngineId, int]]:
        """Engines, each with tokens of the next prompt of `t` that it was sent.

        First those that were sent its context, then those that were sent its group's prompt.
        """
        context, prompt = t.context_tokens, min(t.prompt_tokens, t.context_tokens)
        # A context shorter than one sent before was compacted: only its prompt is still shared.
        own = [
            (engine, sent if sent <= context else prompt)
            for engine, sent in self._contexts.get(t.id, {}).items()
        ]
        group = self._prompts.get(t.group, {})
        return own + [(engine, min(sent, prompt)) for engine, sent in group.items()]

    def longest(self, t: TrajectoryView) -> dict[EngineId, int]:
        """The most tokens of the next prompt of `t` that each engine was sent."""
        most: dict[EngineId, int] = {}
        for engine, tokens in self.of(t):
            if tokens > most.get(engine, 0):
                most[engine] = tokens
        return most

    def add(self, t: TrajectoryView, engine: EngineId) -> None:
        """The context of `t` is at `engine`."""
        sent = self._contexts.get(t.id)
        if sent is None:
            sent = self._contexts[t.id] = {}
            self._live[t.group] = self._live.get(t.group, 0) + 1
        sent[engine] = t.context_tokens
        self._prompts.setdefault(t.group, {}).setdefault(engine, t.prompt_tokens)

    def forget(self, t: TrajectoryView) -> None:
        """Forget a finished trajectory, and its group's prompt with the last of the group.

        Routers forget neither. But samples rarely start after all others of their group have ended,
        too rarely to keep every prompt of a run.
        """
        if self._contexts.pop(t.id, None) is None:
            return
        self._live[t.group] -= 1
        if not self._live[t.group]:
            del self._live[t.group]
            del self._prompts[t.group]

    def __len__(self) -> int:
        return len(self._contexts) + len(self._prompts) + len(self._live)
