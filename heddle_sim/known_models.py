"""Configurations of models that need no file: those of `configs.json`, by name or id."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast, get_args

from heddle_sim.config_fields import ModelConfigError
from heddle_sim.model_names import known_model, short_model_name
from heddle_sim.model_shape import Precision

KNOWN = Path(__file__).with_name("configs.json")
QWEN_FP8 = MappingProxyType({"quant_method": "fp8", "weight_block_size": [128, 128]})
"""What Qwen's repositories in FP8 add to the configuration of those in bf16."""


@cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Read the configurations of `configs.json`, by their Hugging Face ids."""
    values: dict[str, dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return MappingProxyType(values)


def known_config(name: str) -> Mapping[str, Any]:
    """Return the configuration of a known model, by its id or the part after the slash.

    Variants such as "-Instruct-2507" have the shape of their base. Raises KeyError.
    """
    wanted = name.lower()
    organisation, _, _ = wanted.rpartition("/")
    shorts = {key: key.lower().partition("/") for key in known_configs()}
    for key, (_, _, short) in shorts.items():
        if wanted in (key.lower(), short):
            return known_configs()[key]
    for key, (own, _, short) in shorts.items():
        if organisation in ("", own) and short_model_name(name, (short,)) == short:
            return known_configs()[key]
    raise KeyError(name)


def listed_config(name: str) -> tuple[Mapping[str, Any], Precision | None]:
    """Return the configuration of a model of `models.json`, and the precision that its name states.

    None: the precision is the configuration's. Raises KeyError for an unknown model,
    ModelConfigError for a precision that is not modelled.
    """
    try:
        return known_config(name), None
    except KeyError:
        found = known_model(name)
        if found is None:
            raise
    values = known_configs()[found.config]
    if found.own_precision:
        return values, None
    owner = name.lower().rpartition("/")[0] or found.config.lower().partition("/")[0]
    if (owner, found.precision) == ("qwen", "fp8"):
        return {**values, "quantization_config": QWEN_FP8}, None
    if found.precision not in get_args(Precision):
        raise ModelConfigError(
            f"{name}: weights in {found.precision} are not modelled; take the repository in "
            f"another precision ({', '.join(get_args(Precision))})"
        )
    return values, cast(Precision, found.precision)
