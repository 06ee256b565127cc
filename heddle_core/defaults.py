"""Defaults that configuration, simulator and real engines share, each stated once."""

from typing import Final

ENGINE_START_S: Final = 60.0
"""Seconds from the start of an engine until it is ready: loading weights, capturing graphs."""
REPORT_INTERVAL_S: Final = 5.0
"""Seconds between two reports of an engine's counters."""
REPORT_DELAY_S: Final = 0.05
"""Age of a report when it is delivered: a router never sees current counters."""
SPARE_SLOTS: Final = 4
"""Requests that an engine runs beyond `max_running` to receive or to export KV."""
HANG_S: Final = 30.0
"""Seconds after which an engine that sends nothing and uses no CPU time has hung. An iteration on a
busy machine takes seconds; what is silent for minutes, such as compiling, uses the CPU."""
