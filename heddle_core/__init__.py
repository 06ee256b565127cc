"""Decides; knows only the past. No I/O, no clock, no engine: events in, commands out."""

from heddle_core.controller import Controller
from heddle_core.journal import Entry, first_divergence, recorded
from heddle_core.policy import Policy, PolicyContext

__all__ = ["Controller", "Entry", "Policy", "PolicyContext", "first_divergence", "recorded"]
