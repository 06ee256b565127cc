"""The section `[loop]` of a configuration: batches, trainer, environments and rewards."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias

from heddle.bounds import check_bounds
from heddle.cluster.tool_pools import latency_of
from heddle.config_error import ConfigError, require
from heddle_core.bounds import Bounds
from heddle_core.loop.epoch import EpochPlan
from heddle_sim.services import KEEP_ALIVE_S, Latency, ServiceConfig
from heddle_sim.training_memory import MEMORY_GIB

REWARDS_PER_GPU = 8
"""Rewards that a GPU of the reward service computes at once; assumed."""

SWITCH_TIMEOUT_S = 180.0
"""Until a move of GPUs to training counts as failed: the default of Libra's release."""


Switch: TypeAlias = Literal["reload", "sleep", "standby"]
SWITCH_TIMES: Final[Mapping[Switch, Mapping[str, float]]] = MappingProxyType(
    {
        "reload": {"sleep_s": 0.31, "wake_s": 6.53, "lend_s": 10.8, "return_s": 8.0},
        "sleep": {"sleep_s": 0.33, "wake_s": 0.39, "lend_s": 9.1, "return_s": 3.3},
        "standby": {"sleep_s": 0.03, "wake_s": 0.05, "lend_s": 0.05, "return_s": 0.03},
    }
)
"""Seconds until GPUs work for the other side, of the sources of `LoopSettings.switch`."""

