"""What a campaign is: cases drawn by number, their outcomes, and smaller cases of a failing one."""

import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

import msgspec

ROOT: Final = Path(__file__).resolve().parents[1]
COUNTER_EXAMPLES: Final = Path(__file__).with_name("counter_examples")
"""Minimised cases that once failed; `tests/campaigns` replays every file."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a case showed that must not be."""

    kind: str
    """Failures of one kind count as one finding, minimised once."""
    text: str
    repeatable: bool = True
    """Whether the case can run again in this process, to be minimised."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one case."""

    failure: Failure | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers for the table, which adds them up; those that begin with "peak" are maxima."""
    note: str = ""
    """A line to print beside the table."""


class Campaign(Protocol):
    """One kind of attack. All methods are deterministic."""

    name: str
    unit: str
    """What a case is, in the plural."""
    case_type: Any
    """Type of a case for msgspec."""
    tolerated: float
    """Share of the cases that may fail before the campaign does."""
    saves: bool
    """Whether counter-examples are kept as files."""
    most_wall_s: float
    """Wall-clock seconds after which the process of a case is ended."""

    def begin(self, folder: str) -> None:
        """Prepare a process that will run cases and nothing else.

        Args:
            folder: in memory where possible; it is removed after the process has ended.
        """
        ...

    def case(self, rng: Random) -> Any: ...

    def run(self, case: Any) -> Outcome:
        """Run a case; a defect of Heddle is a failure, never an exception."""
        ...

    def smaller(self, case: Any) -> Iterable[Any]:
        """Simpler cases, the boldest first."""
        ...


def numbered(campaign: Campaign, seed: int, number: int) -> Any:
    """Draw the case of a number: it depends on nothing else."""
    return campaign.case(Random(f"{campaign.name}/{seed}/{number}"))


def minimised(campaign: Campaign, case: Any, kind: str, *, tries: int = 150) -> Any:
    """Return a smallest case found that fails in the same way, after so many tries at most."""
    simpler = True
    while simpler and tries > 0:
        simpler = False
        for candidate in campaign.smaller(case):
            tries -= 1
            failure = campaign.run(candidate).failure
            if failure is not None and failure.kind == kind:
                case, simpler = candidate, True
                break
            if tries <= 0:
                break
    return case


class CounterExample(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `COUNTER_EXAMPLES`."""

    campaign: str
    failure: str
    case: msgspec.Raw


def saved(campaign: Campaign, case: Any, failure: Failure, folder: Path) -> Path:
    """Write a case as a file that a test replays; the same case has the same name."""
    raw = msgspec.json.encode(case)
    number = Random(raw).randrange(16**8)
    words = "-".join("".join(c if c.isalnum() else " " for c in failure.kind).lower().split())
    path = folder / f"{campaign.name}-{words[:60]}-{number:08x}.json"
    folder.mkdir(parents=True, exist_ok=True)
    # A message may have lone surrogates, of a name that is not UTF-8.
    text = failure.text.encode(errors="backslashreplace").decode()
    for place in (ROOT, sysconfig.get_path("stdlib")):
        text = text.replace(f"{place}/", "")
    example = CounterExample(campaign=campaign.name, failure=text, case=msgspec.Raw(raw))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(example), indent=1) + b"\n")
    return path


def read_case(campaign: Campaign, example: CounterExample) -> Any:
    """Return the case of a file.

    Raises:
        msgspec.ValidationError: no case of this campaign.
    """
    return msgspec.json.decode(example.case, type=campaign.case_type)
