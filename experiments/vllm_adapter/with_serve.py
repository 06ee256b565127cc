"""`heddle run` with a `vllm serve` for each engine."""

import asyncio
from pathlib import Path
from unittest.mock import patch

from experiments.vllm_adapter.serve_launcher import ServeLauncher
from heddle import stages
from heddle.cli import main
from heddle.engines import vllm_settings
from heddle.setup import RunSetup
from heddle_runtime.clock import RunClock


def serve_stage(setup: RunSetup, path: Path) -> stages.Stage:
    """Make what a run needs, as `heddle.stages.vllm_stage` does."""
    launcher = ServeLauncher(vllm_settings(setup.config), log_dir=path / "engines")
    return stages._stage(setup.config, RunClock(asyncio.get_running_loop()), launcher)


if __name__ == "__main__":
    with patch.object(stages, "vllm_stage", serve_stage):
        main()
