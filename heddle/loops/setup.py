"""An RL loop, set up once: its data set, trainer, weight updates and rollout cluster."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm

from heddle import policy_inputs
from heddle.config_files import ConfigError
from heddle.cost.prices import Prices, RunCost, prices_of
from heddle.loops.config import LoopConfig
from heddle.loops.data import DataSet, UnfitError, check_data, check_packing, check_recorded
from heddle.loops.layout import fitting_layout, own_gpus, without_pool
from heddle.loops.measure import LoopFigures, ServiceFigures, TrainedSample
from heddle.loops.settings import SWITCH_TIMEOUT_S
from heddle.setup import RunSetup, Workspace, makespan_bound, prepare
from heddle.workload import Workload
from heddle_core.controller import Controller
from heddle_core.ids import EngineId, GroupId
from heddle_core.loop.controller import LoopController
from heddle_core.loop.epoch import EpochOrder, Totals, lengths_by_age
from heddle_core.loop.groups import Prompt
from heddle_core.loop.hybrid import HYBRID, HybridPool, RatioPool
from heddle_core.loop.regime import BatchShape, Regime, Split
from heddle_core.loop.regime_text import regime_named
from heddle_core.loop.split_plan import GpuCounts
from heddle_core.plans import EngineSpec
from heddle_sim.loop import LoopSimulation, LoopWorld
from heddle_sim.training import TrainingTime, TrainLayout, speed_up
from heddle_sim.training_files import TrainingFile, load_training
from heddle_sim.weight_update import WeightUpdateTime
from heddle_trace.table import Scripts


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetup:
    """All inputs of the loop of one regime."""

    requested: LoopConfig
    """As given."""
    config: LoopConfig
    """Without the GPUs of a hybrid pool, which are neither side's own."""
    name: str
    regime: Regime
    run: RunSetup
    data: DataSet
    past: Sequence[Totals]
    """Output tokens of its prompts' samples in the epochs of the history."""
    world: LoopWorld
    layout: TrainLayout
    update: WeightUpdateTime
    prices: Prices

    @property
    def label(self) -> str:
        """Of a row: the regime, with the rule that packs its prompts."""
        plan = self.config.epoch_plan
        return f"{self.name} ({plan})" if plan else self.name

    @property
    def lengths(self) -> Mapping[GroupId, float]:
        """Mean output tokens of a sample, of prompts that the history has."""
        return lengths_by_age(self.past)

    @property
    def gpus(self) -> int:
        """Rollout, training and rewards together, with those of a hybrid pool."""
        config = self.config
        used = config.run.cluster.gpus + config.reward_gpus
        return used if config.colocated else used + self.train_gpus + self.pool_gpus

    @property
    def pool_gpus(self) -> int:
        """Those of a hybrid pool that belong to neither side."""
        return own_gpus(self.regime)

    @property
    def hybrid_gpus(self) -> int:
        """Those that generate or train by turns, in a hybrid pool."""
        hybrid = self.regime.split.hybrid
        return (hybrid.own_gpus or self.train_gpus) if hybrid is not None else 0

    @property
    def train_gpus(self) -> int:
        """Those of the trainer; all if they are shared."""
        return self.config.trainer_gpus

    @property
    def gpus_by_class(self) -> Mapping[str, int]:
        """`gpus` by class; a hybrid pool has that of the engines."""
        config = self.config
        if config.train_gpu is None:
            return {self.run.profile.gpu: self.gpus}
        found = Counter(self.run.profiles.pools)
        found[config.trainer_gpu] += self.train_gpus
        found[next(iter(found))] += self.pool_gpus
        found[(config.reward_gpu or config.trainer_gpu).lower()] += config.reward_gpus
        return {gpu: gpus for gpu, gpus in found.items() if gpus}

    def cost(self, seconds: float) -> RunCost:
        """Of all GPUs for so long."""
        return self.prices.cost(self.gpus_by_class, seconds)

    def bound_s(self, trained: Sequence[TrainedSample], figures: LoopFigures) -> float:
        """Seconds in which no loop can train these samples, whatever its regime.

        Rollout engines that are always full with them (`heddle.runs.bound`), and the time of whole
        batches in the trainer: the longer of the two on GPUs of their own, their sum on common
        ones. With a hybrid pool, the work of both over the GPUs of both. It is no less than a full
        reward service needs.
        """
        scripts = [self.data.script(each.group, each.number) for each in trained]
        workload = replace(
            self.run.workload, scripts=Scripts.of(scripts), trajectories=len(scripts)
        )
        bound = makespan_bound(workload, self.run.profiles, self.config.run.cluster)
        size = self.regime.groups * self.regime.samples
        # Of their last contexts, output included.
        tokens = [s.steps[-1].prompt_tokens + s.steps[-1].output_tokens for s in scripts]
        training_s = sum(
            self.world.train_s(tokens[first : first + size], False)
            for first in range(0, len(tokens), size)
        )
        rewards_s = figures.services.rewards_s
        if self.config.colocated:
            return max(bound.capacity_s + training_s, rewards_s)
        if self.regime.split.hybrid is not None:
            gpu_s = bound.capacity_s * self.config.run.cluster.gpus + training_s * self.train_gpus
            return max(gpu_s / (self.gpus - self.config.reward_gpus), rewards_s)
        return max(bound.capacity_s, training_s, rewards_s)

    def services(
        self, simulation: LoopSimulation, trained: Sequence[TrainedSample]
    ) -> ServiceFigures:
        """Use of the services of a loop that is over."""
        rewards, seconds = simulation.services.rewards, simulation.clock.now_s
        places, busy_s = rewards.config.capacity, rewards.busy_s()
        alive, limit = simulation.services.alive, self.config.environments or 1
        needed_s = 0.0
        if places is not None:
            for each in trained:
                recorded_s = self.data.script(each.group, each.number).reward_s or 0.0
                needed_s += rewards.drawn(each.trajectory, 0, recorded_s)[0] / places
        return ServiceFigures(
            reward_busy=None if places is None else busy_s / (places * seconds),
            rewards_s=needed_s,
            mean_rewards=busy_s / seconds,
            mean_starts=simulation.services.environments.busy_s() / seconds,
            environment_busy=None if alive is None else alive.busy_s() / (limit * seconds),
        )

    def prompts(self) -> Iterable[Prompt]:
        """The prompts without end, in the order of each epoch."""
        plan = self.config.packing()
        if plan is None:
            return self.data.prompts(repeat=True)
        prompts, begun = [*self.data.prompts(repeat=False)], self.config.begun
        order = EpochOrder(
            plan,
            prompts,
            batch=self.regime.groups,
            seed=self.config.run.seed,
            past=self.past,
            repeats_after=self.data.cycle,
            first=int(begun),
        )
        for prompt in prompts if begun else ():
            for sample in range(prompt.samples):
                order.ended(prompt.group, self.data.output_tokens(prompt.group, sample))
        return order

    @property
    def first_measured(self) -> int:
        """Steps that no time is taken of: until the regime is under way, and to a whole update; of
        packed prompts to a whole epoch, if the loop ends with one."""
        steps, warm = self.config.batches, self.regime.warm_up_batches
        every = self.regime.update.every
        epoch = lcm(every, self.epoch_batches)
        begin = -(-warm // epoch) * epoch
        if steps % epoch == 0 and begin < steps:
            return begin
        return steps - (steps - warm) // every * every

    @property
    def epoch_batches(self) -> int:
        """Batches of an epoch; 1 where prompts are not packed, or fill no whole batches."""
        prompts, groups = len(self.data.groups), self.regime.groups
        return 1 if self.config.packing() is None or prompts % groups else prompts // groups


def prepare_loop(
    config: LoopConfig, name: str, *, workspace: Workspace, workload: Workload | None = None
) -> LoopSetup:
    """Set up the loop of one regime, on the prompts of `workload`, by default the trace's.

    Raises:
        ValueError: one of the packages' errors for bad input, with the remedy.
    """
    regime = regime_of(config, name)
    requested, config = config, without_pool(config, name, regime)
    cluster = config.run.cluster
    if workload is None:
        workload = workspace.workload(config.run, config.most_tokens)
    run = prepare(config.run, workspace=workspace, workload=workload)
    if policy_inputs.sees_the_future(run.policy):
        raise ConfigError(
            f"policy {config.run.policy.preset} knows the trajectories of a trace by name, and a "
            "loop names its own: take a policy without an oracle"
        )
    samples = regime.started_samples if config.epoch_plan else None
    scripts = run.workload.scripts
    data = DataSet.kept(workspace, scripts, samples=samples, least=config.least_samples)
    check_recorded(config, scripts)
    check_data(config, name, regime, data)
    past = data.known(run.history.epochs)
    check_packing(config, data, len(lengths_by_age(past)), run.history.name)
    if regime.batching.accumulate_from is not None and config.optimizer_steps > 1:
        raise UnfitError(
            f"regime {name} sums the gradients of a batch, and loop.optimizer_steps "
            f"{config.optimizer_steps} needs new weights between its parts: give "
            "accumulate_from=0, or loop.optimizer_steps = 1"
        )
    gpus, shared = config.trainer_gpus, config.colocated
    layout = fitting_layout(config, gpus, run.workload.largest_tokens, own_gpus(regime))
    speed_up(config.trainer_gpu, config.train_precision)
    file = load_training()
    update = file.weight_update.time(
        cluster.model,
        "colocated" if shared else config.update_method,
        gpus=gpus if shared else gpus + cluster.gpus,
        relayed=not regime.update.waits,
    )
    return LoopSetup(
        requested=requested,
        config=config,
        name=name,
        regime=regime,
        run=run,
        data=data,
        past=past,
        layout=layout,
        update=update,
        prices=prices_of(config.run.prices, run.profiles.pools),
        world=_world(config, data, file, layout, regime, update),
    )


def regime_of(config: LoopConfig, name: str) -> Regime:
    """The rules of a loop.

    Raises:
        RegimeError: an unknown regime, or parameters that cannot be.
    """
    cluster = config.run.cluster
    regime = regime_named(
        name,
        BatchShape(
            groups=config.groups,
            samples=config.samples,
            slots=cluster.engine_count * cluster.max_running,
            colocated=config.colocated,
            train_gpus=config.trainer_gpus,
            engines=cluster.engine_count,
        ),
    )
    pool = regime.split.hybrid
    if isinstance(pool, RatioPool) and "pool_gpus=" not in name:
        regime = replace(regime, split=Split(hybrid=pool.within(cluster.gpus, cluster.engine_gpus)))
    return regime


def loop_core(setup: LoopSetup, controller: Controller) -> LoopController:
    """Make the loop above the rollouts' `controller`."""
    cluster, regime = setup.config.run.cluster, setup.regime
    pool = None
    if regime.split.hybrid is not None:
        engines = [
            EngineSpec(
                engine=EngineId(f"{HYBRID}{number}"),
                shape=setup.run.context.shape,
                max_running=cluster.max_running,
            )
            for number in range(setup.hybrid_gpus // cluster.engine_gpus)
        ]
        own = regime.split.hybrid.own_gpus
        gpus = GpuCounts(
            rollout=cluster.gpus,
            training=setup.train_gpus if own else 0,
            hybrid=own or setup.train_gpus,
        )
        rule = regime.split.hybrid.rule(groups=regime.groups, every=regime.update.every, gpus=gpus)
        pool = HybridPool(engines, regime.split.hybrid, rule, controller)
    prompts = setup.prompts()
    return LoopController(
        controller,
        regime,
        prompts,
        batches=setup.config.batches,
        pool=pool,
        slots=cluster.engine_count * cluster.max_running,
        on_ended=prompts.ended if isinstance(prompts, EpochOrder) else None,
    )


def _world(
    config: LoopConfig,
    data: DataSet,
    file: TrainingFile,
    layout: TrainLayout,
    regime: Regime,
    update: WeightUpdateTime,
) -> LoopWorld:
    cluster, training = config.run.cluster, file.training
    if config.colocated_speed is not None:
        training = replace(
            training, colocated_efficiency={config.train_backend: config.colocated_speed}
        )
    speculation = cluster.drafts()
    trains_head = speculation is not None and speculation.method == "mtp"
    generates = regime.update.mode != "drain" or regime.staleness.counted_by == "batch"
    overlap = config.train_overlap if generates and not config.colocated else 1.0

    def step_time(tokens: Sequence[int], pool_trains: bool) -> TrainingTime:
        time = training.step_time(
            tokens,
            model=cluster.model,
            gpu=config.trainer_gpu,
            gpus=config.trainer_gpus + (own_gpus(regime) if pool_trains else 0),
            backend=config.train_backend,
            layout=layout,
            optimizer_steps=config.optimizer_steps,
            logprob_passes=config.logprob_passes,
            colocated=config.colocated,
            precision=config.train_precision,
        )
        head = 1.0 + config.drafter_training if trains_head else 1.0
        # vime times the forward passes and the optimizer's steps with the rest of its training.
        parts = {name: overlap * seconds for name, seconds in asdict(time).items()}
        return TrainingTime(**parts | {"train_s": head * parts["train_s"]})

    def accumulate_s(tokens: Sequence[int], pool_trains: bool) -> float:
        time = step_time(tokens, pool_trains)
        return time.train_s + time.logprob_s + time.gathers_s

    hand_over_s = update.hand_over_s / regime.update.every
    weights = file.weight_update.time(cluster.model, "colocated", gpus=config.trainer_gpus)
    switch = config.switch_times(weights.total_s)
    to_training_s, to_rollout_s = 0.0, 0.0
    if config.colocated:
        to_training_s, to_rollout_s = switch["sleep_s"], switch["wake_s"]
    elif regime.split.hybrid is not None:
        to_training_s, to_rollout_s = switch["return_s"], switch["lend_s"]
    return LoopWorld(
        script=data.script,
        train_s=lambda tokens, pool_trains: step_time(tokens, pool_trains).total_s + hand_over_s,
        accumulate_s=accumulate_s,
        update_s=update.total_s,
        pause_s=update.pause_s,
        to_training_s=to_training_s,
        to_rollout_s=to_rollout_s,
        switch_failure_rate=config.switch_failure_rate,
        switch_timeout_s=(
            SWITCH_TIMEOUT_S if config.switch_timeout_s is None else config.switch_timeout_s
        ),
        environments=config.starts(),
        alive=config.environments,
        rewards=config.rewards(),
        seed=config.run.seed,
    )
