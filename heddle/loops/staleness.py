"""Mean staleness in closed form, beside that of a run.

Applied Compute, Predicting and Controlling Staleness in Fully Asynchronous RL Training (July 2026):
versions that pass while a group is generated, and while it waits for its training, if engines
generate evenly. From concurrency C, batch B, utilisation r (rollout over training throughput), a
queue of q batches and the tail M (mean of a group's longest length over the mean length), it is
C M / B + r for r < 1, and C M / (r B) + (2 q + r - 1) / (2 r) for others.
"""

from dataclasses import dataclass
from typing import Final

from heddle_core.loop.regime import Regime

MARGIN: Final = 0.3
"""Versions by which the two may differ without a word; the source's own runs differ by up to 0.27.
"""
TRAIN_BOUND: Final = 0.02
"""A trainer that waits for trajectories in less of the time is the slower side."""

_MUCH: Final = 0.05
"""Of a cause, to be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Versions that pass, mean of trained trajectories."""

    generating: float
    """Until the group is complete."""
    queued: float
    """From then until it is trained."""

    @property
    def mean(self) -> float:
        """Staleness."""
        return self.generating + self.queued


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessFigures:
    """What measured batches of a run say of the quantities of the closed form."""

    simulated: Ages
    in_flight: float
    """Trajectories that have started and not ended."""
    held: float
    """Share of the time from the start of a batch's last training to the end of the update after
    it: a group that completes then is trained under a later version."""
    waits: float
    """Share of the time in which the trainer waits for trajectories."""
    made: float
    """Groups that completed, over those that were trained."""
    tail: float
    """Longest output of a group over the mean output."""
    phase: float
    """Where between two updates a group starts, from 0 to 1; evenly, 0.5."""
    tail_s: float
    """Seconds of a group over those of a trajectory."""


def closed_form(regime: Regime, run: StalenessFigures) -> Ages:
    """What the closed form gives for a run under a regime.

    Updates that wait for running trajectories let none pass while a group is generated. A bound at
    admission leaves its queue what generation does not use.
    """
    staleness, every = regime.staleness, regime.update.every
    if regime.update.mode == "drain":
        return Ages(generating=0.0, queued=float(staleness.counted_by == "batch"))
    batches = run.in_flight * run.tail / (regime.groups * regime.samples)
    if run.waits >= TRAIN_BOUND:
        queued = 0.0 if regime.split.colocated else run.held
        return Ages(generating=batches / every, queued=queued / every)
    most = regime.batching.most_complete
    if most is None:
        ahead = (staleness.bound + 1.0) * every - 1.0 + regime.sampling.extra_groups / regime.groups
        queue = max(0.0, ahead - batches)
    else:
        queue = most / regime.groups
    rate = max(1.0, run.made)
    queued = (2.0 * queue + rate - 1.0) / (2.0 * rate)
    return Ages(generating=batches / rate / every, queued=queued / every)


def reasons(regime: Regime, run: StalenessFigures, batches: int) -> list[str]:
    """Why the closed form is over `MARGIN` from a run of so many batches; none where it is not."""
    closed, own = closed_form(regime, run), run.simulated
    if abs(closed.mean - own.mean) <= MARGIN:
        return []
    early, longer = 0.5 - run.phase, run.tail_s / run.tail - 1.0
    queued = own.queued - closed.queued
    found = []
    if regime.staleness.late == "drop" and run.made > 1.0 + _MUCH:
        found.append(f"{run.made:.2f} groups complete for each that is not too old")
    if closed.mean > batches / 2.0:
        found.append(f"{batches} batches are too few for such an age")
    rest = own.mean - closed.mean
    for versions, text, holds in (
        (-early, "groups start right after an update, not evenly", early > _MUCH),
        (
            closed.generating * longer,
            f"a group takes {run.tail_s:.2f} times as long as a trajectory, not {run.tail:.2f}",
            abs(longer) > _MUCH,
        ),
        (
            queued,
            f"complete groups wait for {own.queued:.2f} updates, not {closed.queued:.2f}",
            abs(queued) > MARGIN,
        ),
    ):
        if holds:
            found.append(f"{text} ({versions:+.2f})")
            rest -= versions
    return [*found, f"{rest:+.2f} of other causes"] if abs(rest) > MARGIN else found
