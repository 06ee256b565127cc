"""Host time and kernel factors from published serving runs, and their errors on runs left out.

TPOT and TTFT of a run are linear in the constants (`serving_replay`). Each constant is a sum over
levels: the whole family of engines, the model, its profile on one GPU class, the engine version.
Ridge regression with a prior spread for each level (`LEVELS`) makes rows speak first for their own
profile and version, then for their relatives; a model without rows takes what the family has.
Levels add to a prior: the same for all (`PRIOR`), or the constants that profiles have.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from heddle_calibrate.fit.host import NO_HOST
from heddle_calibrate.fit.serving_replay import (
    SHORTEST,
    Clients,
    ServingWork,
    SpanWork,
    serving_work,
)
from heddle_calibrate.fit.serving_rows import ServingRow, profile_of
from heddle_calibrate.fit.training_rows import LeftOut
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import MAX_BATCH, Profile, expand

Floats = NDArray[np.float64]
Term = tuple[str, str, str]
"""A quantity, a level, and which one of that level."""

PRIOR = {
    "decode": 1.0,
    "doubling": 0.0,
    "prefill": 1.0,
    "per_step": 0.8e-3,
    "per_running": 10e-6,
    "per_prefill": 0.8e-3,
    "per_request": 5e-3,
}
"""Factors on kernel time, and seconds: per step, running sequence and step, prompt in prefill and
step, request."""
LEVELS: dict[str, dict[str, float]] = {
    "decode": {"model": 0.15, "profile": 0.06},
    "doubling": {"gpu": 0.03, "model": 0.03},
    "prefill": {"family": 0.2, "model": 0.3, "profile": 0.1},
    "per_step": {"family": 0.5e-3, "version": 0.5e-3, "profile": 0.3e-3},
    "per_running": {"family": 10e-6, "version": 10e-6, "model": 20e-6},
    "per_prefill": {"family": 0.5e-3, "version": 0.5e-3},
    "per_request": {"family": 10e-3, "version": 20e-3, "profile": 20e-3},
}
"""Prior spread of what each level adds to a quantity."""
LEAST = {"doubling": -1.0, "per_running": 1e-6}
"""Others are at least 0. A further sequence is never free."""
SPREAD = 0.05
"""Relative error of a TPOT that is no surprise; larger ones count linearly."""
SEVERAL = "prompts alone take longer than the run: more than one engine served it"
OF_THOSE = "other runs of the same model, GPU class and version"
DOUBTFUL = 1 / 3
"""Where this share of a model's runs cannot be of one engine, the others are in doubt too."""
FEWEST = 6
"""Runs of a model; fewer do not tell a kernel factor from an accident, and are not fitted."""
TTFT_WEIGHT = 0.25
TTFT_SPREAD = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSample:
    """A published run with what it consists of on its profile."""

    row: ServingRow
    model: str
    """Of the profile."""
    gpus: int
    work: ServingWork

    def keys(self) -> dict[str, str]:
        """Name which one of each level the run belongs to."""
        profile = f"{self.model}.{self.row.gpu}"
        return level_keys(profile, self.row.version)


def level_keys(profile: str, version: str) -> dict[str, str]:
    """Name which one of each level a profile ("model.gpu") and an engine version belong to."""
    model, _, gpu = profile.rpartition(".")
    return {
        "family": "",
        "model": model,
        "profile": profile,
        "gpu": gpu,
        "version": version,
    }


def kernel_table(profile: Profile, row: ServingRow) -> LatencyTable:
    """Tabled kernel times alone, for batches up to the clients of a run."""
    return expand(profile, row.rank_tp, host=NO_HOST, max_batch=max(MAX_BATCH, row.concurrency))


