"""Limits of `heddle plan`: a deadline, and a budget in dollars."""

import re
from typing import Any

import rich_click as click

_MOST = 1e12
"""Seconds of a deadline, and dollars of a budget, that are beyond every rollout."""
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smh])+")
_DOLLARS = re.compile(r"\$?(\d+(?:\.\d+)?)\s*(?:usd|dollars?)?", flags=re.IGNORECASE)


class Duration(click.ParamType[float]):
    """Seconds, from a time with its units."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the seconds."""
        text = str(value).strip().lower()
        parts = re.findall(r"([\d.]+)([smh])", text) if _DURATION.fullmatch(text) else []
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        if not 0.0 < seconds < _MOST:
            self.fail(f"{value!r}: write a time with its unit, as 90s, 20m or 1h30m.", param, ctx)
        return seconds


class Dollars(click.ParamType[float]):
    """An amount of US dollars."""

    name = "dollars"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the amount."""
        found = _DOLLARS.fullmatch(str(value).strip())
        if found is None or not 0.0 < float(found[1]) < _MOST:
            self.fail(
                f"{value!r}: write an amount above 0 in US dollars, as 50 or 12.5. Prices are in "
                "dollars, and no other currency is converted.",
                param,
                ctx,
            )
        return float(found[1])
