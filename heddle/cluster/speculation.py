"""Speculative decoding of a cluster's engines: what they are set to, and what policies estimate."""

from dataclasses import replace
from itertools import groupby

import numpy as np

from heddle.cluster.drafters import acceptance_of, drafter_of
from heddle_core.estimate.cost import StepCost
from heddle_rollout.speculation import UNBOUNDED, Speculation
from heddle_sim.drafted_tables import Drafts, drafts_on, extended
from heddle_sim.profile_files import Profile

CONTEXTS = (512, 2048, 8192, 24576)
"""Tokens of context of a sequence, at which policies estimate."""
TYPICAL_CONTEXT = 4096
"""The same for a schedule, which knows batch sizes only."""
SIZES = 24
"""Batch sizes at which policies estimate, spaced evenly in their logarithm."""
VERIFIED = 0.5
"""Of the seconds of a token of a prefill, that a verified one takes while an iteration still waits
for weights: about the median of dense profiles from 32 to 256 tokens, .26 to .78."""
KNOWN_BATCH = 256
"""The largest batch that the sources of profiles measured."""


def drafts_of(profile: Profile, tp: int, speculation: Speculation, max_running: int) -> Drafts:
    """Return what drafting takes on engines of a TP degree, with published acceptance unless it is
    stated, and the schedule that is to be found.

    Raises:
        ConfigError: the model has no such drafter, or no acceptance is published.
        ProfileError: the profile has no such TP degree, or no peak bandwidth.
    """
    by_samples: tuple[tuple[float, ...], ...] = ()
    drafter = drafter_of(profile, speculation)
    if speculation.accepted is None:
        known = acceptance_of(profile.model, speculation.method)
        most = len(known.accepted) if speculation.is_found else speculation.most_drafts
        by_samples = tuple(extended(each, speculation.most_drafts) for each in known.by_samples)
        # What policies estimate, where it grows with the samples that have ended: the middle.
        middle = known.by_samples[len(known.by_samples) // 2] if by_samples else known.accepted
        speculation = replace(speculation, accepted=middle[:most])
    drafts = drafts_on(profile, tp, speculation, drafter)
    drafts = replace(drafts, by_samples=by_samples)
    if not speculation.is_found:
        return drafts
    shape = profile.shape(tp)
    cost = profile.cost_estimate((tp,)).by_shape[shape]
    found = replace(speculation, accepted=None, ranges=_fastest(cost, drafts, max_running))
    accepted = drafts.accepted[: found.most_drafts]
    return replace(drafts, speculation=replace(found, accepted=accepted))


def token_s(cost: StepCost, drafts: Drafts, count: int, batch: int, context: int) -> float:
    """Estimated seconds of a token of each of `batch` sequences that have `count` drafts each.

    `cost` is of engines without drafts. A verified draft adds what a sequence does, less the host's
    time, but no more than `VERIFIED` of a token of a prefill; and the whole of one where a batch is
    beyond what was measured, unless the model has experts, whose prefills are mostly reading.
    """
    seconds = cost.iteration_s(batch, batch * context)
    if not drafts.in_tables:
        verified = batch * (count + 1)
        beyond = max(0, verified - KNOWN_BATCH)
        filling, t1_s = cost.filling, cost.t1_s
        if filling is not None:
            filled = min(verified, filling.knee) - min(batch, filling.knee)
            seconds += filling.fill_s * filled
            t1_s = filling.t1_s
            beyond = 0
        each_s = min(max(t1_s - drafts.host_per_running_s, 0.0), VERIFIED * cost.prefill_s)
        seconds += batch * count * each_s
        seconds += beyond * (cost.prefill_s - each_s)
        seconds += drafts.added_s(count, batch) + drafts.host_per_running_s * batch * count
    return seconds / drafts.mean_tokens(count)


def _fastest(cost: StepCost, drafts: Drafts, max_running: int) -> tuple[tuple[int, int, int], ...]:
    """The drafts of each batch size with the least estimated time of a token."""
    counts = range(drafts.speculation.most_drafts + 1)
    best = [
        min(counts, key=lambda count: token_s(cost, drafts, count, batch, TYPICAL_CONTEXT))
        for batch in range(1, max_running + 1)
    ]
    # A schedule without any draft is none.
    best[0] = max(best[0], 1)
    ranges: list[tuple[int, int, int]] = []
    for count, run in groupby(enumerate(best, 1), key=lambda each: each[1]):
        batches = [batch for batch, _ in run]
        ranges.append((batches[0], batches[-1], count))
    first, _, count = ranges[-1]
    return (*ranges[:-1], (first, UNBOUNDED, count))


def drafted_cost(cost: StepCost, drafts: Drafts, *, max_running: int) -> StepCost:
    """Return what a policy estimates of engines that draft: costs of each token of a sequence.

    A plane is fitted to `token_s` over batch sizes and contexts, and one with a knee: drafts that
    end at a batch size, and experts that fill, make it rise fast at first.
    """
    # Only here, because it takes a quarter of a second to import.
    from heddle_calibrate.fit.curves import filling_cost, plane

    by_batch = drafts.speculation.drafts(max_running)
    sizes = np.unique(np.geomspace(1, max_running, SIZES).round()).astype(int)
    points = [
        (size, context)
        for size in sizes.tolist()
        for context in CONTEXTS
        if size == 1 or size * context <= cost.kv_capacity_tokens
    ]
    seconds = np.array([token_s(cost, drafts, by_batch[b], b, context) for b, context in points])
    batch, context = np.array(points, np.float64).T
    fit = (batch, context, seconds, 1.0 / seconds)
    t0_s, t1_s, t2_s = plane(*fit)
    return replace(
        cost,
        t0_s=t0_s,
        t1_s=t1_s,
        t2_s=t2_s,
        filling=filling_cost(*fit) if len(np.unique(batch)) > 2 else None,
    )