def samples(
    rows: Iterable[ServingRow], profiles: Mapping[tuple[str, str], Profile]
) -> tuple[list[ServingSample], list[LeftOut]]:
    """Replay each row on the kernel times of its profile, by (model, GPU class)."""
    found: list[ServingSample] = []
    out: list[LeftOut] = []
    several: Counter[tuple[object, ...]] = Counter()
    for row in rows:
        sample = _sample(row, profiles)
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


def _sample(row: ServingRow, profiles: Mapping[tuple[str, str], Profile]) -> ServingSample | str:
    """The replayed row, or why there is none."""
    profile = profile_of(row, profiles)
    if isinstance(profile, str):
        return profile
    # Factors of an earlier fit are not kernel times of a table.
    table = kernel_table(without_factors(profile), row)
    clients = Clients(
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        concurrency=row.concurrency,
    )
    try:
        work = serving_work(table, clients)
    except ValueError as error:
        return str(error)
    doubt = _doubt(row, table)
    return doubt or ServingSample(row=row, model=profile.model, gpus=table.gpus, work=work)


def _origin(row: ServingRow) -> tuple[object, ...]:
    """Runs that one source made in one way."""
    return (row.engine, row.model, row.gpu, row.precision, row.version)


def without_factors(profile: Profile) -> Profile:
    """Return the profile with kernel times as in its tables."""
    return replace(profile, kernel_factors=None)


def _doubt(row: ServingRow, table: LatencyTable) -> str:
    """Why one engine in a closed loop cannot have made these figures; empty where it can."""
    whole_s = row.ttft_s + row.tpot_s * row.output_tokens
    prompts_s = row.concurrency * table.prefill_s(row.input_tokens, row.input_tokens**2 / 2)
    if SHORTEST * prompts_s > whole_s:
        return SEVERAL
    held = row.concurrency * (row.input_tokens + row.output_tokens)
    if row.ttft_s > row.tpot_s * row.output_tokens and held < table.kv_capacity_tokens:
        return "most clients waited though the KV of all fits: a limit that is not published"
    return ""


# -- the fit ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConstants:
    """Constants of one profile and engine version; factors on kernel times, and seconds."""

    decode: float
    doubling: float
    prefill: float
    per_step: float
    per_running: float
    per_prefill: float
    per_request: float

    def _seconds(self, work: SpanWork, gpus: int) -> float:
        return (
            (self.decode + self.doubling * log2(gpus)) * work.decode_s
            + self.prefill * work.prefill_s
            + self.per_step * work.steps
            + self.per_running * work.sequences
            + self.per_prefill * work.prompts
        )

    def tpot_s(self, sample: ServingSample) -> float:
        """Seconds from one output token to the next."""
        return self._seconds(sample.work.per_token, sample.gpus)

    def ttft_s(self, sample: ServingSample) -> float:
        """Seconds from a request to its first token."""
        return self._seconds(sample.work.first_token, sample.gpus) + self.per_request


PriorOf = Callable[[str, str], ServingConstants]
"""Constants before a fit, of a profile ("model.gpu") and an engine version."""


