"""`heddle run` with a `vllm serve` for each engine."""

import asyncio
from pathlib import Path
from unittest.mock import patch

from experiments.vllm_adapter.serve_launcher import ServeLauncher
from heddle import engine_stack
from heddle.cli import main
from heddle.engines import vllm_settings
from heddle.setup import RunSetup
from heddle_runtime.clock import RunClock


def serve_stack(setup: RunSetup, path: Path) -> engine_stack.EngineStack:
    """In place of `heddle.engine_stack.vllm_stack`."""
    launcher = ServeLauncher(vllm_settings(setup.config), log_dir=path / "engines")
    return engine_stack.model_stack(setup.config, RunClock(asyncio.get_running_loop()), launcher)


if __name__ == "__main__":
    with patch.object(engine_stack, "vllm_stack", serve_stack):
        main()
