"""Times as logs write them, in seconds; and waits between them."""

from datetime import UTC, datetime
from typing import Any, Final

from heddle_trace.importers.notes import DamagedError, Notes

SLACK_S: Final = 1.0
"""Two clocks of one log may differ by this; more is a clock that goes backwards."""

# Unix times from 2001 to 2286 in seconds; a thousand times as much is milliseconds, and so on.
_UNITS = ((1e9, 1e10, 1.0), (1e12, 1e13, 1e-3), (1e15, 1e16, 1e-6), (1e18, 1e19, 1e-9))


def seconds(value: Any) -> float | None:
    """A Unix time in any of the usual units, or ISO 8601, as Unix seconds; None for None.

    A time without a zone is taken as UTC: only differences matter. Raises DamagedError for what is
    no time.
    """
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise DamagedError(f"{value[:40]!r} is no time; ISO 8601 is expected") from None
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DamagedError(f"a time is a {type(value).__name__}; a number or ISO 8601 is expected")
    for low, high, unit in _UNITS:
        if low <= value < high:
            return value * unit
    raise DamagedError(f"{value:g} is no Unix time in seconds, milliseconds, micro- or nanoseconds")


def elapsed(earlier_s: float, later_s: float, what: str, notes: Notes) -> float:
    """Seconds from one time to a later one, to the microsecond.

    Up to `SLACK_S` backwards counts as 0 and is noted; raises DamagedError for more.
    """
    passed = later_s - earlier_s
    if passed < 0:
        if passed < -SLACK_S:
            raise DamagedError(f"the clock goes backwards by {round(-passed, 3):,.12g} s {what}")
        notes.assume(f"spans of 0 to -{SLACK_S:g} s, from clocks that differ, taken as 0")
        return 0.0
    return round(passed, 6)
