"""Stand-ins for values of one field that a trace lacks, and counts of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from heddle_trace.columns import Bools, Floats, Ints

MissingRule: TypeAlias = Literal["error", "zero", "sample"]


class Pool:
    """Recorded values to draw from, those of each code apart, in the order of the trace."""

    def __init__(self, named: str, words: Sequence[str], own: Ints, values: Any) -> None:
        """`named` and the word of a code name its values; those of code `NONE` are left out."""
        self._named, self._words = named, words
        counted = own >= 0
        order = np.argsort(own[counted], kind="stable")
        self._values = values[counted][order]
        self._size = np.bincount(own[counted], minlength=len(words))
        self._start = np.cumsum(self._size) - self._size

    def name(self, code: int) -> str:
        """What the values of a code are, for messages."""
        return f"{self._named} {self._words[code]}".rstrip()

    def holds(self, own: Ints) -> Bools:
        """Whether each code has values."""
        return np.asarray((own >= 0) & (self._size[own] > 0))

    def drawn(self, own: Ints, draws: Floats) -> Any:
        """A value of each code, by a number from 0 to 1."""
        return self._values[self._start[own] + (draws * self._size[own]).astype(np.int64)]


@dataclass(slots=True, kw_only=True)
class FieldFill:
    """How the gaps of one field were closed.

    `typical` were drawn from shipped distributions, `constant` are as the rule says.
    """

    derived: int = 0
    zeroed: int = 0
    sampled: int = 0
    typical: int = 0
    constant: int = 0

    @property
    def drawn(self) -> int:
        """Values that depend on the seed."""
        return self.sampled + self.typical

    @property
    def filled(self) -> int:
        """Values that do not follow from others."""
        return self.zeroed + self.constant + self.drawn

    @property
    def missing(self) -> int:
        """All of them."""
        return self.derived + self.filled


@dataclass(slots=True, kw_only=True)
class Gap:
    """One field: its rule, and the counts so far."""

    name: str
    rule: MissingRule
    rng: np.random.Generator
    counts: FieldFill = field(default_factory=FieldFill)
    recorded: bool = False
    """Whether there is a value to draw from."""
    first: int = 0
    """The first step where it was filled."""
    failed: tuple[int, str] | None = None
    """The first step where nothing could be drawn, and what was sought."""

    @property
    def open(self) -> int:
        """Values that neither follow from others nor are stated by the rule."""
        return self.counts.zeroed + self.counts.sampled

    def fill(self, steps: Ints, *sources: tuple[Pool, Ints]) -> Any:
        """Stand-ins by the rule; "sample" takes the first source that has values for a step."""
        self.first = int(steps[0]) if len(steps) else 0
        values = np.zeros(len(steps))
        if self.rule != "sample":
            self.counts.zeroed += len(steps)
            return values
        self.counts.sampled += len(steps)
        draws = self.rng.random(len(steps))
        left: Bools = np.ones(len(steps), np.bool_)
        for pool, own in sources:
            here = left & pool.holds(own)
            values[here] = pool.drawn(own[here], draws[here])
            left &= ~here
        if left.any():
            at = int(np.argmax(left))
            sought = [pool.name(int(own[at])) for pool, own in sources if own[at] >= 0]
            self.failed = int(steps[at]), " or ".join(sought)
        return values
