"""GPUs of a loop that generate and train by turns."""

from heddle.loops.config import LoopConfig
from heddle.loops.data import UnfitError
from heddle.workload import CapacityError
from heddle_core.loop.regime import Regime


def own_gpus(regime: Regime) -> int:
    """GPUs of a hybrid pool that belong to neither side."""
    return 0 if regime.split.hybrid is None else regime.split.hybrid.own_gpus


def without_pool(config: LoopConfig, name: str, regime: Regime) -> LoopConfig:
    """The loop whose engines have the rollout's own GPUs, without those of a hybrid pool.

    Raises:
        CapacityError: these, or those of the pool, are no whole engines.
        UnfitError: engines and trainer have GPUs of several types.
    """
    hybrid, cluster = regime.split.hybrid, config.run.cluster
    if hybrid is None:
        return config
    if {gpu.lower() for gpu in config.run.cluster.pools} != {config.trainer_gpu}:
        raise UnfitError(
            f"regime {name} moves GPUs between rollout and training, which have other types here: "
            "give both one type"
        )
    own, each = hybrid.own_gpus, cluster.engine_gpus
    left = cluster.gpus - own
    if left < each or left % each:
        raise CapacityError(
            f"regime {name} has a pool of {own} of the {cluster.gpus} GPUs that do not train, "
            f"which leaves {max(left, 0)} for engines of {each}; take more --gpus or pool_gpus=0"
        )
    pool = own or config.train_gpus
    if pool < each or pool % each:
        raise CapacityError(
            f"regime {name} generates on {pool} more GPUs for a while, which are no whole engines "
            f"of {each} GPUs; take other {'pool_gpus' if own else 'loop.train_gpus'}, or another "
            "--tp"
        )
    return config.on(gpus=left)
