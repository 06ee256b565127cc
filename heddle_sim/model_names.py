"""Names of models: those of profiles, and the Hugging Face ids that stand for them."""

import difflib
import re
from collections.abc import Container, Sequence

_VARIANT = re.compile(r"-(?:instruct|thinking|chat|base|it)(?:-\d{4})?(?=-|$)")
"""What is in an id, but changes neither shape nor precision."""


def short_model_name(model: str, known: Container[str]) -> str:
    """Return the name among `known` that a name or Hugging Face id stands for, else it in lower
    case.

    The organisation, "Meta-" and variants such as "-Instruct-2507" do not count:
    ``Qwen/Qwen3-30B-A3B-Instruct-2507`` is ``qwen3-30b-a3b``.
    """
    lower = model.lower()
    plain = lower.rpartition("/")[2].removeprefix("meta-")
    return next((n for n in (lower, plain, _VARIANT.sub("", plain)) if n in known), lower)


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
