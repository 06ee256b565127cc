"""Host time and kernel factors from published serving runs, and their errors on runs left out.

TPOT and TTFT of a run are linear in the constants (`serving_replay`). Each constant is a sum over
levels: the whole family of engines, the model, its profile on one GPU class, the engine version.
Ridge regression with a prior spread for each level (`LEVELS`) makes rows speak first for their own
profile and version, then for their relatives; a model without rows takes what the family has.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2

import numpy as np
from numpy.typing import NDArray

from heddle_calibrate.fit.host import NO_HOST
from heddle_calibrate.fit.serving_replay import SHORTEST, Clients, ServingWork, Work, serving_work
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
SPREAD = 0.05
"""Relative error of a TPOT that is no surprise; larger ones count linearly."""
TTFT_WEIGHT = 0.25
TTFT_SPREAD = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
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
) -> tuple[list[Sample], list[LeftOut]]:
    """Replay each row on the kernel times of its profile, by (model, GPU class)."""
    found: list[Sample] = []
    out: list[LeftOut] = []
    for row in rows:
        profile = profile_of(row, profiles)
        if isinstance(profile, str):
            out.append(LeftOut(row.line, profile))
            continue
        # Factors of an earlier fit are not kernel times of a table.
        table = kernel_table(without_factors(profile), row)
        try:
            work = serving_work(
                table,
                Clients(
                    input_tokens=row.input_tokens,
                    output_tokens=row.output_tokens,
                    concurrency=row.concurrency,
                ),
            )
        except ValueError as error:
            out.append(LeftOut(row.line, str(error)))
            continue
        doubt = _doubt(row, table)
        if doubt:
            out.append(LeftOut(row.line, doubt))
            continue
        found.append(Sample(row=row, model=profile.model, gpus=table.gpus, work=work))
    return found, out


def without_factors(profile: Profile) -> Profile:
    """Return the profile with kernel times as in its tables."""
    return replace(profile, kernel_factors=None)


def _doubt(row: ServingRow, table: LatencyTable) -> str:
    """Why one engine in a closed loop cannot have made these figures; empty where it can."""
    whole_s = row.ttft_s + row.tpot_s * row.output_tokens
    prompts_s = row.concurrency * table.prefill_s(row.input_tokens, row.input_tokens**2 / 2)
    if SHORTEST * prompts_s > whole_s:
        return "prompts alone take longer than the run: more than one engine served it"
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

    def _seconds(self, work: Work, gpus: int) -> float:
        return (
            (self.decode + self.doubling * log2(gpus)) * work.decode_s
            + self.prefill * work.prefill_s
            + self.per_step * work.steps
            + self.per_running * work.sequences
            + self.per_prefill * work.prompts
        )

    def tpot_s(self, sample: Sample) -> float:
        """Seconds from one output token to the next."""
        return self._seconds(sample.work.per_token, sample.gpus)

    def ttft_s(self, sample: Sample) -> float:
        """Seconds from a request to its first token."""
        return self._seconds(sample.work.first_token, sample.gpus) + self.per_request


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFit:
    """What each level adds to each quantity."""

    terms: Mapping[Term, float]

    def constants(self, profile: str, version: str) -> ServingConstants:
        """Constants of a profile ("model.gpu") and an engine version, none negative.

        A level without rows adds nothing.
        """
        keys = level_keys(profile, version)
        values = {}
        for quantity, prior in PRIOR.items():
            value = prior + sum(
                self.terms.get((quantity, level, keys[level]), 0.0) for level in LEVELS[quantity]
            )
            values[quantity] = value if quantity == "doubling" else max(0.0, value)
        return ServingConstants(**values)


@dataclass(frozen=True, slots=True)
class _Design:
    """Weighted rows for the TPOT of each sample, then for the TTFT of each."""

    terms: list[Term]
    matrix: Floats
    target: Floats


def _columns(sample: Sample, work: Work, *, first: bool) -> dict[str, float]:
    return {
        "decode": work.decode_s,
        "doubling": work.decode_s * log2(sample.gpus),
        "prefill": work.prefill_s,
        "per_step": work.steps,
        "per_running": work.sequences,
        "per_prefill": work.prompts,
        "per_request": float(first),
    }


def _design(found: Sequence[Sample]) -> _Design:
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
            known = sum(PRIOR[name] * value for name, value in columns.items())
            target.append((measured - known) * scale)
            for name, value in columns.items():
                for level in LEVELS[name]:
                    column = place.setdefault((name, level, keys[level]), len(place))
                    entries.append((at, column, value * scale))
    matrix = np.zeros((len(target), len(place)))
    for at, column, value in entries:
        matrix[at, column] = value
    return _Design(list(place), matrix, np.array(target))


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
    return ServingFit(terms=dict(zip(design.terms, map(float, values), strict=True)))


def fit_serving(found: Sequence[Sample]) -> ServingFit:
    """Fit all constants to all samples, which are of one family of engines."""
    return _solve(_design(found), np.ones(len(found), bool)) if found else ServingFit(terms={})


def fits_without(found: Sequence[Sample]) -> dict[tuple[str, str, str, str, int], ServingFit]:
    """Fit once without each group of rows, by the group."""
    design = _design(found)
    groups = [sample.row.group for sample in found]
    return {
        group: _solve(design, np.array([other != group for other in groups]))
        for group in sorted(set(groups))
    }
