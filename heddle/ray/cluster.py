"""Connection to a Ray cluster."""

import os
from contextlib import suppress
from typing import Any

from heddle.config_error import ConfigError
from heddle.signals import handlers_kept


def connected(option: str) -> Any:
    """The library, connected to the cluster of RAY_ADDRESS, to this machine's, or to a new one.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers; the message names `option`.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"{option} needs Ray: pip install 'heddle-rl[ray]'") from None
    if not ray.is_initialized():
        try:
            with handlers_kept():
                ray.init(log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            where = os.environ.get("RAY_ADDRESS", "this machine")
            raise ConfigError(
                f"no Ray cluster answers at {where} ({error}): start one with `ray start --head`, "
                "or unset RAY_ADDRESS to use this machine alone"
            ) from None
    return ray


def is_connected() -> bool:
    """Whether this process uses a cluster already."""
    with suppress(ModuleNotFoundError):
        import ray

        return bool(ray.is_initialized())
    return False
