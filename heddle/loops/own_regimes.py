"""Regimes of one's own: the sections `[regimes.NAME]` of a configuration."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heddle.config_error import require
from heddle.search.policies import expanded
from heddle_core.loop.presets import REGIMES
from heddle_core.loop.regime import BatchShape
from heddle_core.loop.regime_text import MOST, regime_named

LEAST = BatchShape(groups=1, samples=2, slots=MOST, colocated=False)
"""A small batch, of GRPO: what a regime may ask is within it."""


def check_own_regime(name: str, table: Mapping[str, Any]) -> None:
    """Refuse a section that is no regime.

    Raises:
        ValueError: its name, or a key or value in it, cannot be; the message has the remedy.
    """
    require(name not in REGIMES, f"{name} is a regime of Heddle's: take another name")
    require(
        bool(name) and not set(name) & set(":=,*?[ ") and name != "all",
        "a name has no spaces and none of : = , * ? [, and is not all: take another name",
    )
    base = table.get("regime")
    require(
        isinstance(base, str) and ":" not in base,
        'it needs the regime that it is of, as in regime = "areal"',
    )
    regime_named(regime_text(table), LEAST)


def regime_text(table: Mapping[str, Any]) -> str:
    """Return a section as ``REGIME:PARAMETER=VALUE:PART.FIELD=VALUE``."""
    settings = [f"{key}={value}" for key, value in _flat(table, "") if key != "regime"]
    return ":".join([table["regime"], *settings])


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else f"{value}"


def regime_names(given: str | Sequence[str], own: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Read names of regimes, in text with commas between; one's own become
    REGIME:PARAMETER=VALUE, patterns all they match.

    Raises:
        ConfigError: no name, a pattern that matches none, or two names of one regime.
    """
    if isinstance(given, str):
        given = [name for name in (name.strip() for name in given.split(",")) if name]
        require(bool(given), "--regimes names no regime; `heddle regimes list` has all")
    found: dict[str, str] = {}
    for name in expanded(given, [*REGIMES, *own], "regimes"):
        first, colon, rest = name.partition(":")
        text = regime_text(own[first]) + colon + rest if first in own else name
        same = found.setdefault(text, name)
        require(same == name, f"regimes {same} and {name} are the same, {text}: leave one out")
    return list(found)
