"""KV that no running step uses but that a later step of the same trajectory may find again.

Blocks are freed tail first and evicted in the order they were freed, as in vLLM V1: the trajectory
that ended longest ago gives way first, and of one trajectory a prefix survives the tail.
"""

from heddle_core.ids import GroupId, TrajectoryId
from heddle_sim.request import Context, Request


class PrefixCache:
    """Whole KV blocks by trajectory, and the order in which they were freed.

    Contexts with cached blocks are a list from the least to the most recently used.
    """

    __slots__ = ("_newest", "_oldest", "blocks", "contexts")

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks cached, over all trajectories."""
        self.contexts: dict[TrajectoryId, Context] = {}
        """Of trajectories that have, or had, blocks or a step here."""
        self._oldest: Context | None = None
        self._newest: Context | None = None

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
        """Cache blocks of a context instead of those that it has, as the most recently used."""
        self.take(context)
        if blocks > 0:
            context.blocks = blocks
            self.blocks += blocks
            older = context.older = self._newest
            if older is None:
                self._oldest = context
            else:
                older.newer = context
            self._newest = context

    def take(self, context: Context) -> int:
        """Remove the blocks of a context; returns how many it had."""
        blocks = context.blocks
        if blocks:
            context.blocks = 0
            self.blocks -= blocks
            older, newer = context.older, context.newer
            context.older = context.newer = None
            if older is None:
                self._oldest = newer
            else:
                older.newer = newer
            if newer is None:
                self._newest = older
            else:
                newer.older = older
        return blocks

    def trim(self, context: Context, blocks: int) -> None:
        """Drop the tail of a context beyond `blocks`; its age stays."""
        if blocks <= 0:
            self.take(context)
        elif blocks < context.blocks:
            self.blocks -= context.blocks - blocks
            context.blocks = blocks

    def evict(self, blocks: int) -> None:
        """Drop `blocks` blocks, of the least recently used context first, its tail first."""
        while blocks > 0:
            context = self._oldest
            assert context is not None, "as many blocks are cached"
            left = context.blocks - blocks
            blocks -= context.blocks
            self.trim(context, left)
            self.forget_if_empty(context)

    def forget_if_empty(self, context: Context) -> None:
        """Remove a context that has neither blocks nor a step here, and no known siblings."""
        empty = not (context.blocks or context.kept)
        if empty and context.request is None and context.first_sibling is None:
            self.contexts.pop(context.trajectory, None)

    def clear(self) -> None:
        """Drop all blocks, and forget which contexts are siblings."""
        for context in list(self.contexts.values()):
            context.blocks, context.holds_group_prompt = 0, False
            context.first_sibling = context.next_sibling = context.older = context.newer = None
            self.forget_if_empty(context)
        self._oldest = self._newest = None
        self.blocks = 0


class GroupPrompts:
    """Which trajectories here hold the prompt of their group, so that siblings need not prefill it.

    The samples of a group begin with the same prompt. Its length is learned from the first step of
    a first sibling (``shared_tokens == 0``). A step begins with it when it is a first step with a
    prompt of that length, or when it continues a context at least that long.
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: dict[GroupId, Context] = {}

    def first_sibling(self, request: Request) -> Context | None:
        """Return the first of the contexts that may hold the prompt of the group, this one added.

        None when the step does not begin with that prompt, or is the first to bring it here.
        """
        context, shared_tokens = request.context, request.shared_tokens
        first = context.first_sibling
        if first is None:
            first = self._first.get(request.group)
            if first is None:
                if shared_tokens == 0:
                    self._first[request.group] = context
                    context.first_sibling = context.next_sibling = context
                    context.group_prompt_tokens = request.prompt_tokens
                    context.holds_group_prompt = True
                return None
            context.first_sibling = first
        tokens = first.group_prompt_tokens
        begins_with_it = shared_tokens >= tokens or (
            not shared_tokens and request.prompt_tokens == tokens
        )
        context.holds_group_prompt = begins_with_it
        if begins_with_it and context.next_sibling is None:
            context.next_sibling, first.next_sibling = first.next_sibling, context
        return first if begins_with_it else None

    def clear(self) -> None:
        self._first.clear()
