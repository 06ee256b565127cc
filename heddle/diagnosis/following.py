"""Steps of logs that grow: those that are complete, and how far one moved from another."""

from dataclasses import dataclass, field

import numpy as np

from heddle.diagnosis.intervals import spans
from heddle.diagnosis.parts import Step
from heddle.runs.journal_columns import Bools
from heddle_trace.importers.clocks import SLACK_S
from heddle_trace.observed.columns import ObservedSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteStep:
    """A step that goes on no more."""

    number: int
    """As recorded, else counted from 1."""
    step: Step
    trajectories: frozenset[str]
    """That ended in it."""
    tokens: float
    """Mean output tokens of these."""
    tool_s: float
    """Mean seconds of these in tools."""

    @property
    def shares(self) -> dict[str, float]:
        """Of the step, by part, the largest first."""
        lasts_s = max(self.step.end_s - self.step.start_s, 1e-9)
        found = sorted(self.step.parts.items(), key=lambda each: -each[1])
        return {name: seconds / lasts_s for name, seconds in found}

    def moved(self, before: "CompleteStep") -> dict[str, float]:
        """Share of the step that other parts have, and relative changes of lengths and tools."""
        mine, theirs = self.shares, before.shares
        changes = (abs(mine.get(n, 0.0) - theirs.get(n, 0.0)) for n in mine.keys() | theirs.keys())
        return {
            "parts": sum(changes) / 2.0,
            "lengths": _change(before.tokens, self.tokens),
            "tools": _change(before.tool_s, self.tool_s),
        }


def _change(before: float, now: float) -> float:
    return now / before - 1.0 if before else float(now > 0.0)


@dataclass(slots=True)
class Followed:
    """The steps of logs that were complete so far."""

    count: int = 0
    until_s: float = field(default=-np.inf)
    """End of the last of them."""
    left: CompleteStep | None = None
    """The last step, if it is not known to be complete."""

    def more(self, seen: ObservedSteps, steps: tuple[Step, ...]) -> list[CompleteStep]:
        """Steps that are complete since the last call; logs that were replaced begin again."""
        if steps[-1].end_s < self.until_s - SLACK_S:
            self.count, self.until_s = 0, -np.inf
        found = []
        for step in _complete(seen, steps):
            if step.end_s > self.until_s + SLACK_S:
                self.count, self.until_s = self.count + 1, step.end_s
                found.append(_of(seen, step, self.count))
        goes_on = steps[-1].end_s > self.until_s + SLACK_S and steps[-1].label is not None
        self.left = _of(seen, steps[-1], self.count + 1) if goes_on else None
        return found


def _complete(seen: ObservedSteps, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Steps that were recorded whole, and those after which another has begun."""
    if any(phase.phase == "step" for phase in seen.phases):
        return steps
    if steps[-1].label is None:
        return ()
    begun = (seen.column("start_s").values >= steps[-1].end_s - SLACK_S).any()
    return steps if begun else steps[:-1]


def _of(seen: ObservedSteps, step: Step, count: int) -> CompleteStep:
    trajectory = seen.column("trajectory_id")
    codes, _, last_s = spans(seen)
    ended = codes[(last_s > step.start_s) & (last_s <= step.end_s + SLACK_S)]
    own: Bools = np.isin(trajectory.ints, ended)
    tokens, tool_s = (
        float(seen.seconds(name)[own].sum()) / max(len(ended), 1)
        for name in ("output_tokens", "tool_s")
    )
    return CompleteStep(
        number=count if step.label is None else step.label,
        step=step,
        trajectories=frozenset(trajectory.words[code] for code in ended.tolist()),
        tokens=tokens,
        tool_s=tool_s,
    )
