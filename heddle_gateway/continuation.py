"""Finds the trajectory that a prompt continues, for clients that send no session id.

Every trajectory that waits for its client is filed under hashes of the beginning of its context:
one at its end, and one at each of a few lengths between, all in whole blocks. Hashes only find
candidates; tokens decide.
"""

from array import array
from collections.abc import Callable, Iterator

from heddle_core.ids import TrajectoryId
from heddle_gateway.agent import GatewayAgent, common_prefix

BLOCK_TOKENS = 16
MOST_CANDIDATES = 64
"""Contexts that are compared with a prompt: the newest of those under one hash."""


def _chain(ids: "array[int]", tenant: str) -> Iterator[int]:
    """Hashes of the first 0, 1, 2 ... whole blocks; those of different tenants differ."""
    raw, size = ids.tobytes(), BLOCK_TOKENS * ids.itemsize
    found = hash(tenant)
    yield found
    for start in range(0, len(raw) - size + 1, size):
        found = hash((found, raw[start : start + size]))
        yield found


def _is_mark(blocks: int) -> bool:
    """Whether contexts are filed at this length: 1, 2, 3, 4, 6, 8, 12, 16, 24 ..."""
    odd = blocks // (blocks & -blocks) if blocks else 0
    return odd in (1, 3)


class Continuations:
    """Trajectories that wait for clients without a session id."""

    def __init__(self, is_alone: Callable[[GatewayAgent], bool] = lambda agent: True) -> None:
        """`is_alone`: whether no other trajectory began with the same prompt."""
        self._is_alone = is_alone
        self._ends: dict[int, dict[TrajectoryId, GatewayAgent]] = {}
        self._marks: dict[int, dict[TrajectoryId, GatewayAgent]] = {}
        self._filed: dict[TrajectoryId, tuple[int, list[int]]] = {}

    def __len__(self) -> int:
        return len(self._filed)

    def add(self, agent: GatewayAgent) -> None:
        """File a trajectory that waits."""
        hashes = list(_chain(agent.context_ids, agent.step.tenant))
        marks = [h for blocks, h in enumerate(hashes) if _is_mark(blocks)]
        self._filed[agent.id] = hashes[-1], marks
        self._ends.setdefault(hashes[-1], {})[agent.id] = agent
        for mark in marks:
            self._marks.setdefault(mark, {})[agent.id] = agent

    def remove(self, agent: GatewayAgent) -> None:
        """Take out a trajectory that waits no more; nothing if it is not here."""
        end, marks = self._filed.pop(agent.id, (None, []))
        if end is not None:
            _take_out(self._ends, end, agent)
        for mark in marks:
            _take_out(self._marks, mark, agent)

    def find(
        self, prompt: "array[int]", *, has_reply: bool | None = None, tenant: str = ""
    ) -> GatewayAgent | None:
        """Return the tenant's trajectory that goes on with a prompt, if any.

        It is the longest one whose whole context the prompt begins with, our own reply included.
        Otherwise it may be the one that shares the longest beginning with the prompt: replies come
        back a little changed, and agents shorten their history. `has_reply`: whether the client's
        messages contain a reply of a model; None where tokens do not say it.
        """
        if not self._filed:
            return None
        hashes = list(_chain(prompt, tenant))
        for found in reversed(hashes):
            for agent in _newest(self._ends.get(found)):
                context = agent.context_ids
                if len(context) <= len(prompt) and context == prompt[: len(context)]:
                    return agent
        for blocks in range(len(hashes) - 1, 0, -1):
            filed = self._marks.get(hashes[blocks]) if _is_mark(blocks) else None
            if filed:
                shared, agent = max(
                    ((common_prefix(a.context_ids, prompt), a) for a in _newest(filed)),
                    key=lambda pair: pair[0],
                )
                return agent if self._goes_on(agent, shared, len(prompt), has_reply) else None
        return None

    def _goes_on(
        self, agent: GatewayAgent, shared: int, prompt_tokens: int, has_reply: bool | None
    ) -> bool:
        """Whether a prompt that shares `shared` tokens with a trajectory is its next."""
        if has_reply is False or shared == prompt_tokens:
            return False  # it is a first prompt: another sample, or the same instructions
        own = shared >= agent.prompt_tokens + BLOCK_TOKENS
        if not own:
            # No reply tells it from other samples of the prompt; templates end in a few tokens.
            begins_alike = shared + BLOCK_TOKENS >= agent.prompt_tokens
            if not (has_reply and begins_alike and self._is_alone(agent)):
                return False
        return 2 * shared > prompt_tokens or shared + BLOCK_TOKENS >= agent.last_prompt_tokens


def _newest(filed: dict[TrajectoryId, GatewayAgent] | None) -> Iterator[GatewayAgent]:
    for count, agent in enumerate(reversed((filed or {}).values())):
        if count == MOST_CANDIDATES:
            return
        yield agent


def _take_out(
    by_hash: dict[int, dict[TrajectoryId, GatewayAgent]], found: int, agent: GatewayAgent
) -> None:
    del by_hash[found][agent.id]
    if not by_hash[found]:
        del by_hash[found]
