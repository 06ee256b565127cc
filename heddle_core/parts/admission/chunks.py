"""Seer's divided rollout: a step is generated in chunks, and KV is reserved for one of them."""

from heddle_core.policy import TrajectoryView

CHUNK_TOKENS = 2_048
"""An assumption: a few times the mean step of the shipped workloads."""


class InChunks:
    """Ends a dispatch after `chunk_tokens`, and admits it when prompt and chunk fit.

    So an engine does not run out of KV, and what is left of a long step is ordered and placed anew
    (Seer, arXiv 2511.14617).
    """

    keeps_kv = False

    def __init__(self, *, chunk_tokens: int = CHUNK_TOKENS) -> None:
        """Set the size of chunks.

        Raises:
            ValueError: it is below 1.
        """
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; give at least 1")
        self.chunk_tokens = chunk_tokens

    def reserve_tokens(self, t: TrajectoryView, remaining_tokens: float) -> int:
        """Return a chunk, or what the trajectory is estimated to make if that is less."""
        return int(min(self.chunk_tokens, max(remaining_tokens, 1.0)))
