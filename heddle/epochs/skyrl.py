"""SkyRL's training with prompts of like length in a batch, by SkyRL's own key for that.

`trainer.override_entrypoint=heddle.epochs.skyrl`: its trainer for reinforcement learning takes no
sampler in SkyRL 0.3. `data.heddle` has the keys of `EpochSettings`.
"""

import sys
from dataclasses import dataclass, field
from typing import Any

import ray
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.config import DataConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.utils import initialize_ray

from heddle.epochs.named import NamedPrompts
from heddle.epochs.rows import EpochSettings, RowOrder

_PLACE = "data.heddle."
_ENTRY = "trainer.override_entrypoint="


@dataclass
class EpochData(DataConfig):  # type: ignore[misc]
    """SkyRL's, and the section of Heddle."""

    heddle: EpochSettings = field(default_factory=EpochSettings)


@dataclass
class EpochConfig(SkyRLTrainConfig):  # type: ignore[misc]
    """SkyRL's, and the section of Heddle."""

    data: EpochData = field(default_factory=EpochData)


class EpochTrainer(RayPPOTrainer):  # type: ignore[misc]
    """SkyRL's trainer, whose loader has the order of an epoch file."""

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        super()._build_train_dataloader_and_compute_training_steps()
        trainer = self.cfg.trainer
        self.train_dataloader.batch_sampler.sampler = RowOrder(
            self.train_dataset.ids,
            self.cfg.data.heddle,
            batch=trainer.train_batch_size,
            seed=trainer.seed,
            place=_PLACE,
        )


class EpochTraining(BasePPOExp):  # type: ignore[misc]
    """SkyRL's experiment with this data set and this trainer."""

    def get_train_dataset(self) -> NamedPrompts:
        """The prompts under names that the gateway learns."""
        return NamedPrompts(super().get_train_dataset())

    def get_trainer(self, **inputs: Any) -> EpochTrainer:
        """SkyRL's trainer with the order of an epoch file."""
        return EpochTrainer(**inputs)


def _train(config: EpochConfig) -> None:
    EpochTraining(config).run()


def main() -> None:
    """Called by SkyRL's own entry point."""
    config = EpochConfig.from_cli_overrides([a for a in sys.argv[1:] if not a.startswith(_ENTRY)])
    config.data.heddle.checked(_PLACE)
    validate_cfg(config)
    initialize_ray(config)
    ray.get(ray.remote(num_cpus=1)(_train).remote(config))
