"""Limits of `heddle plan`: a deadline, and a budget in dollars."""

import re

from heddle.cli.options import read_as

_MOST = 1e12
"""Seconds of a deadline, and dollars of a budget, that are beyond every rollout."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smh])+")
_DOLLARS = re.compile(r"\$?(\d+(?:\.\d+)?)\s*(?:usd|dollars?)?", flags=re.IGNORECASE)


def _duration(given: str) -> float:
    text = given.strip().lower()
    parts = re.findall(r"([\d.]+)([smh])", text) if _DURATION.fullmatch(text) else []
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 0.0 < seconds < _MOST:
        raise ValueError(f"{given!r}: write a time with its unit, as 90s, 20m or 1h30m.")
    return seconds


def _dollars(text: str) -> float:
    found = _DOLLARS.fullmatch(text.strip())
    if found is None or not 0.0 < float(found[1]) < _MOST:
        raise ValueError(
            f"{text!r}: write an amount above 0 in US dollars, as 50 or 12.5. Prices are in "
            "dollars, and no other currency is converted."
        )
    return float(found[1])


DURATION = read_as("time", _duration)
"""Seconds, from a time with its units."""
DOLLARS = read_as("dollars", _dollars)
"""An amount of US dollars."""
