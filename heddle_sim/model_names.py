"""Names of models: those of profiles, and the Hugging Face ids that stand for them."""

import re
from collections.abc import Container

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
