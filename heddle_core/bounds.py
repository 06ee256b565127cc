"""Bounds of numbers, declared on the fields of dataclasses that are read from files."""

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be, or each of several; None, where a field may be it, always is."""

    least: float = -inf
    most: float = inf
    above: float = -inf
    """More than this."""
    below: float = inf
    none: str = ""
    """What None means, for messages."""

    def hold(self, value: float) -> bool:
        """Whether a value is within; NaN is not, nor is infinity."""
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

    def fault(self, name: str, value: float | None) -> str:
        """What is wrong with the value of a field; empty where nothing is."""
        if value is None or self.hold(value):
            return ""
        unit = " seconds" if name.endswith("_s") and not name.endswith("per_s") else ""
        remedy = f"; leave it out for {self.none}" if self.none else ""
        return f"{name} must be {self}{unit}, not {value!s:.40}{remedy}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}".replace("e+0", "e")


def bounds_of(cls: type) -> dict[str, Bounds | None]:
    """The bounds of each field of a dataclass."""
    hints: dict[str, Any] = get_type_hints(cls, include_extras=True)
    return {
        name: next((b for b in get_args(hint)[1:] if isinstance(b, Bounds)), None)
        if get_origin(hint) is Annotated
        else None
        for name, hint in hints.items()
    }


_bounds = cache(bounds_of)


def bound_faults(value: Any, where: str = "") -> Iterator[str]:
    """Say which numbers of a dataclass, and of those in it, are out of bounds, by their places."""
    for name, bounds in _bounds(value.__class__).items():
        yield from _faults(f"{where}{name}", getattr(value, name), bounds)


def _faults(place: str, value: Any, bounds: Bounds | None) -> Iterator[str]:
    if isinstance(value, dict):
        items = [(f"{place}.{key}", each) for key, each in value.items()]
    elif isinstance(value, tuple | list):
        items = [(f"{place}[{index}]", each) for index, each in enumerate(value)]
    else:
        items = [(place, value)]
    for name, each in items:
        if is_dataclass(each):
            yield from bound_faults(each, f"{name}.")
        elif bounds is not None and (fault := bounds.fault(name, each)):
            yield fault
