"""What `heddle train` runs."""

from dataclasses import dataclass, field

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle_runtime.train.echo import EchoTask
from heddle_runtime.train.messages import TrainerSettings

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
    learning_rate: float = 3e-3
    clip: float = 0.2
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
        try:
            _ = self.trainer
        except ValueError as error:
            raise ConfigError(f"the trainer's {error}") from None

    @property
    def trainer(self) -> TrainerSettings:
        """Settings of the trainer."""
        return TrainerSettings(
            model_dir=self.run.runtime.model_dir,
            learning_rate=self.learning_rate,
            clip=self.clip,
            optimizer_steps=self.optimizer_steps,
            seed=self.run.seed,
        )


def echo_task(**values: float) -> EchoTask:
    """Make the task from options that were given.

    Raises:
        ConfigError: a value out of range.
    """
    try:
        return EchoTask(**values)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(f"the task's {error}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)
