"""Speculative decoding of a cluster's engines: what they are set to, and what policies estimate."""

from dataclasses import replace

import numpy as np

from heddle.config_error import ConfigError
from heddle_core.estimate.cost import StepCost
from heddle_rollout.speculation import Speculation, SpeculationError, read_speculation
from heddle_sim.drafted_tables import Drafter, Drafts
from heddle_sim.profile_files import Profile
from heddle_sim.trained_models import UnknownModelError, trained_model

OFF, BEST = "off", "best"


def speculation_of(text: str) -> Speculation | None:
    """Read `cluster.speculation`; None for `off`, and for `best` before it is found.

    Raises:
        ConfigError: it is no setting.
    """
    if text.strip() in (OFF, BEST):
        return None
    try:
        return read_speculation(text)
    except SpeculationError as error:
        raise ConfigError(f"speculation: {error}") from None


def drafter_of(profile: Profile, speculation: Speculation) -> Drafter:
    """What makes the drafts.

    Raises:
        ConfigError: the model has no drafter of this method.
    """
    if speculation.method == "ngram":
        return Drafter(
            read_bytes=0,
            weight_bytes=0,
            kv_bytes_per_token=0,
            launch_s=3.3e-4,
            reject_s_per_token=3e-6,
        )
    try:
        model = trained_model(profile.model)
    except UnknownModelError as error:
        raise ConfigError(f"speculation: {error}") from None
    layer = 2.0 * (model.active - 2 * model.input_embedding) / model.layers
    head = layer + 2.0 * 32_000 * model.hidden
    return Drafter(
        read_bytes=head,
        weight_bytes=head,
        kv_bytes_per_token=profile.kv_bytes_per_token / model.layers,
        launch_s=3.3e-4,
        reject_s_per_token=3e-6,
    )


CONTEXTS = (512, 2048, 8192, 24576)
"""Tokens of context of a sequence, at which policies estimate."""
SIZES = 24
"""Batch sizes at which they do, spaced evenly in their logarithm."""
KNOWN_BATCH = 256
"""The largest batch that the sources of profiles measured."""


def drafted_cost(cost: StepCost, drafts: Drafts, *, max_running: int) -> StepCost:
    """Return what a policy estimates of engines that draft: costs of each token of a sequence.

    The estimate for engines without drafts gives the iteration that verifies them; divided by the
    tokens that a sequence advances in it, that is a time for a token. A plane is fitted to it over
    batch sizes and contexts, and one with a knee: drafts that end at a batch size, and experts that
    fill, make it rise fast at first.
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

    def token_s(batch: int, context: int) -> float:
        count = by_batch[batch]
        verified = batch * (count + 1)
        seconds = cost.iteration_s(verified, batch * context)
        # Beyond what was measured, a token costs no less than one of a prefill.
        beyond = max(0, verified - KNOWN_BATCH)
        seconds += beyond * max(0.0, cost.prefill_s - cost.t1_s)
        seconds += drafts.added_s(count, batch)
        return seconds / drafts.mean_tokens(count)

    batch, context = np.array(points, np.float64).T
    seconds = np.array([token_s(*point) for point in points])
    fit = (batch, context, seconds, 1.0 / seconds)
    t0_s, t1_s, t2_s = plane(*fit)
    return replace(
        cost,
        t0_s=t0_s,
        t1_s=t1_s,
        t2_s=t2_s,
        filling=filling_cost(*fit) if len(np.unique(batch)) > 2 else None,
    )
