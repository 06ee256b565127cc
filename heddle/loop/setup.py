"""An RL loop, set up once: its data set, trainer, weight updates and rollout cluster."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from heddle import knowledge
from heddle.config_files import ConfigError
from heddle.loop.config import DOLLARS_PER_GPU_HOUR, LoopConfig
from heddle.loop.data import EPOCH, DataSet, check_recorded
from heddle.loop.measure import LoopFigures, ServiceFigures, TrainedSample
from heddle.setup import RunSetup, Workspace, makespan_bound, memory_profile, prepare
from heddle_core.controller import Controller
from heddle_core.loop.controller import LoopController
from heddle_core.loop.presets import BatchShape, regime_named
from heddle_core.loop.regime import Regime
from heddle_sim.loop import LoopSimulation, LoopWorld
from heddle_sim.training import TrainingError, TrainingProfile, TrainLayout
from heddle_sim.training_files import load_training
from heddle_sim.training_memory import TrainingMemoryError, check_memory
from heddle_sim.weight_update import WeightUpdateTime
from heddle_trace.scripts import Scripts

SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
"""Of all GPUs, that the trainer is tried with."""

LEAST_MEASURED = 2
"""Steps that times are means of, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """All inputs of the loop of one regime."""

    config: LoopConfig
    name: str
    regime: Regime
    run: RunSetup
    data: DataSet
    world: LoopWorld
    layout: TrainLayout
    update: WeightUpdateTime

    @property
    def gpus(self) -> int:
        """Rollout, training and rewards together."""
        config = self.config
        used = config.run.cluster.gpus + config.reward_gpus
        return used if config.colocated else used + self.train_gpus

    @property
    def train_gpus(self) -> int:
        """Those of the trainer; all if they are shared."""
        config = self.config
        return config.run.cluster.gpus if config.colocated else config.train_gpus

    @property
    def price(self) -> float | None:
        """Dollars of a GPU and hour; None if it is not known."""
        given = self.config.price
        return DOLLARS_PER_GPU_HOUR.get(self.config.run.cluster.gpu) if given is None else given

    def bound_s(self, trained: Sequence[TrainedSample], figures: LoopFigures) -> float:
        """Seconds in which no loop can train these samples, whatever its regime.

        Rollout engines that are always full with them (`heddle.runs.bound`), and the time that the
        trainer took: the longer of the two on GPUs of their own, their sum on common ones. It is no
        less than a full reward service needs.
        """
        scripts = Scripts.of([self.data.script(each.group, each.number) for each in trained])
        workload = replace(self.run.workload, scripts=scripts, trajectories=len(scripts))
        bound = makespan_bound(workload, self.run.profile, self.config.run.cluster)
        training_s, rewards_s = figures.training_s, figures.services.rewards_s
        if self.config.colocated:
            return max(bound.capacity_s + training_s, rewards_s)
        return max(bound.capacity_s, training_s, rewards_s)

    def services(
        self, simulation: LoopSimulation, trained: Sequence[TrainedSample]
    ) -> ServiceFigures:
        """Use of the services of a loop that is over."""
        rewards, seconds = simulation.rewards, simulation.clock.now_s
        places, busy_s = rewards.config.capacity, rewards.busy_s()
        alive, limit = simulation.alive, self.config.environments or 1
        needed_s = 0.0
        if places is not None:
            for each in trained:
                recorded_s = self.data.script(each.group, each.number).reward_s or 0.0
                needed_s += rewards.drawn(each.trajectory, 0, recorded_s)[0] / places
        return ServiceFigures(
            reward_busy=None if places is None else busy_s / (places * seconds),
            rewards_s=needed_s,
            mean_rewards=busy_s / seconds,
            mean_starts=simulation.environments.busy_s() / seconds,
            environment_busy=None if alive is None else alive.busy_s() / (limit * seconds),
        )

    @property
    def first_measured(self) -> int:
        """Steps that no time is taken of: until the regime is under way, and to a whole update."""
        regime, steps = self.regime, self.config.steps
        every = regime.update.every
        return steps - (steps - regime.warm_up_batches) // every * every


