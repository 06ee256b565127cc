"""Profiles of trainers and weight updates, read from a JSON file ("heddle.training/1").

`heddle_sim/profiles/training/published.json` ships: fitted on published steps and updates, with
its sources and errors. `python -m tools.profiles training` writes it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from heddle_sim.profile_checks import numbers
from heddle_sim.profile_files import PROFILE_FOLDER, ProfileError
from heddle_sim.training import TrainingProfile
from heddle_sim.weight_update import WeightUpdateProfile

STATED = (
    "matmul",
    "attention",
    "low_precision_share",
    "gpu_efficiency",
    "link_efficiency",
    "expert_layer_s",
    "colocated_efficiency",
)
"""Fields of a `TrainingProfile` that hold numbers."""
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
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TrainingFile)
    except OSError as e:
        raise ProfileError(f"cannot read the training profile {path}: {e.strerror}") from e
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ProfileError(
            f"{path} is not a training profile: {e}; see heddle_sim/profiles/README.md"
        ) from e
    for fault in _faults(file):
        raise ProfileError(f"{path}: {fault}")
    return file


def _faults(file: TrainingFile) -> Iterator[str]:
    """What is wrong with these numbers, as lines that name the field; none if nothing is."""
    stated = {name: getattr(file.training, name) for name in STATED}
    for name, value in (
        *numbers("training", stated),
        *numbers("weight_update", file.weight_update.methods),
    ):
        last = name.rpartition(".")[2]
        if last in ("pause_share", "low_precision_share"):
            if not 0 <= value <= 1:
                yield f"{name} is between 0 and 1, not {value}"
        elif last in ("setup_s", "tensor_s", "expert_layer_s"):
            if not (math.isfinite(value) and value >= 0):
                yield f"{name} must be at least 0, not {value}"
        elif not (math.isfinite(value) and value > 0):
            yield f"{name} must be a positive finite number, not {value}"
