"""Texts of trajectories, for users and trainers: `transcripts.jsonl`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from heddle_core.events import Outcome


class TranscriptStep(msgspec.Struct, frozen=True, kw_only=True):
    """One generation and the agent's answer."""

    generation: str
    """Special tokens left out."""
    output_tokens: int
    tool: str | None = None
    """The agent's tool; None when the trajectory ended with the generation."""
    observation: str = ""
    """The text appended to the context, shortened as the model saw it."""
    observation_tokens: int = 0
    status: str = ""
    """How the program ended, see `heddle_runtime.sandbox.runner.Status`; "cut": by the driver."""
    tool_s: float = 0.0


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    id: str
    group: str
    task: str
    opening: str
    """The first text, with the prompt in it."""
    steps: tuple[TranscriptStep, ...]
    outcome: Outcome | None
    """None when it did not end by itself: cancelled, or refused by its engine."""
    answer: str | None
    expected: str | None
    """The right answer, if the task has one."""
    correct: bool | None
    """Whether both texts are equal without surrounding space; None without a right answer."""


OnEnd: TypeAlias = Callable[[Transcript], None]
"""Called once, when a trajectory has ended by itself."""


@contextmanager
def transcript_file(path: str | Path) -> Iterator[OnEnd]:
    """Create a file, and yield a function that writes each transcript to it at once, as a line.

    Raises:
        OSError: it cannot be written, or is there already.
    """
    with Path(path).open("xb") as file:

        def write(transcript: Transcript) -> None:
            file.write(msgspec.json.encode(transcript) + b"\n")
            file.flush()

        yield write
