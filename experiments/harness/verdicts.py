"""Claims of sources, our measurements, and whether they agree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from experiments.harness.values import Value

Verdict: TypeAlias = Literal["agrees", "direction only", "disagrees"]
TOLERANCE = 0.10
"""Share by which a claimed range is widened: its ends are themselves rounded or read off a plot.

Of an end's distance from neutral where a direction is claimed, else of the end itself: 1.01 is no
gain of 1.1, however near the two numbers are.
"""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim of a source: a value, a range, a direction, or several of these."""

    id: str
    what: str
    source: str
    """Section, figure or thread where it stands."""
    unit: str = "x"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    direction: Literal["above", "below"] | None = None
    """On which side of `neutral` it lies."""
    neutral: float = 1.0
    tolerance: float = TOLERANCE
    why: str = ""
    """Where we are known to differ: the reason."""

    def __post_init__(self) -> None:
        """Refuse a claim that claims nothing.

        Raises:
            ValueError: it has neither value nor range nor direction, or half a range.
        """
        if (self.low is None) != (self.high is None):
            raise ValueError(f"claim {self.id!r} has one end of a range; give low and high")
        if self.range is None and self.direction is None:
            raise ValueError(f"claim {self.id!r} claims nothing: give value, range or direction")

    @property
    def range(self) -> tuple[float, float] | None:
        """The claimed range; a single value is both of its ends."""
        if self.low is not None and self.high is not None:
            return self.low, self.high
        return None if self.value is None else (self.value, self.value)

    def text(self) -> str:
        """The claim for a table."""
        if self.range is not None:
            low, high = self.range
            return f"{low:g}" if low == high else f"{low:g} to {high:g}"
        return f"{self.direction} {self.neutral:g}"


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ``expected.json``."""

    figure: str
    title: str
    source: str
    claims: tuple[Claim, ...]
    note: str = ""
    """What a reader of the claims must know beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim beside what was measured."""

    claim: Claim
    value: Value
    verdict: Verdict
    remark: str

    @property
    def ratio(self) -> float | None:
        """Ours over the middle of the claimed range; None where only a direction is claimed."""
        if self.claim.range is None or sum(self.claim.range) == 0.0:
            return None
        return self.value.mean / (sum(self.claim.range) / 2.0)


def read_expected(path: Path) -> Expected:
    """Read an ``expected.json``.

    Raises:
        ValueError: it is none; the message names the file and what is wrong.
    """
    try:
        expected = msgspec.json.decode(path.read_bytes(), type=Expected)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    names = [claim.id for claim in expected.claims]
    if len(dict.fromkeys(names)) != len(names):
        raise ValueError(f"{path}: two claims have one id")
    return expected


def judge(claim: Claim, value: Value) -> Judged:
    """Compare a claim with a measurement.

    *agrees*: the mean lies in the claimed range widened by the tolerance, or its confidence
    interval meets that range and lies as a whole on the claimed side of neutral; where only a
    direction is claimed, the mean lies on that side.
    *direction only*: it does not, but lies on the claimed side of neutral. *disagrees*: neither.
    """
    right_side = _on_side(claim, value.mean)
    if claim.range is None:
        verdict: Verdict = "agrees" if right_side else "disagrees"
    elif _in_range(claim, value):
        verdict = "agrees"
    else:
        verdict = "direction only" if claim.direction and right_side else "disagrees"
    return Judged(claim=claim, value=value, verdict=verdict, remark=_remark(claim, value))


def _in_range(claim: Claim, value: Value) -> bool:
    assert claim.range is not None
    low, high = claim.range
    zero = claim.neutral if claim.direction else 0.0
    least = low - claim.tolerance * abs(low - zero)
    if least <= value.mean <= high + claim.tolerance * abs(high - zero):
        return True
    # An interval so wide that it holds neutral, too, meets anything.
    meets = value.spread == "ci95" and value.low <= high and low <= value.high
    beyond = claim.direction is None or min(_on_side(claim, value.low), _on_side(claim, value.high))
    return meets and beyond


def _on_side(claim: Claim, mean: float) -> bool:
    match claim.direction:
        case "above":
            return mean > claim.neutral
        case "below":
            return mean < claim.neutral
        case None:
            return False


def _remark(claim: Claim, value: Value) -> str:
    """Whether the spread reaches over neutral."""
    if claim.direction is None or value.spread == "none":
        return ""
    if not value.low <= claim.neutral <= value.high:
        return ""
    return "within noise" if value.spread == "ci95" else "not in every cell"
