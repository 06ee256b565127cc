"""Drives the core in any world: one driver, whose clock and engines are simulated or real."""
