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
    end_s: float
    waited: bool
    """Whether any member waited for a slot or for KV capacity."""


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
    # One row for each quantity, members in order: what is left to decode, context, context per
    # token, seconds of prefill and of tools per token.
    alive = np.empty((5, len(work)))
    alive[0] = output
    alive[1] = work.context_tokens
    alive[2] = 1.0 + work.appended_tokens / output
    alive[3] = cost.prefill_s * work.prefill_tokens / output
    alive[4] = work.tool_s / output
    now_s, tau, waited = 0.0, cost.t0_s, False
    while alive.shape[1]:
        kv_tokens = cost.kv_capacity_tokens * (1 - grain / 2)
        active = _admitted(alive, tau, kv_tokens, max_running)
        waited = waited or active < alive.shape[1]
        left, context, growth, prefill_s, tool_s = alive[:, :active]
        rank = min(active - 1, int(active * grain))
        for _ in range(_ROUNDS):
            share = tau / (tau + tool_s)
            needed = left / share
            iterations = float(np.partition(needed, rank)[rank])
            if active > 1:
                free_kv_tokens = cost.kv_capacity_tokens * (1 + grain / 2) - float(share @ context)
                per_iteration = float(share @ (share * growth))
                iterations = min(iterations, max(free_kv_tokens, 1.0) / per_iteration)
            part = np.minimum(1.0, needed / iterations)
            # Halfway through its part, as context grows steadily and time is linear in it.
            halfway = context + growth * (part * share * iterations / 2)
            load = cost.t1_s + cost.t2_s * halfway + prefill_s
            tau = cost.t0_s + float((part * share) @ load)
        tokens = np.minimum(left, share * iterations)
        left -= tokens
        context += growth * tokens
        now_s += iterations * tau
        unfinished = alive[0] > 1e-9 * output[0]
        if not unfinished.all():
            alive = alive.compress(unfinished, axis=1)
    return GroupEnd(end_s=now_s, waited=waited)


def _admitted(alive: FloatArray, tau: float, kv_tokens: float, max_running: int) -> int:
    """Members, longest first, that slots and KV capacity admit; at least one."""
    count = int(alive.shape[1])
    # A share is at most 1. The margin is for rounding: sums in another order differ by less.
    if count <= max_running and float(alive[1].sum()) < (1 - 1e-9) * kv_tokens:
        return count
    share = tau / (tau + alive[4])
    slots = int(share.cumsum().searchsorted(max_running * (1 + 1e-12), side="right"))
    kv = int((share * alive[1]).cumsum().searchsorted(kv_tokens, side="right"))
    return max(1, min(slots, kv))
