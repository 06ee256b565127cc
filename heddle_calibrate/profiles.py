"""Profiles as files: the text that `read_profile` and `load_training` of heddle_sim read."""

import json
from dataclasses import asdict, fields
from typing import Any

from heddle_sim.profile_files import Profile
from heddle_sim.training_files import TrainingFile


def encode_profile(profile: Profile | TrainingFile) -> bytes:
    """Format a profile as JSON in the order of its fields, without those that have the default."""
    plain = _without_defaults(profile)
    if isinstance(profile, Profile):
        plain["source"] = _without_defaults(profile.source)
        if not profile.heads:
            del plain["heads"]
        for layout, entry in profile.tables.items():
            if entry.belief.filling is None:
                del plain["tables"][layout]["belief"]["filling"]
    return encode_plain(plain)


def encode_plain(plain: object) -> bytes:
    """Format plain values as JSON, a line for each field."""
    return (_text(plain) + "\n").encode()


def _without_defaults(section: Any) -> dict[str, Any]:
    default = {field.name: field.default for field in fields(section)}
    plain: dict[str, Any] = asdict(section)
    return {key: value for key, value in plain.items() if value != default[key]}


def _text(value: object, indent: int = 0) -> str:
    """One line per field, lists of plain values on one line."""
    pad = " " * (indent + 2)
    if isinstance(value, dict) and value:
        lines = [f"{pad}{json.dumps(k)}: {_text(v, indent + 2)}" for k, v in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return json.dumps(value, allow_nan=False)
