"""Text to token ids and back, for live agents; engines get ids only."""

from pathlib import Path
from typing import Any, Protocol


class TokenizerError(ValueError):
    """A model folder whose tokenizer cannot be used; the message says why, and what to do."""


class Tokenizer(Protocol):
    """The interface that live agents need."""

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of a text; `begins`: with the special tokens that a context begins with.

        The text of a special token is encoded as ordinary text.
        """
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens left out."""
        ...

    def is_special(self, id_: int) -> bool:
        """Whether an id is a special token, such as end of text."""
        ...


class FileTokenizer:
    """A `tokenizer.json`, read by the library `tokenizers`; implements `Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        # A program that prints "<|im_end|>" must not end a text.
        tokenizer.encode_special_tokens = True
        # Some files have settings for training.
        tokenizer.no_truncation()
        tokenizer.no_padding()

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=begins).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; unknown ids are left out."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def is_special(self, id_: int) -> bool:
        """Whether an id is a special token."""
        return id_ in self._special


def load_tokenizer(model_dir: str | Path) -> FileTokenizer:
    """Read the tokenizer of a model folder.

    Raises:
        TokenizerError: it is not there or is damaged, or the library is not installed.
    """
    path = Path(model_dir) / "tokenizer.json"
    if not Path(model_dir).is_dir():
        raise TokenizerError(f"{model_dir}: is not a model folder; give one with tokenizer.json")
    if not path.is_file():
        raise TokenizerError(
            f"{path}: no such file; live agents need it. Where a model comes with another kind of "
            "tokenizer, transformers can write this one: AutoTokenizer, then save_pretrained"
        )
    try:
        from tokenizers import Tokenizer as Library
    except ModuleNotFoundError:
        raise TokenizerError(
            "live agents need the package tokenizers: pip install 'heddle-rl[live]'"
        ) from None
    try:
        return FileTokenizer(Library.from_file(str(path)))
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(
            f"{path}: is not a tokenizer ({error}); copy it again from the model's source"
        ) from None
