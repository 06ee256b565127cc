"""Regimes as text: a name, parameters of its function, and fields of its parts."""

import typing
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal

from heddle_core.loop.presets import REGIMES, RegimePreset
from heddle_core.loop.regime import (
    Batching,
    BatchShape,
    Regime,
    RegimeError,
    Sampling,
    SharedGpusError,
    Staleness,
    Update,
)

MOST: Final = 1_000_000
"""Of any parameter."""

PARTS: Final[Mapping[str, type]] = {
    "sampling": Sampling,
    "staleness": Staleness,
    "batching": Batching,
    "update": Update,
}
"""Parts whose fields may be given in place of those of a named regime."""


def regime_named(text: str, shape: BatchShape) -> Regime:
    """Make a regime from ``NAME`` or ``NAME:PARAMETER=VALUE:PART.FIELD=VALUE:...``.

    Raises:
        RegimeError: an unknown name, parameter or field, a value out of range, parts that
            contradict each other, or GPUs that this regime cannot share.
    """
    preset, parameters, parts = read_regime(text)
    if shape.colocated and not preset.can_share_gpus:
        raise SharedGpusError(
            f"regime {text.partition(':')[0]} generates while it trains, so the two need GPUs of "
            "their own: leave out loop.colocated"
        )
    try:
        made = preset.make(shape, **parameters)
        own: dict[str, Any] = {
            part: replace(getattr(made, part), **fields) for part, fields in parts.items()
        }
        return replace(made, **own)
    except ValueError as error:
        raise RegimeError(f"regime {text}: {error}") from None


def read_regime(text: str) -> tuple[RegimePreset, dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the text of a regime: its preset, parameters, and fields by part.

    Raises:
        RegimeError: an unknown name, parameter or field, or a value out of range.
    """
    name, *settings = text.split(":")
    preset = REGIMES.get(name)
    if preset is None:
        raise RegimeError(f"no regime is named {name!r}; there are {', '.join(REGIMES)}")
    kinds = {key: type(value) for key, value in preset.parameters.items()} | _part_fields()
    given: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in kinds:
            raise RegimeError(f"regime {name} has no parameter {key!r}; {_known(preset, key)}")
        if key in given:
            raise RegimeError(f"regime {name}: {key} is given twice")
        given[key] = _value(name, key, value, kinds[key])
    parts: dict[str, dict[str, Any]] = {}
    for key in [key for key in given if "." in key]:
        part, _, field = key.partition(".")
        parts.setdefault(part, {})[field] = given.pop(key)
    return preset, given, parts


def _part_fields() -> dict[str, Any]:
    """Types of the fields of all parts, by ``PART.FIELD``."""
    return {
        f"{part}.{field}": hint
        for part, kind in PARTS.items()
        for field, hint in typing.get_type_hints(kind).items()
    }


def _known(preset: RegimePreset, key: str) -> str:
    """What may be given in place of an unknown parameter or field."""
    part, dot, _ = key.partition(".")
    if dot and part in PARTS:
        return f"{part} has {', '.join(typing.get_type_hints(PARTS[part]))}"
    own = ", ".join(preset.parameters)
    return (f"it has {own}" if own else "it has none") + f", and the fields of {', '.join(PARTS)}"


def _value(name: str, key: str, text: str, kind: Any) -> Any:
    """A value of a type, or of one of its literals; ``none`` where it may be None."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        if text not in options:
            raise RegimeError(
                f"regime {name}: {key} must be one of {', '.join(options)}, not {text!r}"
            )
        return text
    if options:
        if text.lower() == "none":
            return None
        kind = options[0]
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
