"""The fields of a configuration file, with errors that name the file and the field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST = 10**9
"""Larger numbers are mistakes."""


class ModelConfigError(ValueError):
    """A config.json that cannot be read, or a model that the roofline does not cover."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one file, with errors that name it."""

    place: str
    values: Mapping[str, Any]

    @classmethod
    def of_file(cls, file: Path) -> "Fields":
        """Read a config.json.

        Raises:
            ModelConfigError: it cannot be read, or holds no JSON object.
        """
        return cls(str(file), read_object(file))

    def wrong(self, why: str) -> ModelConfigError:
        """Return an error that names the file."""
        return ModelConfigError(f"{self.place}: {why}")

    def count(self, *names: str, default: int | None = None) -> int:
        """Return the first of `names` that is there, as a number of at least 0."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
                raise ModelConfigError(
                    f"{self.place}: {name} must be a whole number from 0 to {MOST:,}, not {value!r}"
                )
            return value
        if default is not None:
            return default
        raise ModelConfigError(
            f"{self.place}: the field {' or '.join(names)} is missing; give the complete "
            "config.json of the model, as on its Hugging Face page"
        )

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a field that is true or false; null is false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool | None):
            raise self.wrong(f"{name} must be true or false, not {value!r}")
        return bool(value)

    def positive(self, *names: str, default: int | None = None) -> int:
        value = self.count(*names, default=default)
        if value < 1:
            raise ModelConfigError(f"{self.place}: {names[0]} must be at least 1, not {value}")
        return value


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; ModelConfigError says what it holds instead."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ModelConfigError(
            f"cannot read {file}: {e.strerror}; give a config.json, or the folder that holds it"
        ) from None
    except (ValueError, RecursionError) as e:
        raise ModelConfigError(f"{file}: not JSON ({e}); give a model's config.json") from None
    if not isinstance(values, dict):
        raise ModelConfigError(f"{file}: holds no JSON object; give a model's config.json")
    return values
