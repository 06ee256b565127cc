"""Regimes at every setting that is tried: what `heddle loop` runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from heddle.comparison.tuning import Choice
from heddle.cost.objective import Objective
from heddle.loops.comparison import compare_regimes, prepare_regimes
from heddle.loops.config import LoopConfig
from heddle.loops.fit import fitted, with_trainer, without_dropped
from heddle.loops.remedy import UNFIT, Given, with_remedy
from heddle.loops.result import LoopComparison
from heddle.loops.setup import LoopSetup
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
    given: Given = lambda _: (),
) -> LoopComparison:
    """Run the regimes of a loop, whose `run.cluster.gpus` are all GPUs, at every setting.

    `swept` are values of `loop.train_gpus`, `cluster.tp` and `cluster.max_running`; `speculation`
    as of `heddle.loops.splits.splits`, `given` as of `heddle.loops.remedy`, the rest as of
    `compare_regimes`.

    Raises:
        ValueError: one of the packages' errors for bad input, before the first run.
        WorkerError: a process of `jobs` was killed.
    """
    shared = Workspace() if workspace is None else workspace
    best = BEST in (swept.get("loop.train_gpus"), swept.get("cluster.tp"))
    fitting_only = best or speculation is not None

    def made(one: LoopConfig) -> tuple[list[LoopConfig], list[str]]:
        own, trainer = with_trainer(one, shared)
        numbers = swept.get("loop.train_gpus") or [own.train_gpus]
        degrees = swept.get("cluster.tp") or [one.run.cluster.tp]
        tried = splits(own, numbers, degrees, swept.get("cluster.max_running"), speculation)
        tried, dropped = without_dropped(tried, shared, fitting_only)
        tried, notes = fitted(tried, shared)
        return beside_random(tried), [*trainer, *dropped, *notes]

    def ready(one: LoopConfig) -> list[LoopSetup]:
        return prepare_regimes(made(one)[0], shared, fitting_only)[0]

    try:
        tried, notes = made(loop)
        return compare_regimes(
            tried,
            workspace=shared,
            notes=notes,
            fitting_only=fitting_only,
            objective=objective,
            jobs=jobs,
            executor=loop.run.runtime.executor,
            out=out,
            on_progress=on_progress,
        )
    except UNFIT as error:
        raise with_remedy(error, loop, ready, swept, given) from None
