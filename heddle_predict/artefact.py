"""Model files: a zip of one JSON header and plain arrays, each with its hash. No pickle, no code.

The header states the kind of the model, its features, its training data and the command. Files of
another schema or a newer version, damaged files and other features are refused with the reason.
"""

import errno
import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from heddle_core.estimate.history import Levels
from heddle_core.json_faults import NO_JSON
from heddle_predict.errors import PredictError
from heddle_predict.model import Vocabulary

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

SCHEMA: Final = "heddle.model"
VERSION: Final = 1
SUFFIX: Final = ".heddle"

_HEADER: Final = "header.json"
_ARRAYS: Final = "arrays/"
_ARRAY_NAME: Final = re.compile(r"arrays/[\w.]+\.npy")
_MOST_HEADER_BYTES: Final = 4 << 20
_SMALL_BYTES: Final = 128 << 20
_MOST_RATIO: Final = 8
"""All members unpacked are at most so large, and so many times the file: numbers pack badly."""
_DAMAGE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,  # an unknown method of compression, or version
    RuntimeError,  # an encrypted member
    UnicodeDecodeError,
    OverflowError,
)
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)  # equal models are equal files


class TrainedOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trace that a model learned from."""

    name: str
    sha256: str
    trajectories: int
    groups: int
    dropped: int = 0


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a model file."""

    schema: str
    kind: Literal["trees"]
    heddle: str
    """Version of Heddle that wrote it."""
    command: str
    """The command that made it, to be run again."""
    seed: int
    trained_on: tuple[TrainedOn, ...]
    examples: int
    error: float
    """Root mean squared error of the natural logarithm, on groups left out of training."""
    settings: dict[str, str]
    """Further settings of the training, for information."""
    levels: tuple[float, ...]
    features: tuple[str, ...]
    tasks: dict[str, Levels]
    anywhere: Levels
    tools: tuple[str, ...]
    hashes: dict[str, str] = {}
    """sha256 of every other member."""

    def vocabulary(self) -> Vocabulary:
        """As the core takes it."""
        return Vocabulary(tasks=self.tasks, anywhere=self.anywhere, tools=self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """A model file in memory."""

    header: Header
    arrays: Arrays
    sha256: str = ""
    """Of the whole file, once it has been one."""


def write_artefact(path: Path, artefact: Artefact) -> str:
    """Write a model file, whole or not at all; return its sha256.

    Raises:
        PredictError: its name does not end in .heddle.
        OSError: the disk refuses.
    """
    if path.suffix != SUFFIX:
        raise PredictError(f"{path}: a model file must be named *{SUFFIX}")
    members = {f"{_ARRAYS}{name}.npy": _packed(a) for name, a in artefact.arrays.items()}
    hashes = {name: sha256(data).hexdigest() for name, data in members.items()}
    header = msgspec.structs.replace(artefact.header, hashes=hashes)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as file:
            text = msgspec.json.format(msgspec.json.encode(header), indent=1)
            for name, data in {_HEADER: text, **members}.items():
                file.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
        found = _hash_of(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return found


def read_artefact(path: Path) -> Artefact:
    """Read and check a model file.

    Raises:
        PredictError: it is no model file, is damaged, or is of another schema or version.
        OSError: it cannot be read.
    """
    if path.is_dir():
        raise PredictError(f"{path}: is a folder; name the {SUFFIX} file in it")
    try:
        with zipfile.ZipFile(path) as file:
            _check_packing(file)
            header = _header(path, file)
            _check_sizes(path, file, header)
            members = {name: _member(path, file, name, header) for name in header.hashes}
    except PredictError:
        raise
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the beginning of the file
            raise
        raise PredictError(_no_zip(path, error)) from None
    except (*_DAMAGE, ValueError) as error:
        raise PredictError(_no_zip(path, error)) from None
    arrays = {
        name.removeprefix(_ARRAYS).removesuffix(".npy"): _array(path, name, data)
        for name, data in members.items()
    }
    return Artefact(header=header, arrays=arrays, sha256=_hash_of(path))


def _check_packing(file: zipfile.ZipFile) -> None:
    """Other ways to pack than those of model files have errors of their own."""
    for each in file.infolist():
        if each.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{each.filename!r} is packed by method {each.compress_type}")


def _header(path: Path, file: zipfile.ZipFile) -> Header:
    if _HEADER not in file.namelist():
        raise PredictError(f"{path}: not a model of Heddle (it has no {_HEADER})")
    if file.getinfo(_HEADER).file_size > _MOST_HEADER_BYTES:
        raise PredictError(f"{path}: not a model of Heddle (its {_HEADER} is too large)")
    data = file.read(_HEADER)
    try:
        named = msgspec.json.decode(data, type=_Named)
    except NO_JSON:
        named = _Named(schema="")
    schema = named.schema
    name, _, version = schema.partition("/")
    if name != SCHEMA or not version.isdecimal():
        raise PredictError(f"{path}: its schema is {schema!r}, not {SCHEMA}/{VERSION}")
    if int(version) > VERSION:
        raise PredictError(
            f"{path}: its schema is {schema}, newer than the {SCHEMA}/{VERSION} that this Heddle "
            "reads; update Heddle, or fit the model again with this one"
        )
    if named.kind != "trees":
        raise PredictError(
            f"{path}: is a model of kind {named.kind!r}, and this Heddle reads trees alone; fit it "
            "again with `heddle predict fit`"
        )
    try:
        header = msgspec.json.decode(data, type=Header)
    except msgspec.MsgspecError as error:
        raise PredictError(f"{path}: damaged: {_HEADER}: {error}") from None
    _check(path, header)
    return header


class _Named(msgspec.Struct):
    schema: str
    kind: str = "trees"


def _check(path: Path, header: Header) -> None:
    levels = header.levels
    if not levels or list(levels) != sorted(levels) or not 0.0 < levels[0] <= levels[-1] < 1.0:
        raise PredictError(f"{path}: damaged: its levels {levels} are no rising probabilities")
    made = header.vocabulary().names()
    if header.features != made:
        other = [name for name in header.features if name not in made]
        lacking = [name for name in made if name not in header.features]
        odd = ", ".join((other or lacking or ["their order"])[:3])
        raise PredictError(
            f"{path}: was trained on other features than this version observes ({odd}); "
            f"fit it again: {header.command}"
        )
    for levels_of in (header.anywhere, *header.tasks.values()):
        sizes = (levels_of.total_tokens, levels_of.step_tokens, levels_of.payload_tokens)
        if not all(1.0 <= size < 1e12 for size in (*sizes, levels_of.prompt_tokens)):
            raise PredictError(f"{path}: damaged: levels of tasks must be 1 token or more")


def _check_sizes(path: Path, file: zipfile.ZipFile, header: Header) -> None:
    """Refuse a small file that would unpack to a large one, before it does."""
    sizes = {info.filename: info.file_size for info in file.infolist()}
    total = sum(sizes.get(name, 0) for name in header.hashes)
    most = _SMALL_BYTES + _MOST_RATIO * path.stat().st_size
    if total > most:
        raise PredictError(
            f"{path}: damaged: it would unpack to {total:,} bytes, and a model of its size to "
            f"{most:,} at most; do not use this file unless you know its source"
        )


def _member(path: Path, file: zipfile.ZipFile, name: str, header: Header) -> bytes:
    if not _ARRAY_NAME.fullmatch(name):
        raise PredictError(
            f"{path}: damaged: it should hold {name!r}, which is no array of a model; "
            "do not use this file unless you know its source"
        )
    if name not in file.namelist():
        raise PredictError(f"{path}: damaged: it should hold {name!r}, and does not")
    data = file.read(name)
    if sha256(data).hexdigest() != header.hashes[name]:
        raise PredictError(f"{path}: damaged: {name} is not what was written")
    return data


def _array(path: Path, name: str, data: bytes) -> NDArray[Any]:
    try:
        stream = io.BytesIO(data)
        if np.lib.format.read_magic(stream) != (1, 0):
            raise PredictError(f"{path}: damaged: {name} has another version than numpy writes")
        shape, _, kind = np.lib.format.read_array_header_1_0(stream)
        if kind.itemsize * math.prod(shape) != len(data) - stream.tell() or not kind.itemsize:
            raise PredictError(f"{path}: damaged: {name} has not the size that its shape takes")
        array: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    except PredictError:
        raise
    except (ValueError, TypeError, EOFError, OSError, OverflowError) as error:
        raise PredictError(f"{path}: damaged: {name}: {error}") from None
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        raise PredictError(f"{path}: damaged: {name} is no plain array")
    return array


def _no_zip(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    if start == b"PK":
        return f"{path}: damaged or cut short ({error}); copy it again, or fit the model again"
    return f"{path}: not a model of Heddle; `heddle predict fit` makes one"


def _packed(array: NDArray[Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, np.ascontiguousarray(array), allow_pickle=False)
    return out.getvalue()


def _hash_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
