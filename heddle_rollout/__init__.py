"""Drives the core: one driver, with a simulated or a real clock and simulated or real engines."""

import heddle_compiled as heddle_compiled  # first: it selects compiled modules or sources
