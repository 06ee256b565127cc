"""KV that no running step uses but that a later step of the same trajectory may find again.

Blocks are freed tail first and evicted in the order they were freed, as in vLLM V1: the trajectory
that ended longest ago gives way first, and of one trajectory a prefix survives the tail.
"""

from collections import deque

from heddle_core.ids import GroupId, TrajectoryId
from heddle_sim.request import Context, Request, SharedPrompt


class PrefixCache:
    """Whole KV blocks by trajectory, and the order in which they were freed."""

    __slots__ = ("_freed", "blocks", "contexts")

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks cached, over all trajectories."""
        self.contexts: dict[TrajectoryId, Context] = {}
        """Of trajectories that have, or had, blocks or a step here."""
        self._freed: deque[tuple[Context, int]] = deque()
        """Contexts, least recently used first, each with its number of uses at that time: an entry
        with another number, or without blocks, is left over."""

    def context(self, trajectory: TrajectoryId) -> Context:
        """Return the context of a trajectory, which may be new here."""
        context = self.contexts.get(trajectory)
        if context is None:
            context = self.contexts[trajectory] = Context(trajectory)
        return context

    def held(self, trajectory: TrajectoryId) -> int:
        """Blocks of a trajectory that no step uses, cached or kept for another engine."""
        context = self.contexts.get(trajectory)
        return context.blocks + context.kept if context is not None else 0

    def put(self, context: Context, blocks: int) -> None:
        """Add blocks of a context that has none cached, as the most recently used."""
        if blocks > 0:
            context.blocks = blocks
            context.uses += 1
            self.blocks += blocks
            if len(self._freed) > 64 + 4 * len(self.contexts):
                self._freed = deque(
                    (left, uses) for left, uses in self._freed if left.uses == uses and left.blocks
                )
            self._freed.append((context, context.uses))

    def take(self, context: Context) -> int:
        """Remove the blocks of a context; returns how many it had."""
        blocks = context.blocks
        context.blocks = 0
        self.blocks -= blocks
        return blocks

    def trim(self, context: Context, blocks: int) -> None:
        """Drop the tail of a context beyond `blocks`; its age stays."""
        surplus = context.blocks - blocks
        if surplus > 0:
            self.blocks -= surplus
            context.blocks = blocks

    def evict(self, blocks: int) -> None:
        """Drop `blocks` blocks, of the least recently used context first, its tail first."""
        self.blocks -= blocks
        freed = self._freed
        while blocks > 0:
            context, uses = freed[0]
            if context.uses == uses and context.blocks > blocks:
                context.blocks -= blocks
                return
            freed.popleft()
            if context.uses == uses and context.blocks:
                blocks -= context.blocks
                context.blocks = 0
                self.forget_if_empty(context)

    def forget_if_empty(self, context: Context) -> None:
        """Remove a context that has neither blocks nor a step here, and no known siblings."""
        empty = not (context.blocks or context.kept)
        if empty and context.request is None and context.shared_prompt is None:
            self.contexts.pop(context.trajectory, None)

    def clear(self) -> None:
        """Drop all blocks, and forget which contexts are siblings."""
        for context in list(self.contexts.values()):
            context.blocks, context.shared_prompt, context.holds_prompt = 0, None, False
            self.forget_if_empty(context)
        self._freed.clear()
        self.blocks = 0


class GroupPrompts:
    """Which trajectories here hold the prompt of their group, so that siblings need not prefill it.

    The samples of a group begin with the same prompt. Its length is learned from the first step of
    a first sibling (``shared_tokens == 0``). A step begins with it when it is a first step with a
    prompt of that length, or when it continues a context at least that long.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[GroupId, SharedPrompt] = {}

    def siblings(self, request: Request) -> SharedPrompt | None:
        """Return the prompt of the group, with the contexts that may hold it, this one added.

        None when the step does not begin with that prompt, or is the first to bring it here.
        """
        context, shared_tokens = request.context, request.shared_tokens
        prompt = context.shared_prompt
        if prompt is None:
            prompt = self._groups.get(request.group)
            if prompt is None:
                if shared_tokens == 0:
                    self._groups[request.group] = SharedPrompt(request.prompt_tokens, context)
                return None
            context.shared_prompt = prompt
        tokens = prompt.prompt_tokens
        if shared_tokens < tokens and (shared_tokens or request.prompt_tokens != tokens):
            if context.holds_prompt:
                prompt.members.remove(context)
                context.holds_prompt = False
            return None
        if not context.holds_prompt:
            prompt.members.append(context)
            context.holds_prompt = True
        return prompt

    def clear(self) -> None:
        self._groups.clear()
