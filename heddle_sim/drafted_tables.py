"""Iteration times and KV of engines that draft, from those of the same engines without.

An iteration of `b` sequences with `K` drafts each takes, with ``n = b * (K + 1)`` tokens to verify,

    base(n) - host_per_running_s * b * K + per_context_s[b] * context    one read of each KV
    + K * (pass_s + read_bytes / bandwidth) + 2 * K * b * compute_s      passes of the drafter
    + iteration_s + b * sequence_s                                       drafts that are looked up
    + reject_s_per_token * n                                             rejection sampling

Beyond the largest batch of the profile, a token more costs what it does in a prefill. The passes
compute ``b * (K + 1)`` tokens that were accepted and ``b * (K - 1)`` drafts; `compute_s` is the
drafter's share of a prefill's seconds for a token. Where `K` is 0, a drafter that is loaded makes
one pass: its KV follows the target's.
"""

from dataclasses import dataclass, replace

from heddle_rollout.speculation import Speculation, SpeculationError
from heddle_sim.drafts import Drafting
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile, ProfileError
from heddle_sim.profile_parts import read_layout

MIN_KV_TOKENS = 2048
"""An engine with room for fewer tokens than a common prompt serves nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """What makes the drafts of a model, and what that takes."""

    reject_s_per_token: float
    """Seconds of rejection sampling for each token that is verified."""
    pass_s: float = 0.0
    """Seconds of one pass, for one draft of each sequence, beside reading and computing."""
    read_bytes: float = 0.0
    """Bytes of weights that one pass reads; 0 where drafts are looked up."""
    weight_bytes: float = 0.0
    """Bytes that its weights take of GPU memory, over the engine."""
    kv_bytes_per_token: float = 0.0
    """Bytes of KV of its own, over the engine."""
    iteration_s: float = 0.0
    """Seconds of an iteration with drafts, however many they are."""
    sequence_s: float = 0.0
    """The same for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Speculative decoding on the engines of a profile: a setting with acceptance, and a drafter.

    Raises:
        SpeculationError: the setting does not say what is accepted.
    """

    speculation: Speculation
    drafter: Drafter
    pass_s: float
    """Seconds of a pass of the drafter, whatever the batch."""
    sequence_pass_s: float
    """Seconds that each token of a pass adds."""
    host_per_running_s: float
    """Host time that the target's table has for each sequence, and verified drafts have not."""
    accepted: tuple[float, ...]
    """The chance that the first 1, 2, ... drafts are all accepted, for all drafts."""
    by_samples: tuple[tuple[float, ...], ...] = ()
    """The same after 0, 1, ... other samples of the prompt, where drafts are from these."""
    in_tables: bool = False
    """Whether the profile's engines were measured with drafts, so that nothing is added."""

    def mean_tokens(self, drafts: int) -> float:
        """Tokens by which a sequence advances in an iteration, in the mean."""
        return 1.0 + sum(self.accepted[:drafts])

    def added_s(self, drafts: int, batch: int) -> float:
        """Seconds of an iteration beside verifying: drafting, rejecting, less host time."""
        if self.in_tables:
            return 0.0
        passes, drafter = max(drafts, 1), self.drafter
        seconds = passes * (self.pass_s + 2 * batch * self.sequence_pass_s)
        if drafts:
            seconds += drafter.iteration_s + batch * drafter.sequence_s
            seconds += drafter.reject_s_per_token * batch * (drafts + 1)
            seconds -= self.host_per_running_s * batch * drafts
        return seconds


