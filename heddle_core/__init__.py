"""The policy core: events in, commands out. It reads only the past: no I/O, no clock, no engine."""

import heddle_compiled as heddle_compiled  # first: it selects compiled modules or sources
from heddle_core.controller import Controller
from heddle_core.journal import Entry, collecting, first_divergence, recorded
from heddle_core.policy import Policy, PolicyContext

__all__ = [
    "Controller",
    "Entry",
    "Policy",
    "PolicyContext",
    "collecting",
    "first_divergence",
    "recorded",
]
