"""KV that no running step uses but that a later step of the same trajectory may find again.

Blocks are freed tail first and evicted in the order they were freed, as in vLLM V1: the trajectory
that ended longest ago gives way first, and of one trajectory a prefix survives the tail.
"""

from collections import OrderedDict

from heddle_core.ids import GroupId, TrajectoryId
from heddle_sim.request import Request


class PrefixCache:
    """Whole KV blocks by trajectory, least recently used first."""

    __slots__ = ("blocks", "held")

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks cached, over all trajectories."""
        self.held: OrderedDict[TrajectoryId, int] = OrderedDict()

    def put(self, trajectory: TrajectoryId, blocks: int) -> None:
        """Add a trajectory that has none cached, as the most recently used."""
        if blocks > 0:
            self.held[trajectory] = blocks
            self.blocks += blocks

    def take(self, trajectory: TrajectoryId) -> int:
        """Remove a trajectory; returns the blocks it had."""
        blocks = self.held.pop(trajectory, 0)
        self.blocks -= blocks
        return blocks

    def trim(self, trajectory: TrajectoryId, blocks: int) -> None:
        """Drop the tail of a trajectory beyond `blocks`; its age stays."""
        surplus = self.held.get(trajectory, 0) - blocks
        if surplus > 0:
            self.blocks -= surplus
            if blocks:
                self.held[trajectory] = blocks
            else:
                del self.held[trajectory]

    def evict(self, blocks: int) -> None:
        """Drop `blocks` blocks, least recently used trajectory first, its tail first."""
        self.blocks -= blocks
        held = self.held
        while blocks > 0:
            trajectory, oldest = next(iter(held.items()))
            if oldest > blocks:
                held[trajectory] = oldest - blocks
                return
            del held[trajectory]
            blocks -= oldest

    def clear(self) -> None:
        """Drop everything."""
        self.held.clear()
        self.blocks = 0


class GroupPrompts:
    """Which trajectories here hold the prompt of their group, so that siblings need not prefill it.

    The samples of a group begin with the same prompt. Its length is learned from the first step of
    a first sibling (``shared_tokens == 0``). A step begins with it when it is a first step with a
    prompt of that length, or when it continues a context at least that long.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[GroupId, tuple[int, dict[TrajectoryId, None]]] = {}

    def siblings(self, request: Request) -> tuple[int, dict[TrajectoryId, None]] | None:
        """Tokens of the group's prompt and the trajectories that may hold it, this one added.

        None when the step does not begin with that prompt, or is the first to bring it here.
        """
        trajectory, shared_tokens = request.trajectory, request.shared_tokens
        known = self._groups.get(request.group)
        if known is None:
            if shared_tokens == 0:
                self._groups[request.group] = (request.prompt_tokens, {trajectory: None})
            return None
        tokens, members = known
        if shared_tokens < tokens and (shared_tokens or request.prompt_tokens != tokens):
            members.pop(trajectory, None)
            return None
        members[trajectory] = None
        return known

    def clear(self) -> None:
        """Forget every group."""
        self._groups.clear()
