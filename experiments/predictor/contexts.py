"""The history of a trajectory as text: the input of a language model."""

import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from heddle_predict.errors import PredictError
from heddle_trace.schema import TrajectoryScript

_LATEST_STEPS: Final = 40
_PROMPT_CHARACTERS: Final = 1_500
_OUTPUT_CHARACTERS: Final = 1_200
_ANSWER_CHARACTERS: Final = 800
"""A context is cut at its front; no single part may fill all of it."""


class StepText(msgspec.Struct, frozen=True):
    """Text of one generation and of its tool result; unknown keys are ignored."""

    out: str = ""
    obs: str = ""


class TrajectoryText(msgspec.Struct, frozen=True):
    """The texts of one trajectory."""

    trajectory_id: str
    prompt: str | None = None
    steps: tuple[StepText, ...] = ()


Texts: TypeAlias = Mapping[str, TrajectoryText]


def read_texts(paths: Sequence[Path]) -> dict[str, TrajectoryText]:
    """Read texts, one trajectory a line, plain or gzip, by trajectory.

    Raises:
        PredictError: a line is not such a text; the message names it.
        OSError: a file cannot be read.
    """
    found: dict[str, TrajectoryText] = {}
    decoder = msgspec.json.Decoder(TrajectoryText)
    for path in paths:
        try:
            with _opened(path) as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        text = _decoded(decoder, line, path, number)
                        found[text.trajectory_id] = text
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise PredictError(f"{path}: damaged or cut short ({error})") from None
    return found


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")


def _decoded(
    decoder: msgspec.json.Decoder[TrajectoryText], line: bytes, path: Path, number: int
) -> TrajectoryText:
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PredictError(
            f"{path}: line {number}: not the text of a trajectory: {error}; write "
            '{"trajectory_id": ..., "prompt": ..., "steps": [{"out": ..., "obs": ...}]}'
        ) from None


def context_of(script: TrajectoryScript, step: int, queued: bool, texts: Texts) -> str:
    """Describe a trajectory at the time when its step number `step` is queued, or in its tool.

    Sizes and texts after that time are left out.
    """
    text = texts.get(script.id)
    lines = [f"task {script.task}, prompt of {script.steps[0].prompt_tokens} tokens"]
    if text is not None and text.prompt:
        lines.append(text.prompt[:_PROMPT_CHARACTERS])
    for number in range(max(0, step - _LATEST_STEPS), step if queued else step + 1):
        done = script.steps[number]
        said = text.steps[number] if text is not None and number < len(text.steps) else StepText()
        lines.append(f"step {number + 1}: {done.output_tokens} tokens")
        if said.out:
            lines.append(said.out[-_OUTPUT_CHARACTERS:])
        if number == step:
            lines.append(f"calls {done.tool or 'nothing'}")
            break
        outcome = {True: "ok", False: "failed", None: "answered"}[done.tool_ok]
        lines.append(f"{done.tool or 'nothing'} {outcome}, {done.tool_tokens} tokens")
        if said.obs:
            lines.append(said.obs[:_ANSWER_CHARACTERS])
    lines.append("remaining:")
    return "\n".join(lines)
