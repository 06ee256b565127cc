"""The modules that the compiled build has: what a simulated step passes through.

Data that msgspec reads back stays interpreted: the hints of a compiled dataclass are erased.
"""

from typing import Final

MODULES: Final = (
    "heddle_core.controller",
    "heddle_core.engine_state",
    "heddle_core.estimate.shape_load",
    "heddle_core.estimate.step_lengths",
    "heddle_core.fleet",
    "heddle_core.homes",
    "heddle_core.journal",
    "heddle_core.ledger",
    "heddle_core.parts.admission",
    "heddle_core.parts.migration",
    "heddle_core.parts.placement.load_and_pin",
    "heddle_core.parts.placement.presorted",
    "heddle_core.parts.predictor",
    "heddle_core.parts.scheduler",
    "heddle_core.prefill",
    "heddle_core.queues",
    "heddle_core.rollouts",
    "heddle_core.tournament",
    "heddle_core.trajectory",
    "heddle_core.transfers",
    "heddle_predict.features",
    "heddle_predict.learned",
    "heddle_predict.observations",
    "heddle_predict.tree_walk",
    "heddle_rollout.cluster",
    "heddle_rollout.core",
    "heddle_rollout.driver",
    "heddle_rollout.migrations",
    "heddle_rollout.scripted_agent",
    "heddle_rollout.tools",
    "heddle_sim.batching",
    "heddle_sim.calendar",
    "heddle_sim.drafts",
    "heddle_sim.engine",
    "heddle_sim.engine_client",
    "heddle_sim.host_kv",
    "heddle_sim.latency",
    "heddle_sim.leap",
    "heddle_sim.prefix_cache",
    "heddle_sim.request",
)
