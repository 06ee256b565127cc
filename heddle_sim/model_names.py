"""Names of models: those of profiles, and the Hugging Face ids that stand for them."""

import difflib
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MODELS_FILE = Path(__file__).with_name("models.json")
_VARIANT = re.compile(
    r"-(?:(?:instruct|thinking|reasoning|chat|base|it)(?:-\d{4})?|\d{4}|1m)(?=-|$)"
)
"""What is in an id, but changes neither shape nor precision."""
_QUANTISED = re.compile(
    r"[-_](?:quantized\.)?(nvfp4|mxfp4|fp4|fp8|bf16|awq|gptq|w4a16|int4|int8|w8a8|w8a16)"
    r"(?:a16)?(?:[-._].*)?$"
)
_INT8 = re.compile(r"int8|8bit|w8a(?:8|16)")
_PRECISIONS = {"fp4": "nvfp4", "awq": "int4", "gptq": "int4", "w4a16": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """What an id says of a model whose shape `models.json` has."""

    shape: str
    config: str
    """Id of the configuration of the shape."""
    own_precision: bool
    """Whether the precision is that of this configuration."""
    precision: str
    profile: str
    """Name that a shipped profile of this shape and precision has."""


@cache
def listed_models() -> Mapping[str, Mapping[str, Any]]:
    """Read `models.json`: `sources`, `shapes` by name, and `ids` of repositories."""
    values: dict[str, dict[str, Any]] = json.loads(MODELS_FILE.read_text(encoding="utf-8"))
    return values


@cache
def _shapes_by_name() -> Mapping[str, str]:
    shapes = listed_models()["shapes"]
    return {alias: name for name, s in shapes.items() for alias in (name, *s.get("same", ()))}


def known_model(model: str) -> KnownModel | None:
    """Return shape and precision that a name or Hugging Face id stands for; None if unknown.

    A precision in the name (FP8, NVFP4, AWQ ...) counts; without one the model has that of the
    configuration.
    """
    plain = _plain(model)
    quantised = _QUANTISED.search(plain)
    base = plain[: quantised.start()] if quantised else plain
    names = _shapes_by_name()
    name = next((names[n] for n in (base, _VARIANT.sub("", base)) if n in names), None)
    if name is None:
        return None
    shapes = listed_models()["shapes"]
    own = shapes[name]["precision"]
    precision = own
    if quantised:
        stated = quantised.group(1)
        int8 = "fp8" not in quantised.group() and _INT8.search(quantised.group())
        precision = "int8" if int8 else _PRECISIONS.get(stated, stated)
    like = shapes[name].get("like", name)
    same = precision == shapes[like]["precision"]
    return KnownModel(
        shape=name,
        config=shapes[name]["config"],
        own_precision=precision == own,
        precision=precision,
        profile=like if same else f"{like}-{precision}",
    )


def short_model_name(model: str, known: Container[str]) -> str:
    """Return the name among `known` that a name or Hugging Face id stands for, else it in lower
    case.

    The organisation, "Meta-" and variants such as "-Instruct-2507" do not count, and models of one
    shape and precision share a profile: ``Qwen/Qwen3-Coder-30B-A3B-Instruct`` is
    ``qwen3-30b-a3b``, ``deepseek-ai/DeepSeek-R1`` is ``deepseek-v3``.
    """
    plain, found = _plain(model), known_model(model)
    names = [model.lower(), plain, _VARIANT.sub("", plain)]
    return next((n for n in (*names, found.profile if found else "") if n in known), names[0])


def _plain(model: str) -> str:
    return model.lower().rpartition("/")[2].removeprefix("meta-")


def nearest_ids(model: str) -> list[str]:
    """Return listed repository ids of known shapes whose names are most like that of a model."""
    names = {_plain(each): each for each in listed_models()["ids"] if known_model(each)}
    return [names[n] for n in difflib.get_close_matches(_plain(model), names, n=3, cutoff=0.5)]


def unknown_name(what: str, name: str, names: Sequence[str]) -> str:
    """Say that a model or GPU class has no shipped profile, with the nearest name and all."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (
        f"unknown {what} {name!r}{hint} Known: {', '.join(names)}; "
        "or give the path of a profile file ending in .json as the model"
    )


def from_config_command(model: str, gpu: str) -> str:
    """Name the command that makes a profile of any other model or class."""
    source = model if "/" in model else "CONFIG.json"
    return f"make one with: heddle profile from-config {source} --gpu {gpu or 'GPU'} -o FILE.json"
