"""Prefill on engines of their own: which steps take them, which engine, and where KV comes from.

A step whose home is a decode engine is prefilled elsewhere if it has more new tokens than the
threshold. A prefill engine makes its first token and keeps its KV until the home has a slot and KV
for it, and has copied it. This file is part of the controller: it reads no clock and does no I/O.
"""

from heddle_core.engine_state import Engine
from heddle_core.ids import EngineId
from heddle_core.ledger import Ledger
from heddle_core.plans import Disaggregation, ResourcePlan
from heddle_core.trajectory import Trajectory


class PrefillChoice:
    """Chooses a prefill engine for a step, or none."""

    def __init__(self, disaggregation: Disaggregation | None, ledger: Ledger) -> None:
        self._disaggregation, self._ledger = disaggregation, ledger

    def with_prefill_engines(self, plan: ResourcePlan) -> ResourcePlan:
        """Add the prefill engines to a plan."""
        if self._disaggregation is None:
            return plan
        return ResourcePlan(
            engines=plan.engines + self._disaggregation.engines,
            homes=plan.homes,
            estimated_makespan_s=plan.estimated_makespan_s,
        )

    def engine_for(self, t: Trajectory, home: Engine) -> Engine | None:
        """Return the engine that ends the step's prefill first, by estimate; None: its home."""
        found = self._disaggregation
        if found is None or home.shape.role != "decode" or t.prefilled_on is not None:
            return None
        new_tokens = t.context_tokens - t.home_kv_tokens
        if new_tokens <= found.threshold_tokens:
            return None
        best: Engine | None = None
        best_s = 0.0
        for engine in self._ledger.prefill_engines:
            if t.context_tokens >= engine.kv_capacity_tokens:
                continue
            tokens = engine.prefill_tokens + new_tokens
            seconds = tokens * found.prefill_s_by_shape[engine.shape]
            if best is None or seconds < best_s:
                best, best_s = engine, seconds
        return best

    def source(self, t: Trajectory, engine: Engine) -> EngineId | None:
        """Return the engine that the KV of a step comes from before it runs on `engine`."""
        if t.prefills_on is None:
            return t.prefilled_on
        if t.home is None or not t.home_kv_tokens or not self._ledger.engine(t.home).alive:
            return None
        return t.home
