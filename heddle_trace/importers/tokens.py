"""Counts the tokens of a text where a log recorded no count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from heddle_trace.errors import TraceError

CHARS_PER_TOKEN: Final = 3.6
"""By Qwen's tokenizer over the sample logs (docs/importing.md): prose 4.9, code 3.4, tables 2.4."""

# Splits as Qwen's and OpenAI's ranks were made for; a ranks file does not carry its pattern.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(slots=True)
class Counter:
    """Counts tokens of texts. `name` completes the sentence "counted ..."."""

    name: str
    _count: Callable[[str], int]
    texts: int = 0

    def count(self, text: str | None) -> int:
        """Tokens of a text; 0 of none."""
        if not text:
            return 0
        self.texts += 1
        return self._count(text)


def apportioned(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the weights as near as can be.

    Rounding differences go to the largest remainders. Equal shares where all weights are 0.
    """
    whole = sum(weights)
    exact = [total * w / whole if whole else total / len(weights) for w in weights]
    shares = [int(share) for share in exact]
    rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for index in rest[: total - sum(shares)]:
        shares[index] += 1
    return shares


def counter(tokenizer: str | None = None, chars_per_token: float = CHARS_PER_TOKEN) -> Counter:
    """A counter that uses a tokenizer where one is named, and a ratio of characters otherwise.

    `tokenizer` is the path of a `tokenizer.json` or of a folder with one (library tokenizers), the
    path of a `*.tiktoken` ranks file, or the name of an encoding of the library tiktoken. Raises
    TraceError when it cannot be loaded, or when the ratio is not a positive number.
    """
    if tokenizer is not None:
        return Counter(f"with {Path(tokenizer).name}", _tokenizer(tokenizer))
    if not 0.1 <= chars_per_token <= 100:
        raise TraceError(f"{chars_per_token} characters a token: give a number from 0.1 to 100")
    return Counter(
        f"at {chars_per_token:g} characters a token",
        lambda text: max(1, round(len(text) / chars_per_token)),
    )


def _tokenizer(named: str) -> Callable[[str], int]:
    path = Path(named)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.name.endswith(".json"):
        return _from_json(path)
    if path.name.endswith(".tiktoken"):
        return _from_ranks(path)
    return _from_name(named)


def _from_json(path: Path) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TraceError(f"{path}: needs the library tokenizers; pip install tokenizers") from None
    _readable(path)
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TraceError(f"{path}: is no tokenizer.json ({error})") from None
    return lambda text: len(made.encode(_clean(text), add_special_tokens=False).ids)


def _from_ranks(path: Path) -> Callable[[str], int]:
    import base64
    import binascii

    tiktoken = _tiktoken(str(path))
    _readable(path)
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        if not all(bytes([byte]) in ranks for byte in range(256)):
            raise ValueError("not every single byte has a rank")
        made = tiktoken.Encoding(
            path.stem, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
    except (ValueError, binascii.Error) as error:
        raise TraceError(f"{path}: is no file of tiktoken ranks ({error})") from None
    return lambda text: len(made.encode_ordinary(_clean(text)))


def _from_name(name: str) -> Callable[[str], int]:
    tiktoken = _tiktoken(name)
    try:
        made = tiktoken.get_encoding(name)
    except ValueError:
        known = ", ".join(tiktoken.list_encoding_names())
        raise TraceError(
            f"tokenizer {name!r}: give a tokenizer.json, a *.tiktoken file, or one of {known}"
        ) from None
    except Exception as error:  # it fetches what it has not: whatever a network can raise
        raise TraceError(
            f"tokenizer {name!r} is not on this machine and could not be fetched "
            f"({type(error).__name__}); give the path of a file"
        ) from None
    return lambda text: len(made.encode_ordinary(_clean(text)))


def _tiktoken(named: str) -> ModuleType:
    try:
        import tiktoken
    except ImportError:
        raise TraceError(
            f"tokenizer {named!r}: needs the library tiktoken; pip install 'heddle-rl[tokens]'"
        ) from None
    return tiktoken


def _readable(path: Path) -> None:
    if not path.is_file():
        raise TraceError(f"{path}: no such file; check the path of the tokenizer")


def _clean(text: str) -> str:
    """A text without lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
