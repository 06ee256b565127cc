"""What `heddle loop` runs."""

from dataclasses import dataclass
from typing import Literal

from heddle.config import RunConfig
from heddle.config_files import ConfigError

DOLLARS_PER_GPU_HOUR = {"a100": 1.4, "l40s": 0.8, "h100": 2.7, "h200": 3.6}
"""Of rented GPUs, on demand, in the spring of 2026: prices differ by a factor of two between
providers. `--price` replaces them."""

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
    env_start_s: float = 0.0
    env_spread_s: float = 0.0
    env_capacity: int | None = None
    env_failure_rate: float = 0.0
    reward_s: float = 0.0
    reward_capacity: int | None = None
    reward_cold_start_s: float = 0.0
    price: float | None = None
    """Dollars of a GPU and hour; None: `DOLLARS_PER_GPU_HOUR`."""
    seeds: int = 1
    repeat: bool = False
    """Begin the trace again after its last prompt."""

    def __post_init__(self) -> None:
        _require(bool(self.regimes), "--regimes names no regime")
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
        for flag, capacity in (
            ("--env-capacity", self.env_capacity),
            ("--reward-capacity", self.reward_capacity),
        ):
            _require(
                capacity is None or capacity >= 1,
                f"{flag} must be 1 or more, not {capacity}; leave it out for no limit",
            )
        for flag, seconds in (
            ("--env-start-s", self.env_start_s),
            ("--env-spread-s", self.env_spread_s),
            ("--reward-s", self.reward_s),
            ("--reward-cold-start-s", self.reward_cold_start_s),
        ):
            _require(0.0 <= seconds < 1e9, f"{flag} must be from 0 to below 1e9, not {seconds:g}")
        _require(
            0.0 <= self.env_failure_rate < 1.0,
            f"--env-failure-rate must be from 0 to below 1, not {self.env_failure_rate:g}",
        )
        _require(
            self.train_gpus >= 1,
            f"--train-gpus {self.train_gpus}: the trainer needs a GPU; with --colocated it has the "
            "engines' own",
        )
        _require(
            self.price is None or 0.0 <= self.price < 1e9,
            f"--price must be from 0 to below 1e9, not {self.price}",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
