"""A data set for verl that puts prompts of like length into a batch.

verl 0.9.1 has no key for a sampler: its data set has the order, `data.custom_cls.name=EpochDataset`
of `data.custom_cls.path=pkg://heddle_verl.epochs`, and its loader goes through it in sequence.
`data.heddle` has the keys of `EpochSettings`.
"""

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset

from heddle.config_error import require
from heddle.epochs.file import prompt_id
from heddle.epochs.rows import EpochSettings, RowOrder
from heddle_verl.identifying import PROMPT

_PLACE = "data.heddle."


class EpochDataset(RLHFDataset):  # type: ignore[misc]
    """verl's data set; the one of `data.train_files` begins an epoch when row 0 is read."""

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, *args: Any, **kw: Any) -> None:
        trains = str(data_files) == str(config.train_files)
        super().__init__(data_files, tokenizer, config, *args, **kw)
        self._order: RowOrder | None = None
        if not trains:
            return
        require(
            not config.shuffle and not config.dataloader_num_workers,
            "EpochDataset has the order itself, in the trainer's process: set data.shuffle=false "
            "and data.dataloader_num_workers=0",
        )
        media = {self.image_key, self.video_key, self.audio_key} & set(self.dataframe.column_names)
        self._ids = [prompt_id(row) for row in self.dataframe.remove_columns(list(media))]
        self._order = RowOrder(
            self._ids,
            EpochSettings.of(config.get("heddle"), _PLACE),
            # What verl's loader draws at once; of 1, as for filtered groups, several make a batch.
            batch=max(config.get("gen_batch_size") or 0, config.train_batch_size),
            seed=config.seed,
            place=_PLACE,
        )

    def __getitem__(self, position: int) -> Any:
        if self._order is None:
            return super().__getitem__(position)
        row = self._order.row(position)
        return {**super().__getitem__(row), PROMPT: self._ids[row]}

    def state_dict(self) -> dict[str, Any]:
        """For verl's checkpoints."""
        return {} if self._order is None else self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in the epoch of a checkpoint."""
        if self._order is not None and state:
            self._order.load_state_dict(state)
