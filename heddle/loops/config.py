"""What `heddle loop` runs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from heddle.bounds import Bounds
from heddle.config import RunConfig
from heddle.config_error import require
from heddle.loops.settings import MOST_BATCHES, LoopSettings


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
    seeds: int = 1
    begun: bool = False
    """Whether an epoch of the trace's first samples is over, where prompts have an `epoch_plan`."""

    def __post_init__(self) -> None:
        require(bool(self.regimes), "--regimes names no regime")
        require(
            not self.run.cluster.pool,
            "cluster.pool: the engines of a loop have GPUs of one class, which its trainer takes "
            "its own from: give --gpu and --gpus in place of pools",
        )
        require(self.seeds >= 1, f"--seeds must be 1 or more, not {self.seeds}")
        LoopSettings.__post_init__(self)

    @property
    def trainer_gpus(self) -> int:
        """GPUs of the trainer; all if they are shared."""
        return self.run.cluster.gpus if self.colocated else self.train_gpus

    def on(self, **cluster: Any) -> "LoopConfig":
        """The same loop with other values of its cluster."""
        run = replace(self.run, cluster=replace(self.run.cluster, **cluster))
        return replace(self, run=run)


def loop_of(run: RunConfig, regimes: Sequence[str], *, seeds: int = 1) -> LoopConfig:
    """Return the loop that a configuration's `[loop]` says, with usual values for what it leaves
    open (`heddle.loops.fit`).

    Raises:
        ConfigError: a value does not fit the others.
    """
    given = {each.name: getattr(run.loop, each.name) for each in fields(LoopSettings)}
    for name in ("batches", "groups", "samples"):
        if given[name] is None:
            del given[name]
    if run.loop.train_gpus is None:
        given["train_gpus"] = max(1, (run.cluster.gpus - run.loop.reward_gpus) // 4)
    return LoopConfig(run=run, regimes=tuple(regimes), seeds=seeds, **given)
