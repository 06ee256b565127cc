"""Torch and transformers, which only some models need and which are not installed by default."""

from importlib import import_module
from typing import Any

from heddle_predict.errors import PredictError


def needed(module: str, what: str) -> Any:
    """Import an optional library.

    Raises:
        PredictError: it is not installed; the message states how to install it.
    """
    try:
        return import_module(module)
    except ImportError:
        raise PredictError(
            f"{what} needs {module}, which is not installed: pip install 'heddle-rl[learn]'; "
            "--model trees works without"
        ) from None
