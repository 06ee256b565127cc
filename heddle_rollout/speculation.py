"""Speculative decoding as it is set: a method, drafts by batch size, and how many are accepted.

In an iteration an engine proposes `K` drafts for each sequence and verifies all of them at once. A
sequence advances by the drafts that were accepted before the first that was not, and by one token
that the model itself makes: ``1 + a_1 + ... + a_K`` tokens in the mean, where `a_i` is the chance
that the first `i` drafts are all accepted. vLLM's counters state acceptance so.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

GROUPED: Final = "grouped"
"""Drafts from other samples of the prompt, as in Seer (arXiv 2511.14617); simulated only."""
METHODS: Final = ("ngram", "mtp", "eagle3", "draft_model", GROUPED)
"""vLLM's names, and `GROUPED`."""
MAX_DRAFTS: Final = 16
"""More than any published set-up has."""
FORM: Final = "METHOD:DRAFTS[:ACCEPTANCE], such as mtp:3:0.886/0.770/0.663"

_RANGE = re.compile(r"(\d{1,9})-(\d{0,9})=(\d{1,9})", re.ASCII)


class SpeculationError(ValueError):
    """A setting of speculation that no engine can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What an engine is set to.

    Raises:
        SpeculationError: names the part of the setting, and what would do.
    """

    method: str
    """One of `METHODS`."""
    ranges: tuple[tuple[int, int, int], ...]
    """(first batch size, last batch size, drafts), ascending, as in vLLM's
    `num_speculative_tokens_per_batch_size`. One range up to `UNBOUNDED`: the same at all. Empty:
    a schedule that is found for each engine."""
    accepted: tuple[float, ...] | None = None
    """The chance that the first 1, 2, ... drafts are all accepted. None: not stated."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise SpeculationError(
                f"the method {self.method!r} is unknown: take {', '.join(METHODS)}"
            )
        if self.ranges:
            _check_ranges(self.ranges)
        accepted = self.accepted
        if accepted is None:
            return
        wrong = next((a for a in accepted if not 0.0 <= a <= 1.0), None)
        if wrong is not None:
            raise SpeculationError(
                f"an acceptance of {wrong:g} is no chance: give values from 0 to 1, the chance "
                "that the first 1, 2, ... drafts are all accepted"
            )
        if not 1 <= len(accepted) <= self.most_drafts:
            raise SpeculationError(
                f"acceptance has {len(accepted)} values for {self.most_drafts} drafts: give at "
                "most one a draft"
            )

    @property
    def most_drafts(self) -> int:
        """The largest number of drafts: vLLM's `num_speculative_tokens`."""
        found = max(MAX_FOUND, len(self.accepted or ()))
        return max((drafts for _, _, drafts in self.ranges), default=found)

    @property
    def is_found(self) -> bool:
        """Whether the drafts of each batch size are still to be found."""
        return not self.ranges

    @property
    def rises(self) -> bool:
        """Whether a later draft is accepted more often than one before it, which cannot be."""
        accepted = self.accepted or ()
        return any(later > earlier for earlier, later in pairwise(accepted))

    def drafts(self, max_batch: int) -> list[int]:
        """Return drafts by batch size, 0 to `max_batch`; gaps and the end carry the last on."""
        found = [0] * (max_batch + 1)
        ends = [first for first, _, _ in self.ranges[1:]]
        for (first, _, drafts), after in zip(self.ranges, [*ends, max_batch + 1], strict=True):
            for batch in range(first, min(after, max_batch + 1)):
                found[batch] = drafts
        return found

    def vllm_config(self, drafter: str = "") -> dict[str, object]:
        """Return vLLM's `speculative_config`; `drafter` names weights of a method that has some."""
        config: dict[str, object] = {
            "method": self.method,
            "num_speculative_tokens": self.most_drafts,
        }
        if len(self.ranges) > 1:
            config["num_speculative_tokens_per_batch_size"] = [list(each) for each in self.ranges]
        if self.method == "ngram":
            config |= LOOKUP
        if drafter:
            config["model"] = drafter
        return config

    def __str__(self) -> str:
        """The setting as it is typed."""
        drafts = SCHEDULE if self.is_found else str(self.most_drafts)
        if len(self.ranges) > 1:
            drafts = ",".join(
                f"{first}-{'' if last == UNBOUNDED else last}={k}" for first, last, k in self.ranges
            )
        text = f"{self.method}:{drafts}"
        if self.accepted is not None:
            text += ":" + "/".join(f"{a:g}" for a in self.accepted)
        return text


LOOKUP: Final = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""Tokens of the n-grams that drafts are looked up by, as vLLM names them."""
UNBOUNDED: Final = 1_000_000
"""The last batch size of a range without an end."""
SCHEDULE: Final = "schedule"
"""In place of drafts: those that are fastest at each batch size, by the profile."""
MAX_FOUND: Final = 4
"""Drafts of a schedule that is found, unless acceptance is stated for more."""


def read_speculation(text: str) -> Speculation:
    """Read ``METHOD:DRAFTS[:ACCEPTANCE]``.

    DRAFTS is a number, a schedule by batch size as ``1-16=3,17-64=1,65-=0``, or ``schedule``, which
    finds one; ACCEPTANCE the chance that the first 1, 2, ... drafts are all accepted, by slashes.

    Raises:
        SpeculationError: names the part that is wrong, and what would do.
    """
    method, colon, rest = text.strip().partition(":")
    drafts, _, acceptance = rest.partition(":")
    if not colon or not drafts:
        raise SpeculationError(f"{text!r} is not off, best or {FORM}")
    return Speculation(
        method=method,
        ranges=_ranges(drafts),
        accepted=_chances(acceptance) if ":" in rest else None,
    )


def _ranges(text: str) -> tuple[tuple[int, int, int], ...]:
    if text == SCHEDULE:
        return ()
    if re.fullmatch(r"\d{1,9}", text, re.ASCII):
        return ((1, UNBOUNDED, int(text)),)
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise SpeculationError(
                f"{part!r} is no range of a schedule: give FIRST-LAST=DRAFTS with commas between, "
                "as 1-16=3,17-64=1,65-=0, one number of drafts, or schedule"
            )
        first, last, drafts = match.groups()
        found.append((int(first), int(last) if last else UNBOUNDED, int(drafts)))
    return tuple(found)


def _chances(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise SpeculationError(
            f"the acceptance {text!r} is neither numbers with slashes between, as "
            "0.886/0.770/0.663, nor a file of an engine's /metrics"
        ) from None


def _check_ranges(ranges: Sequence[tuple[int, int, int]]) -> None:
    before = 0
    for first, last, drafts in ranges:
        if not 0 <= drafts <= MAX_DRAFTS:
            raise SpeculationError(f"{drafts} drafts are not 0 to {MAX_DRAFTS}")
        if not before and first != 1:
            raise SpeculationError(
                f"the first range begins at batch size {first}: begin at 1, so that every batch "
                "size has a number of drafts"
            )
        if first > last:
            raise SpeculationError(f"the range {first}-{last} ends before it begins")
        if first <= before:
            raise SpeculationError(
                f"the range that begins at {first} overlaps the one that ends at {before}: give "
                "ascending ranges that do not overlap"
            )
        before = last
    if not any(drafts for _, _, drafts in ranges):
        raise SpeculationError("no batch size has drafts: give 1 to 16, or off")
