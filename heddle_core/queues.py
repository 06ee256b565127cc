"""Homes and queues: puts runnable trajectories in engines' queues and fills free slots from them.

This file is part of the controller: it reads no clock and does no I/O.
"""

from heddle_core.commands import Cancel, CommandList, Dispatch, Migrate, Preempt
from heddle_core.engine_state import Engine
from heddle_core.hooks import Hooks
from heddle_core.ids import TrajectoryId
from heddle_core.ledger import Ledger
from heddle_core.policy import Policy
from heddle_core.prefill import PrefillChoice
from heddle_core.trajectory import Trajectory

TIER = 1e10
"""More than any two keys of a scheduler differ by: tokens, or seconds."""


class Queues:
    """Assigns steps to slots, with the policy's parts."""

    def __init__(
        self, policy: Policy, ledger: Ledger, hooks: Hooks, prefill: PrefillChoice
    ) -> None:
        self._policy = policy
        self._prefill = prefill
        self._ledger = ledger
        self._chunk_tokens = hooks.chunk_tokens
        self.backlog: dict[TrajectoryId, Trajectory] = {}
        """Held trajectories that the placement lets wait, by their arrival here."""

    def place(self, t: Trajectory, out: CommandList) -> None:
        """Find a home for a runnable trajectory and queue it there, or let it wait."""
        engine = self.choose(t)
        if engine is None:
            self._ledger.hold(t)
        else:
            self.run_at(t, engine, out)

    def choose(self, t: Trajectory) -> Engine | None:
        """Return the engine where the policy places a runnable trajectory; None: it waits."""
        if not self._ledger.engines:
            return None
        home = self._policy.placement.place(t, self._ledger)
        if home is None:
            self.backlog[t.id] = t
            return None
        engine = self._ledger.engine(home)
        assert engine.accepting, f"placement chose {engine.id!r}, which takes no work"
        return engine

    def run_at(self, t: Trajectory, engine: Engine, out: CommandList) -> None:
        """Queue a runnable trajectory at `engine`, or at the largest if it fits nowhere else."""
        self.backlog.pop(t.id, None)
        if t.context_tokens >= engine.kv_capacity_tokens:
            engine = max(self._ledger.engines, key=lambda e: e.kv_capacity_tokens)
        if t.context_tokens >= engine.kv_capacity_tokens:
            self._cancel(t, engine, out)
            return
        if t.home != engine.id:
            self._ledger.set_home(t, engine.id)
        first = self._prefill.engine_for(t, engine) or engine
        self.enqueue(t, first)
        self.fill(first, out, may_preempt=True)

    def _cancel(self, t: Trajectory, engine: Engine, out: CommandList) -> None:
        """Cancel `t`: no engine can hold its context, and waiting would block a queue for ever."""
        self._ledger.begin_cancel(t)
        reason = f"context of {t.context_tokens} tokens, KV capacity {engine.kv_capacity_tokens}"
        out.append(Cancel(trajectory=t.id, reason=reason, cause=out.cause))

    def enqueue(self, t: Trajectory, engine: Engine) -> None:
        """Give `t` its place in the queue, by its newest estimate."""
        policy = self._policy
        if not policy.predictor.served:
            self._ledger.estimate(t, policy.predictor.remaining_tokens(t))
        t.reserved_tokens = 1
        if not engine.prefills_only:
            t.reserved_tokens = policy.admission.reserve_tokens(t, t.remaining_tokens)
        priority = policy.scheduler.priority(t, t.remaining_tokens)
        self._ledger.enqueue(t, engine, priority + TIER * t.tier if t.tier else priority)

    def fill(self, engine: Engine, out: CommandList, *, may_preempt: bool = False) -> None:
        """Dispatch all that may run now; then, on a return, at most one eviction (Algorithm 1)."""
        if not engine.accepting:
            return
        ledger = self._ledger
        head = engine.head()
        while head is not None and engine.fits(head):
            away = head.prefills_on is not None or head.prefilled_on is not None
            source = self._prefill.source(head, engine) if away else None
            if source is None:
                ledger.start(head, engine)
                self._dispatch(head, engine, out)
            else:
                ledger.start(head, engine, "pulling")
                head.migrating_to = engine.id
                out.append(
                    Migrate(
                        trajectory=head.id,
                        source=source,
                        target=engine.id,
                        copy=True,
                        cause=out.cause,
                    )
                )
            head = engine.head()
        if engine.prefills_only:
            return
        if may_preempt and head is not None and self._policy.scheduler.preemptive:
            # One at a time: another Preempt before the first took effect would evict a whole batch.
            if engine.preempting:
                return
            running = [t for t in engine.running.values() if t.phase == "running"]
            if not running:
                return
            victim = min(running, key=lambda t: t.priority)
            if victim.priority < head.priority:
                ledger.begin_preemption(victim, engine)
                out.append(
                    Preempt(
                        trajectory=victim.id, step=victim.step, engine=engine.id, cause=out.cause
                    )
                )

    def dispatch_pulled(self, t: Trajectory, engine: Engine, out: CommandList) -> None:
        """Dispatch a step that has waited in its slot for KV."""
        self._ledger.move(t, "running")
        t.dispatched_s = self._ledger.now_s
        self._dispatch(t, engine, out)

    def _dispatch(self, t: Trajectory, engine: Engine, out: CommandList) -> None:
        out.append(
            Dispatch(
                trajectory=t.id,
                step=t.step,
                engine=engine.id,
                priority=t.priority,
                max_tokens=1 if engine.prefills_only else self._chunk_tokens,
                cause=out.cause,
            )
        )
