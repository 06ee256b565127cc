"""The clock of a run: the only source of time for the driver."""

from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """Seconds since the run began, and calls that are due at a moment of it.

    Calls that are due at the same moment are made in the order in which they were requested, and
    never from inside `call_at` or `call_after`.
    """

    @property
    def now_s(self) -> float:
        """Seconds since the run began; never decreases."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether time stands still."""
        ...

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` at `time_s`, or as soon as possible after."""

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` once `delay_s` have passed."""

    def freeze(self) -> None:
        """Stop time: only what is due at this moment is still called.

        Frameworks keep engines between rollouts, so that the start of the first engines takes no
        time of the run.
        """

    def thaw(self) -> None:
        """Let time go on from where it stopped."""
