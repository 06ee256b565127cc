"""Policies against baselines at their best settings, on nine cells; see README.md."""
