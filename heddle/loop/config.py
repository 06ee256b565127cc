"""What `heddle loop` runs."""

from dataclasses import dataclass
from typing import Literal

from heddle.cluster.tool_pools import latency_of
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle_sim.services import KEEP_ALIVE_S, Latency, ServiceConfig

REWARDS_PER_GPU = 8
"""Rewards that a GPU of the reward service computes at once; assumed."""

SWITCH_TIMEOUT_S = 180.0
"""Until a move of GPUs to training counts as failed: the default of Libra's release."""

MOST_STEPS = 100_000
MOST_PASSES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """An RL loop on a cluster. `run.cluster.gpus` are the GPUs of the rollout engines.

    Raises:
        ConfigError: a value out of range.
    """

    run: RunConfig
    regimes: tuple[str, ...]
    steps: int = 10
    groups: int = 32
    """Prompts of a batch."""
    samples: int = 16
    """Trained samples of a prompt."""
    train_gpus: int = 8
    """GPUs of the trainer; those of the engines if they share them."""
    colocated: bool = False
    train_backend: Literal["megatron", "fsdp"] = "megatron"
    train_tp: int | None = None
    """TP degree of the trainer; None: the least at which a step fits into memory."""
    train_pp: int | None = None
    """Pipeline stages of it; None likewise."""
    optimizer_steps: int = 1
    """Of a batch."""
    logprob_passes: int = 1
    """Forward passes of a batch besides those of training: old policy, reference."""
    update_method: str = "nccl"
    env_start_s: str | None = None
    """Start of an environment, a distribution (`heddle.cluster.tool_pools.latency_of`); None: the
    trace's, or 0 s where it has none."""
    env_capacity: int | None = None
    """Starts at once; None: no limit."""
    environments: int | None = None
    """Environments at once, from the request of their start until their trajectory has ended; None:
    no limit."""
    env_failure_rate: float = 0.0
    """Share of starts that fail."""
    env_timeout_s: float | None = None
    """Until a failed start is noticed; None: the time of a start."""
    env_retries: int = 0
    """Starts after a failed one, before the trajectory counts as failed."""
    reward_s: str | None = None
    """Time of a reward, as `env_start_s`."""
    reward_gpus: int = 0
    """GPUs of the reward service."""
    reward_per_gpu: int | None = None
    """Rewards at once on each of them; None: `REWARDS_PER_GPU`."""
    reward_capacity: int | None = None
    """Rewards at once of a service without GPUs; None: elastic."""
    reward_cold_start_s: float = 0.0
    """Start of an instance of an elastic reward service."""
    reward_keep_alive_s: float | None = None
    """An idle instance stays warm for so long; None: `heddle_sim.services.KEEP_ALIVE_S`."""
    reward_failure_rate: float = 0.0
    reward_timeout_s: float | None = None
    reward_retries: int = 0
    switch_failure_rate: float = 0.0
    """Share of the moves of GPUs between rollout and training that fail, with a hybrid pool."""
    switch_timeout_s: float | None = None
    """Until such a failure is noticed; None: `SWITCH_TIMEOUT_S`."""
    seeds: int = 1
    repeat: bool = False
    """Begin the trace again after its last prompt."""

    def __post_init__(self) -> None:
        _require(bool(self.regimes), "--regimes names no regime")
        _require(
            not self.run.cluster.pool,
            "cluster.pool: the engines of a loop have GPUs of one class, which its trainer takes "
            "its own from: give --gpu and --gpus in place of pools",
        )
        _require(
            2 <= self.steps <= MOST_STEPS,
            f"--steps must be 2 to {MOST_STEPS:,}: the first is not measured",
        )
        for flag, value in (
            ("--groups", self.groups),
            ("--samples", self.samples),
            ("--optimizer-steps", self.optimizer_steps),
            ("--seeds", self.seeds),
        ):
            _require(value >= 1, f"{flag} must be 1 or more, not {value}")
        _require(
            0 <= self.logprob_passes <= MOST_PASSES,
            f"--logprob-passes must be 0 to {MOST_PASSES:,}, not {self.logprob_passes}",
        )
        _require(
            self.optimizer_steps <= MOST_PASSES,
            f"--optimizer-steps must be {MOST_PASSES:,} at most, not {self.optimizer_steps}",
        )
        _require(
            self.update_method != "colocated",
            "--update-method colocated: that is what --colocated does; take another method for "
            "GPUs of their own",
        )
        self._check_services()
        _require(
            self.train_gpus >= 1,
            f"--train-gpus {self.train_gpus}: the trainer needs a GPU; with --colocated it has the "
            "engines' own",
        )

    def starts(self) -> ServiceConfig:
        """The service that starts environments."""
        return ServiceConfig(
            latency=_latency("--env-start-s", self.env_start_s),
            capacity=self.env_capacity,
            failure_rate=self.env_failure_rate,
            timeout_s=self.env_timeout_s,
            retries=self.env_retries,
        )

    def rewards(self) -> ServiceConfig:
        """The reward service."""
        per_gpu = REWARDS_PER_GPU if self.reward_per_gpu is None else self.reward_per_gpu
        keep_s = KEEP_ALIVE_S if self.reward_keep_alive_s is None else self.reward_keep_alive_s
        return ServiceConfig(
            latency=_latency("--reward-s", self.reward_s),
            capacity=self.reward_gpus * per_gpu or self.reward_capacity,
            cold_start_s=self.reward_cold_start_s,
            keep_alive_s=keep_s,
            failure_rate=self.reward_failure_rate,
            timeout_s=self.reward_timeout_s,
            retries=self.reward_retries,
        )

    def _check_services(self) -> None:
        for flag, capacity in (
            ("--env-capacity", self.env_capacity),
            ("--environments", self.environments),
            ("--reward-capacity", self.reward_capacity),
            ("--reward-per-gpu", self.reward_per_gpu),
        ):
            _require(
                capacity is None or capacity >= 1,
                f"{flag} must be 1 or more, not {capacity}; leave it out for no limit",
            )
        _require(self.reward_gpus >= 0, f"--reward-gpus must be 0 or more, not {self.reward_gpus}")
        for flag, seconds in (
            ("--env-timeout-s", self.env_timeout_s),
            ("--reward-cold-start-s", self.reward_cold_start_s),
            ("--reward-keep-alive-s", self.reward_keep_alive_s),
            ("--reward-timeout-s", self.reward_timeout_s),
            ("--switch-timeout-s", self.switch_timeout_s),
        ):
            _require(
                seconds is None or 0.0 <= seconds < 1e9,
                f"{flag} must be from 0 to below 1e9, not {seconds}",
            )
        for kind, rate, timeout_s, retries in (
            ("env", self.env_failure_rate, self.env_timeout_s, self.env_retries),
            ("reward", self.reward_failure_rate, self.reward_timeout_s, self.reward_retries),
        ):
            _require(
                0.0 <= rate < 1.0,
                f"--{kind}-failure-rate must be from 0 to below 1, not {rate:g}",
            )
            _require(0 <= retries <= 1000, f"--{kind}-retries must be 0 to 1,000, not {retries}")
            _require(
                rate > 0.0 or (timeout_s is None and retries == 0),
                f"--{kind}-timeout-s and --{kind}-retries are of failed calls: give "
                f"--{kind}-failure-rate, or leave them out",
            )
        _require(
            0.0 <= self.switch_failure_rate < 1.0,
            f"--switch-failure-rate must be from 0 to below 1, not {self.switch_failure_rate:g}",
        )
        _require(
            self.switch_failure_rate > 0.0 or self.switch_timeout_s is None,
            "--switch-timeout-s is of moves that fail: give --switch-failure-rate, or leave it out",
        )
        self._check_rewards()
        self.starts()
        self.rewards()

    def _check_rewards(self) -> None:
        """A reward service has GPUs, or a capacity, or is elastic."""
        _require(
            self.reward_per_gpu is None or self.reward_gpus > 0,
            "--reward-per-gpu is of a reward service on GPUs: give --reward-gpus, or leave it out",
        )
        _require(
            not (self.reward_gpus and self.reward_capacity is not None),
            f"--reward-gpus {self.reward_gpus} and --reward-capacity {self.reward_capacity}: GPUs "
            "have the capacity of --reward-per-gpu; leave one of the two out",
        )
        limited = bool(self.reward_gpus) or self.reward_capacity is not None
        _require(
            not (limited and (self.reward_cold_start_s or self.reward_keep_alive_s is not None)),
            "--reward-cold-start-s and --reward-keep-alive-s are of an elastic reward service: "
            "leave them out, or --reward-gpus and --reward-capacity",
        )
        _require(
            self.reward_keep_alive_s is None or self.reward_cold_start_s > 0.0,
            "--reward-keep-alive-s has no effect without a cold start: give --reward-cold-start-s",
        )


def _latency(flag: str, text: str | None) -> Latency | None:
    try:
        return None if text is None else latency_of(f"{text}")
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