def same_for_all(profile: str, version: str) -> ServingConstants:
    """Return the prior that needs no earlier fit."""
    return ServingConstants(**PRIOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFit:
    """What each level adds to each quantity."""

    terms: Mapping[Term, float]
    prior: PriorOf = same_for_all

    def constants(self, profile: str, version: str) -> ServingConstants:
        """Constants of a profile ("model.gpu") and an engine version, none negative.

        A level without rows adds nothing.
        """
        keys = level_keys(profile, version)
        values = {}
        for quantity, before in asdict(self.prior(profile, version)).items():
            value = before + sum(
                self.terms.get((quantity, level, keys[level]), 0.0) for level in LEVELS[quantity]
            )
            values[quantity] = max(LEAST.get(quantity, 0.0), value)
        return ServingConstants(**values)


@dataclass(frozen=True, slots=True)
class _Design:
    """Weighted rows for the TPOT of each sample, then for the TTFT of each."""

    terms: list[Term]
    matrix: Floats
    target: Floats
    prior: PriorOf


def _columns(sample: ServingSample, work: SpanWork, *, first: bool) -> dict[str, float]:
    return {
        "decode": work.decode_s,
        "doubling": work.decode_s * log2(sample.gpus),
        "prefill": work.prefill_s,
        "per_step": work.steps,
        "per_running": work.sequences,
        "per_prefill": work.prompts,
        "per_request": float(first),
    }


def _design(found: Sequence[ServingSample], prior: PriorOf) -> _Design:
    """Relative errors; runs that repeat others count as one."""
    place: dict[Term, int] = {}
    entries: list[tuple[int, int, float]] = []
    target: list[float] = []
    alike = [(*s.row.work, s.row.dp, s.row.concurrency) for s in found]
    times = {work: alike.count(work) for work in set(alike)}
    for first in (False, True):
        for sample, work in zip(found, alike, strict=True):
            row, at = sample.row, len(target)
            part = sample.work.first_token if first else sample.work.per_token
            measured = row.ttft_s if first else row.tpot_s
            scale = (TTFT_WEIGHT if first else 1.0) / measured / times[work] ** 0.5
            columns, keys = _columns(sample, part, first=first), sample.keys()
            before = asdict(prior(keys["profile"], row.version))
            known = sum(before[name] * value for name, value in columns.items())
            target.append((measured - known) * scale)
            for name, value in columns.items():
                for level in LEVELS[name]:
                    column = place.setdefault((name, level, keys[level]), len(place))
                    entries.append((at, column, value * scale))
    matrix = np.zeros((len(target), len(place)))
    for at, column, value in entries:
        matrix[at, column] = value
    return _Design(list(place), matrix, np.array(target), prior)


def _solve(design: _Design, chosen: NDArray[np.bool_]) -> ServingFit:
    """Ridge regression of the chosen samples; large errors count linearly."""
    rows = np.concatenate([chosen, chosen])
    matrix, target = design.matrix[rows], design.target[rows]
    n = int(chosen.sum())
    usual = np.repeat([SPREAD, TTFT_SPREAD * TTFT_WEIGHT], n)
    prior = np.array([SPREAD / LEVELS[name][level] for name, level, _ in design.terms])
    weight = np.ones(2 * n)
    values = np.zeros(len(design.terms))
    for _ in range(6):
        weighted = matrix * weight[:, None]
        square = weighted.T @ weighted + np.diag(prior**2)
        values = np.linalg.solve(square, weighted.T @ (target * weight))
        error = np.abs(matrix @ values - target)
        weight = 1 / np.sqrt(np.maximum(1.0, error / usual))
    terms = dict(zip(design.terms, map(float, values), strict=True))
    return ServingFit(terms=terms, prior=design.prior)


def _enough(found: Sequence[ServingSample]) -> NDArray[np.bool_]:
    runs = Counter(sample.model for sample in found)
    return np.array([runs[sample.model] >= FEWEST for sample in found], bool)


def fittable(found: Sequence[ServingSample]) -> list[ServingSample]:
    """Return the samples that a fit of them all uses."""
    return [sample for sample, use in zip(found, _enough(found), strict=True) if use]


def fit_serving(found: Sequence[ServingSample], prior: PriorOf = same_for_all) -> ServingFit:
    """Fit all constants to all samples, which are of one family of engines."""
    if not found:
        return ServingFit(terms={}, prior=prior)
    return _solve(_design(found, prior), _enough(found))


def fits_without(
    found: Sequence[ServingSample], prior: PriorOf = same_for_all
) -> dict[tuple[str, str, str, str, int], ServingFit]:
    """Fit once without each group of rows, by the group."""
    design, enough = _design(found, prior), _enough(found)
    groups = [sample.row.group for sample in found]
    return {
        group: _solve(design, enough & np.array([other != group for other in groups]))
        for group in sorted(set(groups))
    }