def drafts_on(profile: Profile, tp: int, speculation: Speculation, drafter: Drafter) -> Drafts:
    """Return what drafting takes on engines of a TP degree.

    Raises:
        ProfileError: the profile has no such TP degree, or no peak bandwidth.
        SpeculationError: the setting does not say what is accepted.
    """
    if speculation.accepted is None:
        raise SpeculationError(f"{speculation} does not say what is accepted")
    roofline, ranks = profile.roofline, profile.attention_dp
    share = read_s = 0.0
    if roofline is not None:
        share = drafter.read_bytes / roofline.weights_read_bytes
        read_s = drafter.read_bytes / (tp * ranks * roofline.bandwidth_bytes_per_s)
    elif drafter.read_bytes:
        raise ProfileError(
            f"{profile.model} on {profile.gpu} states no peak bandwidth, which the time of a "
            "drafter follows from: make its profile again, or leave speculation off"
        )
    prefill = profile.table(tp, max_batch=1)
    return Drafts(
        speculation=speculation,
        drafter=replace(drafter, reject_s_per_token=drafter.reject_s_per_token / ranks),
        pass_s=drafter.pass_s + read_s,
        sequence_pass_s=share * _prefill_slope_s(prefill),
        host_per_running_s=profile.host.per_running_s / ranks,
        accepted=extended(speculation.accepted, speculation.most_drafts),
        in_tables=measured_with_drafts(profile),
    )


def measured_with_drafts(profile: Profile) -> bool:
    """Whether a profile is of engines that `heddle profile measure` started with drafts."""
    settings = (profile.conditions or {}).get("settings") or {}
    return settings.get("speculative") is not None


def drafted_table(
    profile: Profile, tp: int, drafts: Drafts, *, max_batch: int, decay: float = 0.0
) -> LatencyTable:
    """Return the ground truth of engines that draft, for batches up to `max_batch`."""
    most = drafts.speculation.most_drafts
    table = profile.table(tp, max_batch=max_batch * (most + 1))
    known = profile.attention_dp * profile.at(tp).decode.batch[-1]
    slope_s = _prefill_slope_s(table)

    def base_s(count: int, batch: int) -> float:
        verified = batch if drafts.in_tables else batch * (count + 1)
        beyond = max(0, verified - known)
        seconds = max(table.base_s[verified], table.base_s[verified - beyond] + beyond * slope_s)
        return seconds + drafts.added_s(count, batch)

    by_batch = drafts.speculation.drafts(max_batch)
    prefills = 1.0 + drafts.sequence_pass_s / slope_s
    return replace(
        table,
        prefill_knots_s=tuple(prefills * seconds for seconds in table.prefill_knots_s),
        drafting=Drafting(
            drafts=by_batch,
            decay=decay,
            by_samples=drafts.by_samples,
            accepted=drafts.by_samples[-1] if drafts.by_samples else drafts.accepted,
            base_s={
                count: [base_s(count, batch) for batch in range(max_batch + 1)]
                for count in {0, *by_batch[1:]}
            },
        ),
    )


def with_drafter(profile: Profile, drafter: Drafter) -> Profile:
    """Return the profile of engines that have a drafter's weights and KV in their memory too.

    TP degrees without room for KV are refused.
    """
    own = profile.kv_bytes_per_token
    tables, refused = {}, dict(profile.refused)
    for name, entry in profile.tables.items():
        tp = read_layout(name)[0]
        parts = min(tp, profile.kv_heads or tp)
        free = entry.kv_capacity_tokens * own - parts * drafter.weight_bytes / tp
        left = int(free / (own + drafter.kv_bytes_per_token))
        if left < MIN_KV_TOKENS:
            refused[name] = "the drafter (cluster.speculation) leaves no room for KV"
            continue
        kv_tokens = round(entry.belief.kv_capacity_tokens * left / entry.kv_capacity_tokens)
        estimate = replace(entry.belief, kv_capacity_tokens=kv_tokens)
        tables[name] = replace(entry, kv_capacity_tokens=left, belief=estimate)
    kv_bytes = round(own + drafter.kv_bytes_per_token)
    return replace(profile, tables=tables, refused=refused, kv_bytes_per_token=kv_bytes)


def extended(accepted: tuple[float, ...], drafts: int) -> tuple[float, ...]:
    """Acceptance of so many drafts: later ones go on as the last two of those that are stated."""
    found = list(accepted[:drafts])
    before, last = (1.0, *accepted)[-2:]
    ratio = min(last / before, 1.0) if before > 0.0 else 0.0
    while len(found) < drafts:
        found.append(found[-1] * ratio)
    return tuple(found)


def _prefill_slope_s(table: LatencyTable) -> float:
    """Seconds of one more token in a large prefill."""
    x, y = table.prefill_tokens, table.prefill_knots_s
    return (y[-1] - y[-2]) / (x[-1] - x[-2])
