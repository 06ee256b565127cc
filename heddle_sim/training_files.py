"""Profiles of trainers and weight updates, read from a JSON file ("heddle.training/1").

`heddle_sim/profiles/training/published.json` ships: fitted on published steps and updates, with
its sources and errors. `python -m tools.profiles training` writes it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heddle_core.bounds import bound_faults
from heddle_sim.profile_files import PROFILE_FOLDER, ProfileError, decode_profile
from heddle_sim.training import TrainingProfile
from heddle_sim.weight_update import WeightUpdateProfile

TRAINING_FILE = PROFILE_FOLDER / "training" / "published.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFile:
    """Both profiles of one file."""

    schema: Literal["heddle.training/1"]
    training: TrainingProfile
    weight_update: WeightUpdateProfile


def load_training(path: Path = TRAINING_FILE) -> TrainingFile:
    """Read and check a file of training profiles; by default the shipped one.

    Raises ProfileError that names the file and the field.
    """
    file = decode_profile(path, TrainingFile, "training profile")
    for fault in bound_faults(file):
        raise ProfileError(f"{path}: {fault}")
    return file
