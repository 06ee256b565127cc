"""Oracles: predictors that know the scripts. Used only by name, never by a preset."""

import math
from collections.abc import Iterable
from hashlib import blake2b
from statistics import NormalDist
from typing import Final

import numpy as np

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import TrajectoryId
from heddle_core.policy import TrajectoryView
from heddle_trace.errors import TraceError
from heddle_trace.schema import TrajectoryScript
from heddle_trace.table import Scripts

PROMPT_SIGMA: Final = 0.5
"""Standard deviation, in natural log, of what `PaperQuality` observes of a prompt."""
STEP_SIGMA: Final = 0.4
"""The same of what it observes of a trajectory after each step."""
_STANDARD_NORMAL: Final = NormalDist()
_HASH_BITS: Final = 53  # what a float holds exactly
_MAX_SIGMA: Final = 10.0  # already noise without a signal; far more would overflow
_MAX_LOG: Final = 700.0  # exp of more overflows
_LEAST_SIGMA: Final = 1e-6  # below, a log-normal is its mean
_FAR: Final = -6.0  # in standard deviations; further out both tails are 0 to float's precision


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
            raise _no_script(t)
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
        z = _standard_normal(self._seed, t.id, t.step)
        return super().remaining_tokens(t) * math.exp(self._sigma * z)


class PaperQuality:
    """An oracle made as bad as the predictor that the Heddle paper reports (Figure 13).

    The paper's fine-tuned language model reads the prompt and finds four fifths of the longest
    trajectories after step 2. This part is no such model: it draws noisy observations of true
    lengths and combines them by Bayes' rule. So it has the error, and knows that it has it.

    * Log totals vary normally between prompts and within a prompt, as those of the scripts do.
    * On arrival it observes the mean log total of the prompt's samples, with a normal error of
      `PROMPT_SIGMA`, one for each prompt.
    * After each step it observes the trajectory's own log total, with an error of `STEP_SIGMA`.
    * It answers the mean of what is left, given that the total exceeds the tokens made.

    Errors come from a hash of (seed, prompt) and (seed, trajectory, step).
    """

    served = False

    def __init__(
        self,
        scripts: Iterable[TrajectoryScript],
        *,
        seed: int,
    ) -> None:
        columns = Scripts.of(scripts)
        logs = np.log(np.maximum(columns.total("output_tokens"), 1).astype(np.float64))
        self._logs: dict[str, float] = dict(zip(columns.ids, logs.tolist(), strict=True))
        self._seed = seed
        self._step_variance = STEP_SIGMA**2
        group = columns.trajectory("group")
        prompts = len(group.words)
        samples = np.bincount(group.values, minlength=prompts)
        means = np.bincount(group.values, logs, prompts) / np.maximum(samples, 1)
        self._mean = float(logs.mean()) if len(logs) else 0.0
        within = logs - means[group.values]
        self._within_variance = float(np.mean(within**2)) if len(logs) else 0.0
        between_variance = float(np.var(logs)) - self._within_variance if len(logs) else 0.0
        weight = between_variance / (between_variance + PROMPT_SIGMA**2)
        self._prompt_variance = (1.0 - weight) * between_variance
        self._prompts = {
            name: self._mean
            + weight * (mean + PROMPT_SIGMA * _standard_normal(seed, name) - self._mean)
            for name, mean in zip(group.words, means.tolist(), strict=True)
        }
        """Mean log total of each prompt, given what its text shows."""
        self._observed: dict[TrajectoryId, tuple[int, float]] = {}
        """Steps of each unfinished trajectory, and the sum of its observations after them."""

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        """Observe the total once more.

        Raises:
            TraceError: the trajectory has no script here.
        """
        steps, total = self._observed.get(t.id, (0, 0.0))
        error = STEP_SIGMA * _standard_normal(self._seed, t.id, event.step)
        self._observed[t.id] = steps + 1, total + self._log_total(t) + error

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        """Ignore it."""

    def observe_finish(self, t: TrajectoryView) -> None:
        self._observed.pop(t.id, None)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the mean of the tokens left, given the observations and the tokens made.

        Raises:
            TraceError: the trajectory has no script here.
        """
        self._log_total(t)
        mean, variance = self._prompts[t.group], self._prompt_variance + self._within_variance
        steps, total = self._observed.get(t.id, (0, 0.0))
        if steps and variance > 0.0:
            weight = steps * variance / (steps * variance + self._step_variance)
            mean += weight * (total / steps - mean)
            variance *= 1.0 - weight
        return mean_left(mean, math.sqrt(variance), float(t.output_tokens))

    def _log_total(self, t: TrajectoryView) -> float:
        found = self._logs.get(t.id)
        if found is None:
            raise _no_script(t)
        return found


def mean_left(mean: float, sigma: float, made: float) -> float:
    """``E[X | X > made] - made`` of a log-normal `X`, whose log has this mean and deviation."""
    expected = math.exp(min(mean + sigma**2 / 2, _MAX_LOG))
    if made < 1.0 or sigma < _LEAST_SIGMA:
        return max(expected - made, 1.0)
    above = (mean - math.log(made)) / sigma
    if above < _FAR:
        # Mills' ratio: so far out the tail is exponential, with this mean.
        return max(made * sigma / -above, 1.0)
    cdf = _STANDARD_NORMAL.cdf
    return max(expected * cdf(above + sigma) / cdf(above) - made, 1.0)


def _standard_normal(seed: int, *names: object) -> float:
    """A standard normal number, the same for equal arguments in any process."""
    key = "\0".join(map(str, (seed, *names))).encode()
    number = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") >> (64 - _HASH_BITS)
    return _STANDARD_NORMAL.inv_cdf((number + 0.5) / 2**_HASH_BITS)


def _no_script(t: TrajectoryView) -> TraceError:
    return TraceError(
        f"the oracle has no script for trajectory {t.id!r}; give it the scripts that the "
        "driver replays"
    )
