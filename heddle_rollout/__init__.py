"""Drives the core: one driver, with a simulated or a real clock and simulated or real engines."""
