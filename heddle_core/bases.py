"""Base classes of parts: each decides as the baselines do, until a method is overridden.

A part of your own derives from the base of its kind and overrides what it changes.
"""

from heddle_core.parts.admission.prompt_only import PromptOnly as AdmissionBase
from heddle_core.parts.migration.never import Never as MigrationBase
from heddle_core.parts.placement.least_loaded import LeastLoaded as PlacementBase
from heddle_core.parts.planner.fixed import FixedPlan as PlannerBase
from heddle_core.parts.predictor.none import NoPrediction as PredictorBase
from heddle_core.parts.scheduler.fcfs import Fcfs as SchedulerBase
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
