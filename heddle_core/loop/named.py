"""Makes a regime from its name and parameters as text."""

from dataclasses import fields, replace
from typing import Any, Final

from heddle_core.loop.presets import REGIMES
from heddle_core.loop.regime import BatchShape, Regime, RegimeError

MOST: Final = 1_000_000
"""Of any parameter."""


def regime_named(text: str, shape: BatchShape) -> Regime:
    """Make a regime from ``NAME`` or ``NAME:PARAMETER=VALUE:...``.

    Raises:
        RegimeError: an unknown name or parameter, a value out of range, or GPUs that this regime
            cannot share.
    """
    name, *settings = text.split(":")
    cls = REGIMES.get(name)
    if cls is None:
        raise RegimeError(f"no regime is named {name!r}; there are {', '.join(REGIMES)}")
    preset: Any = cls()
    known = {field.name: type(getattr(preset, field.name)) for field in fields(preset)}
    given: set[str] = set()
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in known:
            raise RegimeError(
                f"regime {name} has no parameter {key!r}; "
                + (f"it has {', '.join(known)}" if known else "it has none")
            )
        if key in given:
            raise RegimeError(f"regime {name}: {key} is given twice")
        given.add(key)
        preset = replace(preset, **{key: _value(name, key, value, known[key])})
    if shape.colocated and not cls.can_share_gpus:
        raise RegimeError(
            f"regime {name} generates while it trains, so the two need GPUs of their own: leave "
            "out loop.colocated"
        )
    try:
        regime: Regime = preset.regime(shape)
    except ValueError as error:
        raise RegimeError(f"regime {text}: {error}") from None
    return regime


def _value(name: str, key: str, text: str, kind: type) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        value = kind(text)
    except (KeyError, ValueError):
        what = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
        raise RegimeError(f"regime {name}: {key} must be {what}, not {text!r}") from None
    if not 0 <= value <= MOST:
        raise RegimeError(f"regime {name}: {key} must be from 0 to {MOST:,}, not {text}")
    return value
