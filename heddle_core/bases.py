"""Base classes of parts: each decides as the baselines do, until a method is overridden.

A part of your own derives from the base of its kind and overrides what it changes.
"""

from heddle_core.parts.admission import PromptOnly as AdmissionBase
from heddle_core.parts.migration import Never as MigrationBase
from heddle_core.parts.placement.load_and_pin import LeastLoaded as PlacementBase
from heddle_core.parts.planner import FixedPlan as PlannerBase
from heddle_core.parts.predictor import NoPrediction as PredictorBase
from heddle_core.parts.scheduler import Fcfs as SchedulerBase
from heddle_core.policy import NoConsolidation as ConsolidationBase

__all__ = [
    "AdmissionBase",
    "ConsolidationBase",
    "MigrationBase",
    "PlacementBase",
    "PlannerBase",
    "PredictorBase",
    "SchedulerBase",
]
