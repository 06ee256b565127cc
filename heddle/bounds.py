"""Bounds of numbers of a configuration, declared on its fields."""

from functools import cache
from typing import Any

from heddle.config_error import ConfigError
from heddle_core.bounds import Bounds, bounds_of


@cache
def _bounds(cls: type) -> dict[str, Bounds]:
    return {name: bounds for name, bounds in bounds_of(cls).items() if bounds is not None}


def check_bounds(config: Any, prefix: str = "") -> None:
    """Compare the numbers of a configuration with the bounds of their fields.

    Raises:
        ConfigError: one is out of range; its key begins with `prefix`.
    """
    for name, bounds in _bounds(config.__class__).items():
        if fault := bounds.fault(name, getattr(config, name)):
            raise ConfigError(f"{prefix}{fault}")
