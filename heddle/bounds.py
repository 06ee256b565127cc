"""Bounds of numbers of a configuration, declared on its fields."""

from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from heddle.config_error import ConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be; None, where its field may be None, is always allowed."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    """More than this."""
    below: float = inf
    none: str = ""
    """What None means, for messages."""

    def hold(self, value: float) -> bool:
        """Whether a value is within; NaN is not."""
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        """As the end of a sentence: ``from 1 to 8,192``."""
        if self.below < inf:
            end = f"below {_number(self.below)}"
        else:
            end = f"at most {_number(self.most)}" if self.most < inf else ""
        if self.above > -inf:
            return f"more than {_number(self.above)}" + (f" and {end}" if end else "")
        first = _number(self.least)
        return f"from {first} to {end.removeprefix('at most ')}" if end else f"{first} or more"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+0", "e")


def check_bounds(config: Any, prefix: str = "") -> None:
    """Compare the numbers of a configuration with the bounds of their fields.

    Raises:
        ConfigError: one is out of range; its key begins with `prefix`.
    """
    for name, bounds in _bounds(config.__class__).items():
        value = getattr(config, name)
        if value is not None and not bounds.hold(value):
            unit = " seconds" if name.endswith("_s") else ""
            remedy = f"; leave it out for {bounds.none}" if bounds.none else ""
            raise ConfigError(f"{prefix}{name} must be {bounds}{unit}, not {value}{remedy}")


@cache
def _bounds(cls: type) -> dict[str, Bounds]:
    hints: dict[str, Any] = get_type_hints(cls, include_extras=True)
    return {
        name: bounds
        for name, hint in hints.items()
        if get_origin(hint) is Annotated
        for bounds in get_args(hint)[1:]
        if isinstance(bounds, Bounds)
    }
