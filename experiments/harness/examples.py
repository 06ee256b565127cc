"""Single runs whose whole journal an experiment reads."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import heddle
from experiments.harness.jobs import Rollout
from experiments.harness.running import trace_of
from experiments.harness.store import Store
from heddle.config import PolicyConfig
from heddle.runs import Run


@contextmanager
def example_run(
    config: Mapping[str, Any], store: Store, policy: str, model: str = "qwen3-14b"
) -> Iterator[Run]:
    """Simulate the `[example]` of a configuration; its run directory lives as long as the block."""
    rollout = Rollout(
        workload=config["workload"], trajectories=config["trajectories"], seed=config["seed"]
    )
    cluster = heddle.ClusterConfig(
        model=model, gpus=config["gpus"], max_running=config.get("max_running", 100)
    )
    run = heddle.RunConfig(
        trace=str(trace_of(rollout, store.folder)),
        cluster=cluster,
        policy=PolicyConfig(preset=policy),
    )
    with tempfile.TemporaryDirectory(prefix="heddle-experiment-") as folder:
        path = heddle.simulate(run, out=Path(folder)).path
        yield heddle.load_run(path)
        for file in path.iterdir():
            file.chmod(0o644)
