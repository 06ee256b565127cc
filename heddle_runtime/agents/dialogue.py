"""The plain-text format between live agents and models; docs/live-agents.md shows it.

It is no chat template: it neither writes nor reads special tokens of the model's own format.
"""

from dataclasses import dataclass
from typing import Final, TypeAlias

from heddle_runtime.sandbox.runner import SandboxLimits, SandboxResult

_OPENING: Final = """\
You answer a question step by step. You can run Python programs on the way.

To run one, end your message with it, in a block like this:

```python
print(6 * 7)
```

You are then shown what it printed. Each program starts afresh, in an empty folder, with Python's \
standard library and without a network.

When you know the answer, say so in a line of its own:

Answer: 42

Question:
{prompt}

Step 1:
"""
_NEXT: Final = "\n\n{heading}:\n{body}\n\nStep {number}:\n"
_REMINDER: Final = (
    "Your message held neither. End it with a ```python block to run a program, "
    'or say "Answer: ..." in a line of its own.'
)
_PYTHON: Final = ("python", "python3", "py")
_AROUND: Final = " \t\r*"


@dataclass(frozen=True, slots=True)
class RunProgram:
    """The model wrote a program."""

    source: str


@dataclass(frozen=True, slots=True)
class GiveAnswer:
    """The model has answered."""

    text: str


ModelAction: TypeAlias = RunProgram | GiveAnswer | None
"""None: neither."""


def opening(prompt: str) -> str:
    """Return the text that a trajectory begins with."""
    return _OPENING.format(prompt=prompt.strip())


def read_generation(text: str, *, whole: bool) -> ModelAction:
    """Read what a model wrote in one step.

    A ```python block at the end is a program to run. Otherwise the answer is the last line outside
    of blocks with text after "Answer:"; asterisks around either part are ignored. `whole`: whether
    the model stopped by itself; if not, the last line may be incomplete and is no answer.
    """
    answer: str | None = None
    program: str | None = None
    block: list[str] | None = None
    is_python = False
    lines = text.split("\n")
    for index, line in enumerate(lines):
        language = _block_language(line)
        if block is not None:
            if language != "":
                block.append(line)
            elif is_python:
                program, block = "\n".join(block) + "\n", None
            else:
                block = None
        elif language is not None:
            block, is_python = [], language in _PYTHON
            program = None
        elif line.strip():
            program = None
            if whole or index < len(lines) - 1:
                answer = _answer(line) or answer
    if program is not None:
        return RunProgram(program)
    return GiveAnswer(answer) if answer is not None else None


def _block_language(line: str) -> str | None:
    """Return the language after a line's three backticks, "" if it has none; None without them."""
    text = line.strip()
    if not text.startswith("```") or "`" in text[3:]:
        return None
    return next(iter(text[3:].split()), "").lower()


def _answer(line: str) -> str:
    text = line.strip(_AROUND)
    return text[7:].strip(_AROUND) if text[:7].lower() == "answer:" else ""


def output_of(result: SandboxResult, limits: SandboxLimits) -> str:
    """Return a program's result as the model sees it."""
    parts = [result.stdout.rstrip("\n")]
    if result.stderr.strip():
        parts.append(result.stderr.rstrip("\n"))
    match result.status:
        case "ok":
            pass
        case "error":
            parts.append(f"[ended with exit code {result.exit_code}]")
        case "signal":
            parts.append(f"[ended by {result.signal}]")
        case "cpu":
            parts.append(f"[cut off after {limits.cpu_s} s of CPU time]")
        case "time":
            parts.append(f"[cut off after {limits.wall_s:g} s]")
        case "output":
            parts.append(f"[cut off: more than {limits.output_bytes:,} bytes of output]")
    return "\n".join(part for part in parts if part) or "[no output]"


def next_step(body: str, number: int) -> tuple[str, str, str]:
    """Return the text before a program's output, the output, and the text after it.

    Only the output may be shortened. `number` counts steps from 1.
    """
    before, after = _NEXT.format(heading="Output", body="\0", number=number).split("\0")
    return before, body, after


def reminder(number: int) -> tuple[str, str, str]:
    """Return the reminder for a generation with neither a program nor an answer."""
    before, after = _NEXT.format(heading="Note", body="\0", number=number).split("\0")
    return before, _REMINDER, after
