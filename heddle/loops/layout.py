"""The trainer's layout: as given, or the least that fits into memory; GPUs of hybrid pools."""

import math

from heddle.loops.config import LoopConfig
from heddle.loops.data import UnfitError
from heddle.workload import CapacityError
from heddle_core.loop.regime import Regime
from heddle_sim.trained_models import trained_model
from heddle_sim.training import TrainingError, TrainLayout
from heddle_sim.training_memory import TrainingMemoryError, check_memory

NODE_EXPERTS = 8
"""Expert parallelism within a node of 8 GPUs, as most published layouts have it."""

MOST_GPUS = 1 << 14
"""Of a trainer, times the degrees that are given; all that are tried divide them."""


class PoolError(TrainingError):
    """GPUs of a hybrid pool on which no trainer has the layout that it has without them."""

    def __init__(self, problem: str, pool_gpus: int) -> None:
        """`pool_gpus`: the fewest that would do; 0 where more would leave no engine."""
        super().__init__(f"{problem}; take pool_gpus={pool_gpus}")
        self.pool_gpus = pool_gpus


def fitting_layout(config: LoopConfig, gpus: int, longest: int, joined: int) -> TrainLayout:
    """The layout that is given, else the one of least TP and PP that fits into memory.

    It divides `gpus`, and those with `joined` more.

    Raises:
        TrainingMemoryError: none fits; the message says whether more GPUs do.
        PoolError: one fits without the GPUs of the pool.
        TrainingError: the given degrees do not divide the GPUs.
    """
    found = _first_fitting(config, gpus, longest, joined)
    if isinstance(found, TrainLayout):
        return found
    alone = _first_fitting(config, gpus, longest, 0)
    if isinstance(alone, TrainLayout):
        cluster, of_one = config.run.cluster, alone.tp * alone.pp * alone.cp
        least = math.lcm(of_one, cluster.engine_gpus)
        raise PoolError(
            f"a trainer of TP {alone.tp} and PP {alone.pp} fits on {gpus} GPUs, but not on "
            f"{gpus + joined} with those of the pool: pool_gpus must be a multiple of "
            f"{of_one}, not {joined}",
            least if least < cluster.gpus + joined else 0,
        )
    if found is None:
        raise TrainingError(
            f"no trainer of TP {config.train_tp or 'any'}, PP {config.train_pp or 'any'}, CP "
            f"{config.train_cp} and EP {config.train_ep or 'any'} divides {gpus} GPUs: take other "
            "loop.train_tp, loop.train_pp, loop.train_cp, loop.train_ep or loop.train_gpus"
        )
    if ever_fits(config, longest):
        needed = str(found).partition("; ")[0]
        raise TrainingMemoryError(f"{needed}; more GPUs for the trainer would do")
    raise TrainingMemoryError(
        f"a sample of {longest:,} tokens needs more memory in training than any number of "
        f"{config.trainer_gpu} GPUs has; take shorter samples, or a smaller model"
    )


def fits(config: LoopConfig, gpus: int, longest: int) -> bool:
    """Whether a trainer of so many GPUs holds a step."""
    return isinstance(_first_fitting(config, gpus, longest, 0), TrainLayout)


def ever_fits(config: LoopConfig, longest: int) -> bool:
    """Whether a trainer of any number of GPUs holds a step."""
    given = (config.train_tp or 1) * (config.train_pp or 1) * (config.train_ep or 1)
    return fits(config, MOST_GPUS * given * config.train_cp, longest)


def _expert_parallel(config: LoopConfig, stage_gpus: int) -> int:
    """As given, else a node's GPUs where they divide those of a stage; 1 without experts.

    Raises:
        TrainingError: the given degree does not divide the experts.
    """
    model = trained_model(config.run.cluster.model)
    if not model.moe and (config.train_ep or 1) > 1:
        raise TrainingError(
            f"loop.train_ep = {config.train_ep} is of models with experts, and {model.name} has "
            "none: leave it out"
        )
    if not model.moe:
        return 1
    if config.train_ep and model.experts % config.train_ep:
        raise TrainingError(
            f"loop.train_ep = {config.train_ep} does not divide the {model.experts} experts of "
            f"{model.name}: take a divisor of {model.experts}"
        )
    return config.train_ep or math.gcd(stage_gpus, NODE_EXPERTS)


def _first_fitting(
    config: LoopConfig, gpus: int, longest: int, joined: int
) -> TrainLayout | TrainingMemoryError | None:
    """The first layout that fits, else why the last one does not; None if none divides the GPUs."""
    cluster = config.run.cluster
    failed: TrainingMemoryError | None = None
    for pp in [config.train_pp] if config.train_pp else [1, 2, 4, 8, 16]:
        for tp in [config.train_tp] if config.train_tp else [1, 2, 4, 8]:
            of_one = tp * pp * config.train_cp
            if gpus % of_one or joined % of_one:
                continue
            ep = _expert_parallel(config, gpus // pp)
            if (gpus // pp) % ep:
                continue
            layout = TrainLayout(
                tp=tp, pp=pp, cp=config.train_cp, ep=ep, padded=config.train_padded
            )
            try:
                check_memory(
                    cluster.model,
                    gpu=config.trainer_gpu,
                    gpus=gpus,
                    longest=longest,
                    backend=config.train_backend,
                    layout=layout,
                )
            except TrainingMemoryError as error:
                failed = error
            else:
                return layout
    return failed


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
