"""SkyRL's data set with names of prompts; its loader's processes import this, and no trainer."""

from typing import Any

from heddle.epochs.file import prompt_id


class NamedPrompts:
    """A data set of SkyRL's, which names a prompt by its row's content: sessions have that name."""

    def __init__(self, prompts: Any) -> None:
        self._prompts = prompts
        self.collate_fn = prompts.collate_fn
        self.ids = [prompt_id(prompts.dataframe[row]) for row in range(len(prompts))]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        *content, _ = self._prompts[row]
        return (*content, self.ids[row])