def prepare_loop(config: LoopConfig, name: str, *, workspace: Workspace) -> LoopSetup:
    """Set up the loop of one regime.

    Raises:
        ValueError: one of the packages' errors for bad input, with the remedy.
    """
    run = prepare(config.run, workspace=workspace)
    if knowledge.sees_the_future(run.policy):
        raise ConfigError(
            f"policy {config.run.policy.preset} knows the trajectories of a trace by name, and a "
            "loop names its own: take a policy without an oracle"
        )
    cluster = config.run.cluster
    data = DataSet.of(run.workload.scripts)
    check_recorded(config, run.workload.scripts)
    regime = regime_named(
        name,
        BatchShape(
            groups=config.groups,
            samples=config.samples,
            slots=cluster.gpus // cluster.tp * cluster.max_running,
            colocated=config.colocated,
        ),
    )
    _check_data(config, name, regime, data)
    train_gpus = cluster.gpus if config.colocated else config.train_gpus
    layout = _layout(config, train_gpus, run.workload.largest_tokens)
    file = load_training()
    update = file.weight_update.time(
        cluster.model,
        "colocated" if config.colocated else config.update_method,
        gpus=train_gpus if config.colocated else train_gpus + cluster.gpus,
    )
    return LoopSetup(
        config=config,
        name=name,
        regime=regime,
        run=run,
        data=data,
        layout=layout,
        update=update,
        world=_world(config, data, file.training, layout, train_gpus, update),
    )


def loop_core(setup: LoopSetup, controller: Controller) -> LoopController:
    """Make the loop above the rollouts' `controller`."""
    return LoopController(
        controller,
        setup.regime,
        setup.data.prompts(repeat=True),
        batches=setup.config.steps,
    )


