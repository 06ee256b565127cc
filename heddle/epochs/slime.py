"""Data sources for slime and vime that put prompts of like length into a rollout.

`--data-source-path heddle.epochs.slime.SlimeDataSource`, or `VimeDataSource`, needs
`--rollout-shuffle`. The file of `--custom-config-path` has the keys of `EpochSettings`, with
`heddle_` before each. Calls are those of slime's source at 3c9aa092.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from heddle.config_error import require
from heddle.epochs.file import EpochFile, prompt_id
from heddle.epochs.rows import EpochSettings, RowOrder

_STATE = "heddle_epochs"
"""In the data source's `metadata`, which its checkpoints have."""
_PLACE = "heddle_"


def __getattr__(name: str) -> Any:
    """Return the data source of a framework, over its own."""
    framework = {"SlimeDataSource": "slime", "VimeDataSource": "vime"}.get(name)
    if framework is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _source(import_module(f"{framework}.rollout.data_source").RolloutDataSourceWithBuffer)


def _settings(args: Any) -> EpochSettings:
    keys = EpochSettings.__dataclass_fields__
    given = {key: getattr(args, _PLACE + key, None) for key in keys}
    return EpochSettings(**{key: value for key, value in given.items() if value is not None})


def _source(base: Any) -> Any:
    class EpochDataSource(base):  # type: ignore[misc]
        """Shuffles its data set by an epoch file, and names sessions after prompts."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            require(
                self.dataset is not None and args.rollout_shuffle,
                "heddle.epochs.slime orders the data set of --prompt-data where slime shuffles it: "
                "add --rollout-shuffle",
            )
            samples = self.dataset.origin_samples
            ids = [prompt_id([each.prompt, each.label, each.metadata]) for each in samples]
            for sample, name in zip(samples, ids, strict=True):
                sample.session_id = name
            self._order = RowOrder(
                ids,
                _settings(args),
                batch=args.rollout_batch_size,
                seed=args.rollout_seed,
                place=_PLACE,
            )
            self.dataset.shuffle = self._shuffle

        def _shuffle(self, epoch: int) -> None:
            """In place of the data set's own: begin an epoch, or go on in a checkpoint's."""
            order, state = self._order, self.metadata.get(_STATE, {})
            if state.get("epoch") == epoch:
                order.load_state_dict(state)
            else:
                order.begin()
                self.metadata[_STATE] = {"epoch": epoch, **order.state_dict()}
            self.dataset.samples = [self.dataset.origin_samples[row] for row in order.rows or ()]

        def get_samples(self, num_samples: int) -> Any:
            """As slime's; a session is a prompt's name and the sample's number."""
            if self._order.rows is None:
                self._shuffle(self.epoch_id)
            groups = super().get_samples(num_samples)
            for sample in (each for group in groups for each in group):
                if "_" not in sample.session_id:
                    sample.session_id = f"{sample.session_id}_{sample.index}"
            return groups

    return EpochDataSource


def write_lengths(args: Any, all_samples: Any, data_source: Any) -> None:
    """Append a rollout's lengths: slime's `--rollout-all-samples-process-path`."""
    file = EpochFile(Path(_settings(args).epoch_file))
    flat = [each for group in all_samples for each in group]
    for sample in (each for item in flat for each in (item if isinstance(item, list) else [item])):
        name = (sample.session_id or "").rpartition("_")[0]
        if name and sample.status.value in ("completed", "truncated"):
            mask = sample.loss_mask
            file.add(name, sample.response_length if mask is None else sum(mask))
