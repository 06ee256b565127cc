"""What `heddle loop` runs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from heddle.config import RunConfig
from heddle.config_error import require
from heddle.loops.settings import MOST_BATCHES, LoopSettings
from heddle_core.bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig(LoopSettings):
    """An RL loop on a cluster. `run.cluster.gpus` are the GPUs of the rollout engines.

    Raises:
        ConfigError: a value out of range.
    """

    run: RunConfig
    regimes: tuple[str, ...]
    batches: Annotated[int, Bounds(2, MOST_BATCHES)] = 10
    groups: Annotated[int, Bounds(1)] = 32
    samples: Annotated[int, Bounds(1)] = 16
    train_gpus: Annotated[int, Bounds(1)] = 8
    """GPUs of the trainer; those of the engines if they share them."""
    seeds: int | None = 1
    """None: three of the best settings, one where a run takes over a minute."""
    least_samples: Annotated[int, Bounds(1)] = 1
    """Prompts of the trace with fewer samples take no part."""
    most_tokens: Annotated[int | None, Bounds(1)] = None
    """Of a sample in training; longer ones take no part, where `cluster.over_capacity` is drop."""
    begun: bool = False
    """Whether an epoch of the trace's first samples is over, where prompts have an `epoch_plan`."""

    def __post_init__(self) -> None:
        require(bool(self.regimes), "--regimes names no regime")
        require(
            not self.run.cluster.pool or self.train_gpu is not None,
            "cluster.engines: of several GPU types all generate: give loop.train_gpu, the GPU type "
            "of the trainer, and loop.train_gpus, which it has beside them",
        )
        require(
            self.seeds is None or self.seeds >= 1, f"--seeds must be 1 or more, not {self.seeds}"
        )
        LoopSettings.__post_init__(self)

    @property
    def trainer_gpus(self) -> int:
        """GPUs of the trainer; all if they are shared."""
        return self.run.cluster.gpus if self.colocated else self.train_gpus

    @property
    def trainer_gpu(self) -> str:
        return (self.train_gpu or self.run.cluster.gpu).lower()

    def on(self, **cluster: Any) -> "LoopConfig":
        """The same loop with other values of its cluster."""
        run = replace(self.run, cluster=replace(self.run.cluster, **cluster))
        return replace(self, run=run)


def loop_of(run: RunConfig, regimes: Sequence[str], *, seeds: int | None = 1) -> LoopConfig:
    """Return the loop that a configuration's `[loop]` says, with usual values for what it leaves
    open (`heddle.loops.fit`).

    Raises:
        ConfigError: a value does not fit the others.
    """
    require(
        not run.loop.shared_gpus,
        "loop.shared_gpus is of `heddle loop` with a file for each loop: leave it out",
    )
    given = {each.name: getattr(run.loop, each.name) for each in fields(LoopSettings)}
    for name in ("batches", "groups", "samples"):
        if given[name] is None:
            del given[name]
    if run.loop.train_gpus is None:
        gpus = run.cluster.gpus
        beside = run.loop.train_gpu is not None
        quarter = gpus // 3 if beside else (gpus - run.loop.reward_gpus) // 4
        given["train_gpus"] = max(1, quarter)
    return LoopConfig(run=run, regimes=tuple(regimes), seeds=seeds, **given)
