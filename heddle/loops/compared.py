"""Regimes at every setting that is tried: what `heddle loop` runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from heddle.comparison.tuning import Choice
from heddle.cost.objective import Objective
from heddle.loops.comparison import compare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.fit import fitted, with_trainer
from heddle.loops.result import LoopComparison
from heddle.loops.splits import beside_random, splits
from heddle.setup import Workspace

BEST: Final = "best"


def compare_settings(
    loop: LoopConfig,
    swept: Mapping[str, Choice],
    speculation: str | None = None,
    *,
    objective: Objective = "makespan",
    jobs: int | None = 1,
    out: Path | None = None,
    workspace: Workspace | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoopComparison:
    """Run the regimes of a loop, whose `run.cluster.gpus` are all GPUs, at every setting.

    `swept` are values of `loop.train_gpus`, `cluster.tp` and `cluster.max_running`; `speculation`
    as of `heddle.loops.splits.splits`, the rest as of `compare_regimes`.

    Raises:
        ValueError: one of the packages' errors for bad input, before the first run.
        WorkerError: a process of `jobs` was killed.
    """
    shared = Workspace() if workspace is None else workspace
    made, trainer = with_trainer(loop, shared)
    numbers = swept.get("loop.train_gpus") or [made.train_gpus]
    degrees = swept.get("cluster.tp") or [loop.run.cluster.tp]
    tried = splits(made, numbers, degrees, swept.get("cluster.max_running"), speculation)
    tried, notes = fitted(tried, shared)
    return compare_regimes(
        beside_random(tried),
        workspace=shared,
        notes=[*trainer, *notes],
        fitting_only=BEST in (numbers, degrees) or speculation is not None,
        objective=objective,
        jobs=jobs,
        executor=loop.run.runtime.executor,
        out=out,
        on_progress=on_progress,
    )
