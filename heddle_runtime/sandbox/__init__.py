"""Isolation of tool calls: `runner` starts a supervisor process for each program.

All modules but `runner` also run in a bare interpreter (`python -S`), so they import the standard
library only. `runner` reads the supervisor's report.
"""
