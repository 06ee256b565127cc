"""Published runs replayed on the kernel times of their profiles, and the constants of a profile.

TPOT and TTFT of a run are linear in the constants (`replay`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from heddle_calibrate.fit.kernel_profile import NO_HOST
from heddle_calibrate.serving.limits import with_limits
from heddle_calibrate.serving.published_rows import LeftOut
from heddle_calibrate.serving.replay import (
    SHORTEST,
    Clients,
    ServingWork,
    serving_work,
)
from heddle_calibrate.serving.rows import ServingRow, profile_of
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import MAX_BATCH, Profile, expand

SEVERAL = "prompts alone take longer than the run: more than one engine served it"
TOO_FAST = "faster than its bytes at the peak bandwidth: more than one engine served it"
OF_THOSE = "other runs of the same model, GPU class and version"
DOUBTFUL = 1 / 3
"""Where this share of a model's runs cannot be of one engine, the others are in doubt too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample:
    """A published run with what it consists of on its profile."""

    row: ServingRow
    profile: Profile
    gpus: int
    work: ServingWork

    @property
    def model(self) -> str:
        """Of the profile."""
        return self.profile.model


def kernel_table(profile: Profile, row: ServingRow) -> LatencyTable:
    """Tabled kernel times alone, for batches up to the clients of a run."""
    return expand(profile, row.rank_tp, host=NO_HOST, max_batch=max(MAX_BATCH, row.concurrency))


def samples(
    rows: Iterable[ServingRow],
    profiles: Mapping[tuple[str, str], Profile],
    *,
    every: bool = False,
) -> tuple[list[ServingSample], list[LeftOut]]:
    """Replay each row on the kernel times of its profile, by (model, GPU class); with `every`
    also those that one engine in a closed loop cannot have made.
    """
    found: list[ServingSample] = []
    out: list[LeftOut] = []
    several: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        sample = _sample(row, profiles, every=every)
        if isinstance(sample, str):
            several[_origin(row)] += sample == SEVERAL
            out.append(LeftOut(row.line, sample))
        else:
            found.append(sample)
    size = Counter(_origin(sample.row) for sample in found) + several
    doubtful = {origin for origin, n in several.items() if n >= DOUBTFUL * size[origin]}
    doubted = [sample for sample in found if _origin(sample.row) in doubtful]
    out += [LeftOut(sample.row.line, f"{OF_THOSE}: {SEVERAL}") for sample in doubted]
    return [sample for sample in found if _origin(sample.row) not in doubtful], out


def _sample(
    row: ServingRow, profiles: Mapping[tuple[str, str], Profile], *, every: bool
) -> ServingSample | str:
    """The replayed row, or why there is none."""
    profile = profile_of(row, profiles)
    if isinstance(profile, str):
        return profile
    # Factors of an earlier fit are not kernel times of a table.
    bare, own = replace(profile, kernel_factors=None), row.limits
    table = with_limits(kernel_table(bare, row), profile, own, engine=row.engine)
    clients = Clients(
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        concurrency=row.concurrency,
        requests=own.requests,
        shortest=own.shortest,
        prefill_first=row.engine == "sglang",
        receive_every=own.receive_every,
        max_running=own.max_running,
        batched_tokens=own.batched_tokens,
    )
    try:
        work = serving_work(table, clients)
    except ValueError as error:
        return str(error)
    doubt = "" if every else _doubt(row, table) or _too_fast(row, table, profile)
    return doubt or ServingSample(row=row, profile=profile, gpus=table.gpus, work=work)


def _origin(row: ServingRow) -> tuple[object, ...]:
    """Runs that one source made in one way."""
    return (row.engine, row.model, row.gpu, row.precision, row.version)


def _doubt(row: ServingRow, table: LatencyTable) -> str:
    """Why one engine in a closed loop cannot have made these figures; empty where it can."""
    whole_s = row.ttft_s + row.tpot_s * row.output_tokens
    prompts_s = row.concurrency * table.prefill_s(row.input_tokens, row.input_tokens**2 / 2)
    if SHORTEST * prompts_s > whole_s:
        return SEVERAL
    running = min(row.concurrency, row.limits.max_running * row.dp)
    if running < row.concurrency:
        return ""
    held = running * (row.input_tokens + row.output_tokens)
    if row.ttft_s > row.tpot_s * row.output_tokens and held < table.kv_capacity_tokens:
        return "most clients waited though the KV of all fits: a limit that is not published"
    return ""


def _too_fast(row: ServingRow, table: LatencyTable, profile: Profile) -> str:
    """Why no engine decodes as fast: a dense model's weights and KV, read at the peak bandwidth."""
    if profile.experts or profile.roofline is None:
        return ""
    context = (1 + SHORTEST) / 2 * (row.input_tokens + row.output_tokens / 2)
    running = min(row.concurrency, row.limits.max_running, table.kv_capacity_tokens // context)
    kv_bytes = running * context * profile.kv_bytes_per_token
    weights, peak = profile.roofline.weights_read_bytes, profile.roofline.bandwidth_bytes_per_s
    return TOO_FAST if row.tpot_s < (weights + kv_bytes) / table.gpus / peak else ""
