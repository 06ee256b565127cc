"""Durations of recent tool calls, and how long to keep KV for the next one."""

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Final

RECENT: Final = 256
"""Durations that are remembered."""


@dataclass(slots=True)
class RecentDurations:
    """The last `RECENT` durations, in seconds."""

    by_age: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, seconds: float) -> None:
        self.by_age.append(seconds)
        insort(self.ordered, seconds)
        if len(self.by_age) > RECENT:
            del self.ordered[bisect_left(self.ordered, self.by_age.popleft())]

    def best_limit_s(self, benefit_s: float) -> float:
        """The limit `s` of the most ``P(s) * benefit_s - s``; `P(s)` is the share within `s`.

        One of the durations, or 0 where waiting is never worth it.
        """
        best_s, most = 0.0, 0.0
        count = len(self.ordered)
        for within, seconds in enumerate(self.ordered, start=1):
            if benefit_s - seconds <= most:
                break  # longer ones are worth less
            worth = within / count * benefit_s - seconds
            if worth > most:
                best_s, most = seconds, worth
        return best_s
