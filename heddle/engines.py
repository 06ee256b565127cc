"""From a configuration to the engines of `heddle run`, checked before anything is started."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle import run_files as files
from heddle.config import RunConfig
from heddle_runtime.engine import Launcher


def model_facts(config: RunConfig, largest_tokens: int) -> Mapping[str, Any]:
    """Check that the engines can be had, and tell what a manifest should say of them.

    Raises:
        ValueError: in one line what is missing, and how to mend it.
    """
    runtime = config.runtime
    if runtime.engine == "fake":
        return {"engine": "fake", "model": config.cluster.model, "gpu": config.cluster.gpu}
    raise NotImplementedError


def open_vllm(config: RunConfig, logs: Path) -> tuple[Launcher, int]:
    """Return a launcher of vLLM engines, and the size of their model's vocabulary."""
    raise NotImplementedError
