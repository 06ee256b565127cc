"""Lengths of the samples of prompts, for samplers: JSON lines, `heddle.epoch/1`.

After the line of the schema comes one for each sample that has ended, such as
``{"prompt": "9f86d081884c7d65", "tokens": 812, "at_s": 1764286000.1}``, with Unix time. A line is
one write: a reader may come at any time, and several programs may append.
"""

import fcntl
import json
import logging
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from os import SEEK_END
from pathlib import Path
from typing import Annotated, Any

import msgspec

from heddle.config_error import ConfigError
from heddle_core.commands import Command
from heddle_core.events import (
    EngineFailed,
    Event,
    StepFinished,
    StepPreempted,
    ToolReturned,
    TrajectoryArrived,
    TrajectoryFinished,
)
from heddle_core.ids import TrajectoryId
from heddle_core.json_faults import NO_JSON

SCHEMA = "heddle.epoch/1"
_FIRST_LINE = msgspec.json.encode({"schema": SCHEMA}) + b"\n"
_LONGEST_LINE = 1 << 16
_ENCODER = msgspec.json.Encoder()

log = logging.getLogger(__name__)


class SampleLength(msgspec.Struct, frozen=True, gc=False):
    """A sample that has ended."""

    prompt: str
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    """Output tokens of all its steps."""
    at_s: float
    """When it ended, Unix time."""


def prompt_id(row: Any) -> str:
    """Name a prompt by the content of its row; images and other objects count by their type."""
    text = json.dumps(row, sort_keys=True, default=lambda each: type(each).__name__)
    return blake2b(text.encode(), digest_size=8).hexdigest()


class EpochFile:
    """Appends to an epoch file, which is made if it is not there."""

    def __init__(self, path: Path) -> None:
        """Check it; an unfinished last line is cut off.

        Raises:
            ConfigError: it cannot be written, or is no epoch file.
        """
        self._path = path
        try:
            with path.open("ab+", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # against a line of another program
                size = file.seek(0, SEEK_END)
                file.seek(0)
                if size:
                    _check_schema(path, file.readline(_LONGEST_LINE))
                file.seek(max(0, size - _LONGEST_LINE))
                tail = file.read()
                file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}: give the path of an epoch file that can be written"
            ) from None

    def add(self, prompt: str, tokens: int) -> None:
        """Append a sample that has just ended.

        Raises:
            OSError: it cannot be written.
        """
        line = _ENCODER.encode(SampleLength(prompt, tokens, time.time())) + b"\n"
        with self._path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            line = line if file.seek(0, SEEK_END) else _FIRST_LINE + line
            if file.write(line) != len(line):
                raise OSError("a line was written in part")


def read_samples(path: Path) -> list[SampleLength]:
    """The samples of an epoch file, in the order of their ends.

    Raises:
        ConfigError: it is no epoch file, or a line is wrong; names the line.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give the path of an epoch file") from None
    if not lines and not rest:
        return []
    _check_schema(path, lines[0] if lines else rest)
    decode = msgspec.json.Decoder(SampleLength).decode
    samples = []
    for number, line in enumerate(lines[1:], 2):
        try:
            samples.append(decode(line))
        except NO_JSON as error:
            raise ConfigError(
                f"{path}, line {number}: {error}: remove the line, or begin a new file"
            ) from None
    if rest:
        raise ConfigError(
            f"{path}, line {len(lines) + 1}: ends within the line, as after a full disk: remove it"
        )
    return samples


def _check_schema(path: Path, line: bytes) -> None:
    try:
        found = msgspec.json.decode(line, type=dict[str, Any]).get("schema")
    except NO_JSON:
        found = None
    if found != SCHEMA:
        raise ConfigError(
            f"{path}, line 1: has {f'the schema {found}' if found else 'no schema'}, and an epoch "
            f"file of this Heddle has {SCHEMA}: give the path that the gateway or the router "
            "writes, or begin a new file"
        )


class _Sample:
    """A trajectory under way."""

    __slots__ = ("prompt", "tokens", "whole")

    def __init__(self, prompt: str) -> None:
        self.prompt, self.tokens = prompt, 0
        self.whole = False
        """Whether its last step has ended of itself, so that it may end here."""


class EpochLog:
    """A `Sink` that appends the lengths of trajectories as they end; not those that are cut off."""

    def __init__(
        self,
        path: Path,
        prompt_of: Callable[[TrajectoryArrived], str] = lambda arrived: arrived.group,
    ) -> None:
        """`prompt_of` names the prompt; trajectories without a name are left out.

        Raises:
            ConfigError: the file cannot be written, or is no epoch file.
        """
        self._file: EpochFile | None = EpochFile(path)
        self._path, self._prompt_of = path, prompt_of
        self._samples: dict[TrajectoryId, _Sample] = {}

    def __call__(self, event: Event, commands: Sequence[Command]) -> None:
        match event:
            case TrajectoryArrived():
                self._samples[event.trajectory] = _Sample(self._prompt_of(event))
            case StepFinished():
                self._count(event.trajectory, event.output_tokens, event.reason != "error")
            case StepPreempted():
                self._count(event.trajectory, event.output_tokens, False)
            case ToolReturned():
                self._count(event.trajectory, 0, False)
            case EngineFailed():
                for trajectory, tokens in event.salvaged:
                    self._count(trajectory, tokens, False)
            case TrajectoryFinished():
                sample = self._samples.pop(event.trajectory, None)
                if sample is not None and sample.whole and event.outcome != "failed":
                    self._add(sample)

    def _count(self, trajectory: TrajectoryId, tokens: int, whole: bool) -> None:
        sample = self._samples.get(trajectory)
        if sample is not None:
            sample.tokens += tokens
            sample.whole = whole

    def _add(self, sample: _Sample) -> None:
        """Append it, unless that has failed before: lengths are worth no rollout."""
        if self._file is None or not sample.prompt:
            return
        try:
            self._file.add(sample.prompt, sample.tokens)
        except OSError as error:
            self._file = None
            log.warning("%s: %s: no more lengths are written", self._path, error)
