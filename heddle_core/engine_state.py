"""One engine's state: a part of the ledger, which is its only writer."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop

from heddle_core.ids import EngineId, EngineShape, TrajectoryId
from heddle_core.trajectory import Trajectory


@dataclass(slots=True, eq=False, kw_only=True)
class Engine:
    """One engine's state; policies see it as an `EngineView`."""

    id: EngineId
    shape: EngineShape
    max_running: int
    kv_capacity_tokens: int
    accepting: bool = True
    alive: bool = True
    recalled: bool = False
    """Whether its owner takes it back. Its running steps end there, or by the stop that was
    ordered: the controller preempts none of them."""
    in_flight: int = 0
    sessions: int = 0
    estimated_kv_tokens: int = 0
    parked_kv_tokens: int = 0
    prefilled_kv_tokens: int = 0
    """KV that a prefill engine keeps for other engines."""
    prefill_tokens: int = 0
    """Prompt tokens of steps that wait for it or have a slot of it, as a prefill engine."""
    running: dict[TrajectoryId, Trajectory] = field(default_factory=dict)
    preempting: int = 0
    """Running steps whose preemption was requested and has not ended."""
    reported_s: float = 0.0
    reported_kv_used_tokens: int = 0
    reported_preemptions: int = 0
    queue: list[tuple[float, int, Trajectory]] = field(default_factory=list)
    """Heap of (-priority, ticket, trajectory); stale entries are skipped when they surface."""
    prefills_only: bool = False
    place: int = 0
    """Its place among the engines that accept work."""
    load_changed: bool = False
    """Whether `in_flight` has changed since the ledger last looked for the fewest."""

    def __post_init__(self) -> None:
        self.prefills_only = self.shape.prefills_only

    @property
    def running_steps(self) -> int:
        """Steps in its slots."""
        return len(self.running)

    def head(self) -> Trajectory | None:
        """Return the most urgent waiting trajectory, which stays in the queue."""
        queue = self.queue
        while queue:
            entry = queue[0]
            if entry[2].ticket == entry[1]:
                return entry[2]
            heappop(queue)
        return None

    def waiting(self) -> Iterator[Trajectory]:
        """Yield the waiting trajectories in no particular order of urgency."""
        return (t for _, ticket, t in self.queue if t.ticket == ticket)

    def fits(self, t: Trajectory) -> bool:
        """Return whether a slot and enough estimated KV are free.

        An engine with neither a step nor KV that it keeps for others always fits.
        """
        if len(self.running) >= self.max_running:
            return False
        kept_tokens = self.parked_kv_tokens + self.prefilled_kv_tokens
        free_tokens = self.kv_capacity_tokens - self.estimated_kv_tokens - kept_tokens
        if t.context_tokens + t.reserved_tokens <= free_tokens:
            return True
        return not (self.running or self.prefilled_kv_tokens)