def _check_data(config: LoopConfig, name: str, regime: Regime, data: DataSet) -> None:
    samples = regime.started_samples
    small = [group for group, scripts in data.groups.items() if len(scripts) < samples]
    if small:
        extra = regime.sampling.extra_samples
        beside = f" and {extra} beside them" if extra else ""
        raise ConfigError(
            f"regime {name} starts {regime.samples} samples of each prompt{beside}, but "
            f"{len(small):,} of {len(data.groups):,} prompts of the trace have fewer, such as "
            f"{small[0]!r} with {len(data.groups[small[0]])}: take fewer --samples, or make a "
            "trace with `heddle trace resample --samples`"
        )
    warm_up, every = regime.warm_up_batches, regime.update.every
    least = warm_up + every * -(-LEAST_MEASURED // every)
    if config.steps < least:
        raise ConfigError(
            f"regime {name} has all of its trajectories under way after step {warm_up}, and later "
            f"ones are measured: take --steps {least} or more"
        )
    repeated = [group for group in data.groups if re.search(rf"{EPOCH}\d+$", group)]
    if repeated:
        raise ConfigError(
            f"prompt {repeated[0]!r} ends as those of a repeated trace do, in {EPOCH} and a "
            "number: give it another name"
        )
    needed = regime.groups * config.steps
    if len(data.groups) < needed and not config.repeat:
        raise ConfigError(
            f"{config.steps} steps of {regime.groups} prompts need {needed:,} prompts under regime "
            f"{name}, the trace has {len(data.groups):,}: take fewer --steps or --groups, or "
            "--repeat to begin the trace again"
        )


def _layout(config: LoopConfig, gpus: int, longest: int) -> TrainLayout:
    """The layout that is given, else the one of least TP and PP that fits into memory.

    Raises:
        TrainingMemoryError: none fits; the message has a number of GPUs that do.
        TrainingError: the given degrees do not divide the GPUs.
    """
    found = _fitting_layout(config, gpus, longest)
    if isinstance(found, TrainLayout):
        return found
    if found is None:
        raise TrainingError(
            f"no trainer of TP {config.train_tp or 'any'} and PP {config.train_pp or 'any'} "
            f"divides {gpus} GPUs: take another --train-tp, --train-pp or --train-gpus"
        )
    for more in (2**k for k in range(gpus.bit_length(), gpus.bit_length() + 7)):
        if isinstance(_fitting_layout(config, more, longest), TrainLayout):
            flag = "--gpus" if config.colocated else "--train-gpus"
            needed = str(found).partition(";")[0]
            raise TrainingMemoryError(f"{needed}; {flag} {more} would do")
    raise found


def _fitting_layout(
    config: LoopConfig, gpus: int, longest: int
) -> TrainLayout | TrainingMemoryError | None:
    """The first layout that fits, else why the last one does not; None if none divides the GPUs."""
    cluster = config.run.cluster
    failed: TrainingMemoryError | None = None
    for pp in [config.train_pp] if config.train_pp else [1, 2, 4, 8, 16]:
        for tp in [config.train_tp] if config.train_tp else [1, 2, 4, 8]:
            if gpus % (tp * pp):
                continue
            layout = TrainLayout(tp=tp, pp=pp)
            try:
                check_memory(
                    cluster.model,
                    gpu=cluster.gpu,
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


def _world(
    config: LoopConfig,
    data: DataSet,
    training: TrainingProfile,
    layout: TrainLayout,
    train_gpus: int,
    update: WeightUpdateTime,
) -> LoopWorld:
    cluster = config.run.cluster

    def train_s(tokens: Sequence[int]) -> float:
        return training.step_time(
            tokens,
            model=cluster.model,
            gpu=cluster.gpu,
            gpus=train_gpus,
            backend=config.train_backend,
            layout=layout,
            optimizer_steps=config.optimizer_steps,
            logprob_passes=config.logprob_passes,
            colocated=config.colocated,
        ).total_s

    return LoopWorld(
        script=data.script,
        train_s=train_s,
        update_s=update.total_s,
        pause_s=update.pause_s,
        to_training_s=SLEEP_S if config.colocated else 0.0,
        to_rollout_s=WAKE_S if config.colocated else 0.0,
        environments=config.starts(),
        alive=config.environments,
        rewards=config.rewards(),
        seed=config.run.seed,
    )


SLEEP_S, WAKE_S = 0.31, 6.53
"""Colocated engines that drop their weights and get them back: vLLM's sleep level 2, published for
an 8B model on an A100 (vLLM pull request 48337, July 2026)."""


def splits(
    config: LoopConfig, train_gpus: Sequence[int] | None, tps: Sequence[int] | None
) -> list[LoopConfig]:
    """Configurations of a loop, one for each number of training GPUs and TP degree of the engines.

    `config.run.cluster.gpus` are all GPUs here. None, for either: those of `SHARES`, and the
    degrees of the profile, that leave whole engines.

    Raises:
        ConfigError: a given split leaves no GPUs or no whole engines, or none can be.
        ProfileError: model or GPU class is unknown.
    """
    cluster = config.run.cluster
    if cluster.mix:
        raise ConfigError(
            "a loop has engines of one TP degree, or those that a policy plans: leave cluster.mix "
            "out"
        )
    degrees = memory_profile(cluster).tps if tps is None else tps
    gpus = cluster.gpus - config.reward_gpus
    for_rewards = f", {config.reward_gpus} compute rewards" if config.reward_gpus else ""
    found: list[LoopConfig] = []
    for tp in degrees:
        shares = sorted({round(share * gpus / tp) * tp for share in SHARES})
        numbers = shares if train_gpus is None else train_gpus
        for number in [0] if config.colocated else numbers:
            rollout = gpus - number
            if rollout >= tp and rollout % tp == 0 and (config.colocated or number >= 1):
                found.append(_split(config, number, tp))
            elif tps is not None and train_gpus is not None:
                left = "all are shared" if config.colocated else f"{number} train"
                left += for_rewards
                raise ConfigError(
                    f"--gpus {cluster.gpus}: {left}, so {max(rollout, 0)} are left for engines of "
                    f"TP {tp}; take other --train-gpus, that leave a multiple of {tp} and not 0, "
                    "or another --tp"
                )
    if not found:
        raise ConfigError(
            f"--gpus {cluster.gpus} cannot be split into a trainer and engines of TP "
            f"{' or '.join(map(str, degrees))}{for_rewards}"
        )
    return found


def _split(config: LoopConfig, train_gpus: int, tp: int) -> LoopConfig:
    cluster = config.run.cluster
    rollout = replace(cluster, gpus=cluster.gpus - config.reward_gpus - train_gpus, tp=tp)
    return replace(config, run=replace(config.run, cluster=rollout), train_gpus=max(train_gpus, 1))
