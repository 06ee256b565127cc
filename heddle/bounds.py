"""Bounds of numbers in a configuration, declared on its fields, and one way to say them."""

import typing
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from heddle.config_error import ConfigError

YEAR_S = 31_536_000
"""No limit of a run is longer, nor infinite."""

Count: TypeAlias = Annotated[int, Meta(ge=1)]
Amount: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1e9)]
Share: TypeAlias = Annotated[float, Meta(ge=0.0, lt=1.0)]
Limit: TypeAlias = Annotated[float, Meta(gt=0.0, le=YEAR_S)]
"""Seconds after which something ends."""


def check_bounds(config: Any, prefix: str = "") -> None:
    """Check the numbers of a configuration; messages name a field with `prefix` before it.

    Raises:
        ConfigError: one is out of its bounds.
    """
    for name, bounds in bounds_of(config.__class__).items():
        value = getattr(config, name)
        if value is not None and not _within(value, bounds):
            raise ConfigError(f"{prefix}{name} must be {in_words(bounds)}, not {value:g}")


@lru_cache
def bounds_of(cls: Hashable) -> dict[str, Meta]:
    """Bounds by field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: meta for name, hint in hints.items() for meta in _metas(hint)}


def _metas(hint: Any) -> Iterator[Meta]:
    """Bounds of a type, or of one of several that a field may have."""
    if typing.get_origin(hint) is Annotated:
        yield from (each for each in hint.__metadata__ if isinstance(each, Meta))
    elif type(None) in typing.get_args(hint):
        for each in typing.get_args(hint):
            yield from _metas(each)


def _within(value: float, bounds: Meta) -> bool:
    """Whether a number, which is not NaN, is within its bounds."""
    return (
        value == value
        and (bounds.ge is None or value >= bounds.ge)
        and (bounds.gt is None or value > bounds.gt)
        and (bounds.le is None or value <= bounds.le)
        and (bounds.lt is None or value < bounds.lt)
    )


def in_words(bounds: Meta) -> str:
    """Bounds in words, after "must be": `from 1 to 8`, `1 or more`, `more than 0`."""
    least = bounds.gt if bounds.ge is None else bounds.ge
    most = bounds.lt if bounds.le is None else bounds.le
    below = "below " if bounds.le is None else ""
    if bounds.ge is None:
        last = "" if most is None else f" and {below or 'at most '}{_number(most)}"
        return f"more than {_number(least)}{last}"
    if most is None:
        return f"{_number(least)} or more"
    return f"from {_number(least)} to {below}{_number(most)}"


def _number(value: float | None) -> str:
    return f"{int(value):,}" if value is not None and value == int(value) else f"{value}"
