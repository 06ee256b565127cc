"""slime's data source as Heddle meets it, written from its source at commit 3c9aa092.

It has the calls, attributes and files of `slime.rollout.data_source` and `slime.utils.data`, and
nothing of tokenizers; slime itself needs GPUs to be installed.
"""

import copy
import json
import pickle
import random
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Sample:
    """One sample; the data set has one of each prompt, which is copied for each of its samples."""

    def __init__(self, prompt: Any, label: str | None, metadata: dict[str, Any]) -> None:
        self.prompt, self.label, self.metadata = prompt, label, metadata
        self.group_index: int | None = None
        self.index: int | None = None
        self.session_id: str | None = None
        self.status = Status.PENDING
        self.response_length = 0
        self.loss_mask: list[int] | None = None


class Dataset:
    """Prompts of a file of JSON lines (`--prompt-data`), shuffled anew for each epoch."""

    def __init__(self, path: str, args: Any) -> None:
        self.origin_samples = [
            Sample(row[args.input_key], row[args.label_key], row.get(args.metadata_key) or {})
            for row in map(json.loads, Path(path).read_text().splitlines())
        ]
        self.samples, self.epoch_id, self.seed = self.origin_samples, -1, args.rollout_seed

    def __len__(self) -> int:
        return len(self.samples)

    def shuffle(self, new_epoch_id: int) -> None:
        if new_epoch_id != self.epoch_id:
            drawn = random.Random(self.seed + new_epoch_id)
            self.samples = drawn.sample(self.origin_samples, len(self.origin_samples))
            self.epoch_id = new_epoch_id


class RolloutDataSourceWithBuffer:
    """Hands out groups of samples, those first that were handed back."""

    def __init__(self, args: Any) -> None:
        self.args, self.buffer, self.metadata = args, [], {}
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.dataset = Dataset(args.prompt_data, args) if args.rollout_global_dataset else None
        if self.dataset is not None and args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        kept, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return kept + [self._group(prompt) for prompt in self._next(num_samples - len(kept))]

    def _next(self, count: int) -> list[Sample]:
        here = self.dataset.samples[self.sample_offset :][:count]
        self.sample_offset += len(here)
        missing = count - len(here)
        if missing:
            self.epoch_id += 1
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
            here = here + self.dataset.samples[:missing]
            self.sample_offset = missing
        return here

    def _group(self, prompt: Sample) -> list[Sample]:
        made = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in made:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return made

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.buffer += samples

    KEYS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")

    def _path(self, folder: str, rollout_id: int) -> Path:
        return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"

    def save(self, rollout_id: int) -> None:
        path = self._path(self.args.save, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps({key: getattr(self, key) for key in self.KEYS}))

    def load(self, rollout_id: int | None = None) -> None:
        path = self._path(self.args.load, rollout_id)
        if path.exists():
            for key, value in pickle.loads(path.read_bytes()).items():
                setattr(self, key, value)
            if self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)


def arguments(folder: Path, prompts: int, **given: Any) -> SimpleNamespace:
    """slime's arguments, and a file of prompts."""
    rows = [{"text": f"question {n}", "label": str(n), "metadata": {}} for n in range(prompts)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain = {
        "prompt_data": str(data),
        "input_key": "text",
        "label_key": "label",
        "metadata_key": "metadata",
        "rollout_seed": 42,
        "rollout_shuffle": True,
        "rollout_global_dataset": True,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "save": str(folder / "checkpoints"),
        "load": str(folder / "checkpoints"),
        # Of the file that --custom-config-path names.
        "heddle_epoch_file": str(folder / "epoch.jsonl"),
    }
    return SimpleNamespace(**(plain | given))
