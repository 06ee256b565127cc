"""Traces of recorded trajectories. They contain the future, so the core may not import them."""

from heddle_trace.complete import (
    FillReport,
    MissingRules,
    complete,
    open_gaps,
    shuffled,
)
from heddle_trace.errors import TraceError
from heddle_trace.files import problems, read_trace, write_trace
from heddle_trace.filling import FieldFill, MissingRule
from heddle_trace.problems import Problem
from heddle_trace.schema import StepRecord, StepScript, Trace, TrajectoryRecord, TrajectoryScript
from heddle_trace.stats import TraceStats, describe
from heddle_trace.synth import synth

__all__ = [
    "FieldFill",
    "FillReport",
    "MissingRule",
    "MissingRules",
    "Problem",
    "StepRecord",
    "StepScript",
    "Trace",
    "TraceError",
    "TraceStats",
    "TrajectoryRecord",
    "TrajectoryScript",
    "complete",
    "describe",
    "open_gaps",
    "problems",
    "read_trace",
    "shuffled",
    "synth",
    "write_trace",
]
