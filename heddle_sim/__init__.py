"""Simulated engines, tools and transfers on SimPy."""

import heddle_compiled as heddle_compiled  # first: it selects compiled modules or sources
