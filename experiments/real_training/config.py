"""What a training loop is made of."""

from dataclasses import dataclass, field

from experiments.real_training.echo import EchoTask
from experiments.real_training.messages import TrainerSettings
from heddle.config import RunConfig
from heddle.config_files import ConfigError

MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A training loop. `run` has the engines, whose model is trained, and the rollouts' policy.

    Raises:
        ConfigError: a value out of range.
    """

    run: RunConfig
    regime: str
    steps: int = 20
    """Batches to train."""
    groups: int = 8
    """Prompts of a batch."""
    samples: int = 8
    """Trained samples of a prompt."""
    optimizer_steps: int = 2
    """Of a batch."""
    task: EchoTask = field(default_factory=EchoTask)

    def __post_init__(self) -> None:
        _require(
            2 <= self.steps <= MOST_STEPS, f"--steps must be 2 to {MOST_STEPS:,}, not {self.steps}"
        )
        _require(self.groups >= 1, f"--groups must be 1 or more, not {self.groups}")
        _require(
            self.samples >= 2,
            f"--samples must be 2 or more, not {self.samples}: GRPO compares samples of one prompt",
        )
        _require(
            self.optimizer_steps <= self.groups * self.samples,
            f"--optimizer-steps {self.optimizer_steps}: a batch has only "
            f"{self.groups * self.samples} trajectories",
        )
        _require(
            self.optimizer_steps >= 1,
            f"--optimizer-steps must be 1 or more, not {self.optimizer_steps}",
        )

    @property
    def trainer(self) -> TrainerSettings:
        return TrainerSettings(
            model_dir=self.run.runtime.model_dir,
            optimizer_steps=self.optimizer_steps,
            seed=self.run.seed,
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
