"""The clock of a run: the only source of time for the driver."""

from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    """Seconds since the run began, and calls scheduled at such times.

    Calls at the same time run in the order of their requests, never from inside `call_at` or
    `call_after`.
    """

    @property
    def now_s(self) -> float:
        """Seconds since the run began; never decreases."""
        ...

    @property
    def frozen(self) -> bool:
        """Whether time is stopped."""
        ...

    def call_at(self, time_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` at `time_s`, or as soon as possible after."""

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` once `delay_s` have passed."""

    def freeze(self) -> None:
        """Stop time: only calls due at this time still run.

        Frameworks keep engines between rollouts, so that the start of the first engines takes no
        time of the run.
        """

    def thaw(self) -> None:
        """Continue time from where it stopped."""
