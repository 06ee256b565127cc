"""Progressive priority: longest first, revised at every return from a tool, with eviction."""

from heddle_core.policy import TrajectoryView


class ProgressivePriority:
    """Algorithm 1 of Heddle (arXiv 2603.28101): longest first, and the head may evict.

    The key is the newest estimate of the remaining tokens. When a step becomes runnable and the
    head of the queue then beats the least urgent running step, that step is evicted: one at a time,
    its tokens kept, its KV left to the prefix cache. The controller implements that rule; this part
    only enables it. A running step keeps the key with which it was queued, so it is compared by the
    tokens that remained when it started.
    """

    preemptive = True

    def priority(self, t: TrajectoryView, remaining_tokens: float) -> float:
        return remaining_tokens