MOST_BATCHES = 100_000
MOST_PASSES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """An RL loop; only `heddle loop` and `heddle plan --regimes` read this."""

    batches: Annotated[int | None, Bounds(2, MOST_BATCHES)] = None
    """Batches to train; the first is not measured. None: 10, or as many as the regimes need."""
    groups: Annotated[int | None, Bounds(1)] = None
    """Prompts of a batch. None: 32, or what the trace has."""
    samples: Annotated[int | None, Bounds(1)] = None
    """Trained samples of a prompt. None: 16, or what the trace has."""
    repeat: bool | None = None
    """Begin the trace again after its last prompt. None: where it has too few, which is said."""
    epoch_plan: str = ""
    """Prompts that share a batch, by mean length in `history`: `random`; `sorted`, batches of like
    length; `tail:SHARE`, the longest share apart. Empty: as the trace has them."""
    train_gpus: Annotated[int | None, Bounds(1)] = None
    """GPUs of the trainer; the engines have the others. None: a quarter, or what holds a step."""
    train_gpu: str | None = None
    """GPU type of a trainer, and rewards, beside the cluster's GPUs. None: both are of these."""
    colocated: bool = False
    """Engines and trainer have all GPUs in turn."""
    shared_gpus: bool = False
    """Each `-c` file of `heddle loop` is a loop, all on the same GPUs."""
    colocated_speed: Annotated[float | None, Bounds(0.01, 1)] = None
    """Of a colocated trainer over one apart. None: verl's, 0.90 with FSDP, 0.76 with Megatron."""
    train_backend: Literal["megatron", "fsdp"] = "megatron"
    """Trainer."""
    train_tp: Annotated[int | None, Bounds(1)] = None
    """TP degree of the trainer; None: the least at which a step fits into memory."""
    train_pp: Annotated[int | None, Bounds(1)] = None
    """Pipeline stages of it; None likewise."""
    train_cp: Annotated[int, Bounds(1)] = 1
    """Context parallelism of it: GPUs that share a sample."""
    train_ep: Annotated[int | None, Bounds(1)] = None
    """Expert parallelism of it; None: a node's GPUs."""
    train_precision: Literal["bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"] = "bf16"
    """Of products with weights; all but FP8 need Blackwell."""
    train_padded: bool = False
    """Samples are padded to the longest, not packed."""
    optimizer_steps: Annotated[int, Bounds(1, MOST_PASSES)] = 1
    """Of a batch."""
    logprob_passes: Annotated[int, Bounds(0, MOST_PASSES)] = 1
    """Forward passes of a batch besides those of training: old policy, reference."""
    drafter_training: Annotated[float, Bounds(0, below=10)] = 0.07
    """Share of a step's training seconds that training the MTP head takes more, where engines draft
    by `mtp`; 0 where it is frozen. SkyRL's documentation: 57.3 to 61.3 s."""
    train_overlap: Annotated[float, Bounds(1, below=10)] = 1.0
    """Seconds of training and forward passes while engines generate, over those alone; vime#358:
    1.22."""
    # Its rollout slows by 7 % at most: alone a step waits 97.2 s for it, beside it a step is 104 s.
    update_method: str = "nccl"
    """How weights reach engines on GPUs of their own."""
    env_start_s: str | float | None = None
    """Start of an environment: seconds; MEAN,SIGMA, normal and cut at 0; or
    lognormal:MEDIAN,SIGMA,MISS_RATE,MISS_MEDIAN, the last two optional. None: the trace's, or 0."""
    env_capacity: Annotated[int | None, Bounds(1, none="no limit")] = None
    """Starts at once; None: no limit."""
    environments: Annotated[int | None, Bounds(1, none="no limit")] = None
    """Environments at once, each until its trajectory has ended; None: no limit."""
    env_failure_rate: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of starts that fail."""
    env_timeout_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Until a failed start is noticed; None: the time of a start."""
    env_retries: Annotated[int, Bounds(0, 1000)] = 0
    """Starts after a failed one, before the trajectory counts as failed."""
    reward_s: str | float | None = None
    """Time of a reward, as `env_start_s`."""
    reward_gpus: Annotated[int, Bounds(0)] = 0
    """GPUs of the reward service."""
    reward_gpu: str | None = None
    """GPU type of them, beside a `train_gpu`. None: the trainer's."""
    reward_per_gpu: Annotated[int | None, Bounds(1, none="the default")] = None
    """Rewards at once on each of them; None: `REWARDS_PER_GPU`."""
    reward_capacity: Annotated[int | None, Bounds(1, none="no limit")] = None
    """Rewards at once of a service without GPUs; None: elastic."""
    reward_cold_start_s: Annotated[float, Bounds(0, below=1e9)] = 0.0
    """Start of an instance of an elastic reward service."""
    reward_keep_alive_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """An idle instance stays warm for so long; None: `heddle_sim.services.KEEP_ALIVE_S`."""
    reward_failure_rate: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of rewards that fail."""
    reward_timeout_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Until a failed reward is noticed; None: the time of a reward."""
    reward_retries: Annotated[int, Bounds(0, 1000)] = 0
    """Further attempts of a reward."""
    switch: Switch = "reload"
    """How engines leave GPUs and come back. `reload` loads weights again (vLLM pull 48337, level 2,
    8B on A100; loans of Libra, arXiv 2606.03077, 14B on A800). `sleep` keeps them in host memory
    (level 1, 8B on our H200; loans of verl-omni pull 575, 8B). `standby` drops them until the
    update (level 2 there); loans take method `colocated`, the trainer in memory, unchecked."""
    lend_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Until lent GPUs generate. None, by `switch`: 10.8, 9.1, or 0.05 and the weights."""
    return_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """The way back, likewise: 8.0, 3.3, 0.03."""
    sleep_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Until colocated engines leave the GPUs, likewise: 0.31, 0.33, 0.03."""
    wake_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """The way back, likewise: 6.53, 0.39, 0.05."""
    switch_failure_rate: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of a hybrid pool's moves that fail."""
    switch_timeout_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Until such a failure is noticed; None: `SWITCH_TIMEOUT_S`."""

    def __post_init__(self) -> None:
        check_bounds(self, "loop.")
        require(
            self.update_method != "colocated",
            "loop.update_method = colocated is what loop.colocated does; take another method for "
            "GPUs of their own",
        )
        self._check_types()
        try:
            self.packing()
        except ValueError as error:
            raise ConfigError(f"loop.epoch_plan = {error}") from None
        self._check_services()

    def packing(self) -> EpochPlan | None:
        """How prompts are packed into batches; None: as the trace has them.

        Raises:
            ValueError: there is no such rule.
        """
        return EpochPlan.of(self.epoch_plan) if self.epoch_plan else None

    def switch_times(self, weights_s: float = 0.0) -> dict[str, float]:
        """Those that are given, else of the method; `weights_s` copies weights of the trainer."""
        usual = dict(SWITCH_TIMES[self.switch])
        usual["lend_s"] += weights_s if self.switch == "standby" else 0.0
        given = {name: getattr(self, name) for name in usual}
        return usual | {name: seconds for name, seconds in given.items() if seconds is not None}

    def starts(self) -> ServiceConfig:
        """The service that starts environments."""
        return ServiceConfig(
            latency=_latency("loop.env_start_s", self.env_start_s),
            capacity=self.env_capacity,
            failure_rate=self.env_failure_rate,
            timeout_s=self.env_timeout_s,
            retries=self.env_retries,
        )

    def rewards(self) -> ServiceConfig:
        per_gpu = REWARDS_PER_GPU if self.reward_per_gpu is None else self.reward_per_gpu
        keep_s = KEEP_ALIVE_S if self.reward_keep_alive_s is None else self.reward_keep_alive_s
        return ServiceConfig(
            latency=_latency("loop.reward_s", self.reward_s),
            capacity=self.reward_gpus * per_gpu or self.reward_capacity,
            cold_start_s=self.reward_cold_start_s,
            keep_alive_s=keep_s,
            failure_rate=self.reward_failure_rate,
            timeout_s=self.reward_timeout_s,
            retries=self.reward_retries,
        )

    def _check_services(self) -> None:
        for kind, rate, timeout_s, retries in (
            ("env", self.env_failure_rate, self.env_timeout_s, self.env_retries),
            ("reward", self.reward_failure_rate, self.reward_timeout_s, self.reward_retries),
        ):
            require(
                rate > 0.0 or (timeout_s is None and retries == 0),
                f"loop.{kind}_timeout_s and loop.{kind}_retries are of failed calls: give "
                f"loop.{kind}_failure_rate, or leave them out",
            )
        require(
            self.switch_failure_rate > 0.0 or self.switch_timeout_s is None,
            "loop.switch_timeout_s is of moves that fail: give loop.switch_failure_rate, or leave "
            "it out",
        )
        self._check_rewards()
        self.starts()
        self.rewards()

    def _check_types(self) -> None:
        gpu = self.train_gpu
        require(
            gpu is None or gpu.lower() in MEMORY_GIB,
            f"loop.train_gpu = {gpu}: no such GPU type; known: {', '.join(MEMORY_GIB)}",
        )
        require(
            not (gpu and self.colocated),
            f"loop.train_gpu = {gpu}: with loop.colocated the trainer has the engines' GPUs; leave "
            "one of the two out",
        )
        require(
            self.reward_gpu is None or bool(gpu and self.reward_gpus),
            f"loop.reward_gpu = {self.reward_gpu} is the type of loop.reward_gpus beside a trainer "
            "of its own type: give loop.reward_gpus and loop.train_gpu, or leave it out",
        )

    def _check_rewards(self) -> None:
        """A reward service has GPUs, or a capacity, or is elastic."""
        require(
            self.reward_per_gpu is None or self.reward_gpus > 0,
            "loop.reward_per_gpu is of a reward service on GPUs: give loop.reward_gpus, or leave "
            "it out",
        )
        require(
            not (self.reward_gpus and self.reward_capacity is not None),
            f"loop.reward_gpus = {self.reward_gpus} and loop.reward_capacity = "
            f"{self.reward_capacity}: GPUs have the capacity of loop.reward_per_gpu; leave one "
            "of the two out",
        )
        limited = bool(self.reward_gpus) or self.reward_capacity is not None
        require(
            not (limited and (self.reward_cold_start_s or self.reward_keep_alive_s is not None)),
            "loop.reward_cold_start_s and loop.reward_keep_alive_s are of an elastic reward "
            "service: leave them out, or loop.reward_gpus and loop.reward_capacity",
        )
        require(
            self.reward_keep_alive_s is None or self.reward_cold_start_s > 0.0,
            "loop.reward_keep_alive_s has no effect without a cold start: give "
            "loop.reward_cold_start_s",
        )


def _latency(key: str, text: str | float | None) -> Latency | None:
    try:
        return None if text is None else latency_of(f"{text}")
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
