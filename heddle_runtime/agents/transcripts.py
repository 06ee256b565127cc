"""What was said in a trajectory, for people and trainers to read: `transcripts.jsonl`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec

from heddle_core.events import Outcome


class TranscriptStep(msgspec.Struct, frozen=True, kw_only=True):
    """One generation and what the agent answered to it."""

    generation: str
    """Special tokens left out."""
    output_tokens: int
    tool: str | None = None
    """What the agent did; None when the trajectory ended with the generation."""
    observation: str = ""
    """What it appended to the context, shortened as the model saw it."""
    observation_tokens: int = 0
    status: str = ""
    """How the program ended, see `heddle_runtime.sandbox.Status`; "cut" when the driver cut it."""
    tool_s: float = 0.0


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    id: str
    group: str
    task: str
    opening: str
    """The text that it began with, the prompt in it."""
    steps: tuple[TranscriptStep, ...]
    outcome: Outcome | None
    """None when it did not end by itself: cancelled, or refused by its engine."""
    answer: str | None
    expected: str | None
    """The right answer, where the task told it."""
    correct: bool | None
    """Whether they are the same text but for space around; None where there is no right one."""


OnEnd: TypeAlias = Callable[[Transcript], None]
"""Told once, when a trajectory has ended by itself."""


@contextmanager
def transcript_file(path: str | Path) -> Iterator[OnEnd]:
    """Begin a new file, and yield what writes a line to it for each transcript, at once.

    Raises:
        OSError: it cannot be written, or is there already.
    """
    with Path(path).open("xb") as file:

        def write(transcript: Transcript) -> None:
            file.write(msgspec.json.encode(transcript) + b"\n")
            file.flush()

        yield write
