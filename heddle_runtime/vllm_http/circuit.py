"""Whether steps should go to an endpoint now: it may be busy, or have failed the last ones."""

from collections.abc import Iterator

FAULTS = 2
"""Steps in a row that fail at an endpoint before it gets no more for a while."""
LONGEST_WAIT_S = 3.0
"""Between two attempts to use it again: steps are there soon after its fault has ended."""
FIRST_WAIT_S = 0.25


class Circuit:
    """Opens after faults in a row, and closes when an attempt succeeds. No clock and no I/O."""

    def __init__(self) -> None:
        self.closed = True
        self._faults = 0
        self._busy_until_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether steps may go there."""
        return self.closed and now_s >= self._busy_until_s

    def busy(self, now_s: float, retry_after_s: float | None) -> None:
        """It said that it takes no more now."""
        wait_s = 1.0 if retry_after_s is None else retry_after_s
        self._busy_until_s = now_s + min(max(wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)

    def failed(self) -> bool:
        """A step failed there; return whether that opens it."""
        self._faults += 1
        if not self.closed or self._faults < FAULTS:
            return False
        self.closed = False
        return True

    def succeeded(self) -> None:
        """A step, or an attempt, came to its end there."""
        self.closed, self._faults = True, 0


def waits_s() -> Iterator[float]:
    """Yield the seconds before each attempt to use an endpoint again; the first is made at once."""
    wait_s = 0.0
    while True:
        yield wait_s
        wait_s = min(max(2 * wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
