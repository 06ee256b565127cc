"""A small simulation of one group on one engine: the check on closed-form cost estimates.

Members are a fluid. In a leap of ``X`` iterations of ``tau`` seconds a member outside tools decodes
``X`` tokens; one that spends ``u`` seconds in tools per token is in the batch for the share
``tau / (tau + u)`` of the time and decodes as much less. ``tau`` follows from the members
that take part:

    tau = t0 + sum over active of share * (t1 + t2 * context + prefill_s * prefill per token)

A leap ends when a small share of the members has finished, or when contexts exceed the KV capacity
by that share. The longest members are active, as many as slots and KV capacity admit. The others
wait without loss.
"""

from dataclasses import dataclass

import numpy as np

from heddle_core.estimate.cost import StepCost
from heddle_core.estimate.group_cost import FloatArray, Work

_ROUNDS = 2
"""Passes over share and tau in a leap: each depends on the other, the second changes < 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnd:
    """Result of a group's simulation."""

    end_s: float
    waited: bool
    """Whether any member waited for a slot or for KV capacity."""


@dataclass(slots=True)
class _Alive:
    """Members that have not finished, in order; all arrays of one length."""

    left: FloatArray
    context: FloatArray
    growth: FloatArray
    prefill_s: FloatArray
    tool_s: FloatArray

    def keep(self, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> "_Alive":
        return _Alive(
            self.left[mask],
            self.context[mask],
            self.growth[mask],
            self.prefill_s[mask],
            self.tool_s[mask],
        )


def simulate_group(
    work: Work, cost: StepCost, *, max_running: int, grain: float = 1 / 12
) -> GroupEnd:
    """Simulate `work`, longest first, on one engine until its last member has ended.

    In each leap a share `grain` of the active members finishes, or their contexts exceed the KV
    capacity by that share. A smaller `grain` is finer and slower. A member larger than the KV
    capacity runs alone. Raises ValueError for a grain that is not between 0 and 1.
    """
    if not 0 < grain < 1:
        raise ValueError(f"grain {grain} must be between 0 and 1")
    output = work.output_tokens
    alive = _Alive(
        output.copy(),
        work.context_tokens.copy(),
        1.0 + work.appended_tokens / output,
        cost.prefill_s * work.prefill_tokens / output,
        work.tool_s / output,
    )
    now_s, tau, waited = 0.0, cost.t0_s, False
    while len(alive.left):
        active = _admitted(alive, tau, cost.kv_capacity_tokens * (1 - grain / 2), max_running)
        waited = waited or active < len(alive.left)
        head = (
            alive if active == len(alive.left) else alive.keep(np.arange(len(alive.left)) < active)
        )
        share = np.ones(active)
        iterations = 0.0
        for _ in range(_ROUNDS):
            share = tau / (tau + head.tool_s)
            needed = head.left / share
            rank = min(active - 1, int(active * grain))
            iterations = float(np.partition(needed, rank)[rank])
            if active > 1:
                free_kv_tokens = cost.kv_capacity_tokens * (1 + grain / 2) - float(
                    share @ head.context
                )
                growth = float(share @ (share * head.growth))
                iterations = min(iterations, max(free_kv_tokens, 1.0) / growth)
            part = np.minimum(1.0, needed / iterations)
            # Halfway through its part, as context grows steadily and time is linear in it.
            context = head.context + head.growth * (part * share * iterations / 2)
            load = cost.t1_s + cost.t2_s * context + head.prefill_s
            tau = cost.t0_s + float((part * share) @ load)
        tokens = np.minimum(head.left, share * iterations)
        alive.left[:active] -= tokens
        alive.context[:active] += head.growth * tokens
        now_s += iterations * tau
        alive = alive.keep(alive.left > 1e-9 * output[0])
    return GroupEnd(end_s=now_s, waited=waited)


def _admitted(alive: _Alive, tau: float, kv_tokens: float, max_running: int) -> int:
    """Members, longest first, that slots and KV capacity admit; at least one."""
    share = tau / (tau + alive.tool_s)
    slots = int(np.searchsorted(np.cumsum(share), max_running * (1 + 1e-12), side="right"))
    kv = np.searchsorted(np.cumsum(share * alive.context), kv_tokens, side="right")
    return max(1, min(slots, int(kv)))
