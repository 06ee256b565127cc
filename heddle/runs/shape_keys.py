"""Data with mappings by engine shape, as JSON and back: JSON has no such keys.

A mapping `by_shape`, or `..._by_shape`, becomes a list of pairs, each of a shape and its value.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec

from heddle_core.ids import EngineShape

_FIELD = "by_shape"


def to_plain(value: Any) -> Any:
    """Return a dataclass, or what such a field holds, as JSON values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        if any(isinstance(key, EngineShape) for key in value):
            return [[msgspec.to_builtins(key), to_plain(v)] for key, v in value.items()]
        return {str(key): to_plain(v) for key, v in value.items()}
    return msgspec.to_builtins(value, str_keys=True, enc_hook=str)


def from_plain(value: Any) -> Any:
    """Return JSON values with every such field as a mapping again, for `msgspec.convert`.

    Raises:
        msgspec.ValidationError: a key is no engine shape.
    """
    if not isinstance(value, dict):
        return value
    return {
        key: _by_shape(v) if key.endswith(_FIELD) and isinstance(v, list) else from_plain(v)
        for key, v in value.items()
    }


def _by_shape(pairs: list[Any]) -> dict[EngineShape, Any]:
    known = msgspec.convert(pairs, list[tuple[EngineShape, Any]])
    return {shape: from_plain(value) for shape, value in known}
