"""Generations as a log records them, converted to steps; all importers share this."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import msgspec

from heddle_trace.importers.clocks import SLACK_S, elapsed
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.limits import MAX_REWARD, MAX_RL_STEP
from heddle_trace.schema import StepRecord

UNNAMED: Final = "unspecified"
"""A tool whose name the log does not record."""

_NAME_LENGTH = 1_000
_ID_LENGTH = 200


@dataclass(slots=True, kw_only=True)
class LoggedGeneration:
    """One generation and what followed it. Tokens, and seconds on the clock of the log.

    `tools` names each call, or is (`USER`,) if a person wrote next. The wait is `wait_s` where
    it was recorded, else from `end_s` to `until_s`. `added` are the tokens appended after it.
    """

    output: int | None
    input: int | None = None
    cached: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    tools: tuple[str, ...] = ()
    ok: bool | None = None
    wait_s: float | None = None
    until_s: float | None = None
    added: int | None = None


def steps_of(generations: Sequence[LoggedGeneration], notes: Notes) -> tuple[StepRecord, ...]:
    """The steps of a record, in the order of the generations, counted from the first one's start.

    Raises DamagedError where there are none, or where a clock runs backwards.
    """
    if not generations:
        raise DamagedError("holds no generation")
    for index, (before, after) in enumerate(pairwise(generations)):
        if before.start_s is not None and after.start_s is not None:
            elapsed(before.start_s, after.start_s, f"after generation {index}", notes)
    return tuple(_step(g, index, generations[0], notes) for index, g in enumerate(generations))


def _step(g: LoggedGeneration, index: int, first: LoggedGeneration, notes: Notes) -> StepRecord:
    here = f"in generation {index}"
    llm_s = t_s = None
    if g.start_s is not None:
        if g.end_s is not None:
            llm_s = elapsed(g.start_s, g.end_s, here, notes)
        if first.start_s is not None:
            t_s = max(0.0, round(g.start_s - first.start_s, 6))
    return StepRecord(
        output_tokens=g.output,
        tool=tool_name(g.tools),
        tool_s=_wait(g, index, notes) if g.tools else None,
        tool_tokens=g.added,
        tool_ok=g.ok,
        llm_s=llm_s,
        t_s=t_s,
        input_tokens=g.input,
        cached_tokens=g.cached,
        n_tools=len(g.tools) if len(g.tools) > 1 else None,
    )


def _wait(g: LoggedGeneration, index: int, notes: Notes) -> float | None:
    if g.wait_s is not None:
        if not -SLACK_S <= g.wait_s < float("inf"):
            raise DamagedError(f"the wait after generation {index} is {g.wait_s:g} s")
        return elapsed(0.0, g.wait_s, f"after generation {index}", notes)
    if g.end_s is not None and g.until_s is not None:
        return elapsed(g.end_s, g.until_s, f"after generation {index}", notes)
    return None


def tool_name(tools: Sequence[str]) -> str | None:
    """One name for the calls of a step: each name once, joined with "+"."""
    joined = "+".join(dict.fromkeys(tool.strip() or UNNAMED for tool in tools))
    return (joined if len(joined) <= _NAME_LENGTH else UNNAMED) if tools else None


def derive_added(generations: Sequence[LoggedGeneration]) -> None:
    """Where prompts were recorded, take what a step added from them: it is the source's own count.

    Next prompt less this prompt and its output. Less than nothing means that the client compacted
    or edited its history; then it stays as it was.
    """
    for g, after in pairwise(generations):
        if g.input is not None and g.output is not None and after.input is not None:
            added = after.input - g.input - g.output
            if added >= 0:
                g.added = added


def identifier(text: str) -> str:
    """A name for an id: as it is, or shortened with a hash where it is long or cannot be kept."""
    clean = text.encode(errors="replace").decode()
    if clean != text or len(text) > _ID_LENGTH:
        return f"{clean[: _ID_LENGTH - 20]}~{fingerprint(text)}"
    return text or "unnamed"


def fingerprint(*parts: object) -> str:
    """Sixteen hex digits that stand for something too long, or too private, to be an id."""
    data = msgspec.json.encode([str(part).encode(errors="replace").decode() for part in parts])
    return blake2b(data, digest_size=8).hexdigest()


def reward_of(value: object) -> float | None:
    """A reward as a log has it: a number, or whether the task was solved; else None."""
    if not isinstance(value, bool | int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        return None
    return float(value)


def reward_in(raw: Mapping[str, object]) -> float | None:
    found = (reward_of(raw.get(name)) for name in ("reward", "score"))
    return next((reward for reward in found if reward is not None), None)


def rl_step_of(value: object) -> int | None:
    """A step of training as a log has it, counted from 0 or 1; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= MAX_RL_STEP else None
