"""Oracles: predictors that know the scripts. Used only by name, never by a preset."""

import math
from collections.abc import Iterable
from hashlib import blake2b
from statistics import NormalDist
from typing import Final

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import TrajectoryView
from heddle_trace.errors import TraceError
from heddle_trace.schema import TrajectoryScript
from heddle_trace.scripts import Scripts

_STANDARD_NORMAL: Final = NormalDist()
_HASH_BITS: Final = 53  # what a float holds exactly
_MAX_SIGMA: Final = 10.0  # already noise without a signal; far more would overflow


class Oracle:
    """The output tokens that a trajectory's script still holds: exact at any time."""

    served = False

    def __init__(self, scripts: Iterable[TrajectoryScript]) -> None:
        columns = Scripts.of(scripts)
        self._totals = dict(zip(columns.ids, columns.total("output_tokens").tolist(), strict=True))

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Ignore it."""

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Ignore it."""

    def observe_finish(self, t: TrajectoryView) -> None:
        """Ignore it."""

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the script's total less what is made.

        Raises:
            TraceError: the trajectory has no script here.
        """
        total = self._totals.get(t.id)
        if total is None:
            raise TraceError(
                f"the oracle has no script for trajectory {t.id!r}; give it the scripts that the "
                "driver replays"
            )
        return float(max(0, total - t.output_tokens))


class NoisyOracle(Oracle):
    """An oracle with a log-normal error, to measure how much precision a policy needs.

    Each estimate is the truth times ``exp(sigma * z)`` with `z` standard normal, drawn once for
    each trajectory and step from a hash of (seed, trajectory, step): the order and number of calls
    do not matter. The median of the error is 1; its mean is ``exp(sigma**2 / 2)``.
    """

    def __init__(self, scripts: Iterable[TrajectoryScript], *, sigma: float, seed: int) -> None:
        """Take the error's standard deviation in natural log.

        Raises:
            ValueError: sigma is not from 0 to 10.
        """
        if not 0.0 <= sigma <= _MAX_SIGMA:
            raise ValueError(f"sigma is {sigma}; give 0 to {_MAX_SIGMA:g}")
        super().__init__(scripts)
        self._sigma = sigma
        self._seed = seed

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the remaining tokens times this step's error."""
        return super().remaining_tokens(t) * math.exp(self._sigma * self._z(t))

    def _z(self, t: TrajectoryView) -> float:
        key = f"{self._seed}\0{t.id}\0{t.step}".encode()
        number = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> (64 - _HASH_BITS)
        return _STANDARD_NORMAL.inv_cdf((number + 0.5) / 2**_HASH_BITS)
