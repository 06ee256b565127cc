"""Host time and kernel factors from published serving runs, and their errors on runs left out.

TPOT and TTFT of a run are linear in the constants (`heddle_calibrate.serving`). Each constant is a
sum over levels: the whole family of engines, the model, its profile on one GPU class, the engine
version. Ridge regression with a prior spread for each level (`LEVELS`) makes rows speak first for
their own profile and version, then for their relatives; a model without rows takes what the family
has. Levels add to a prior: the same for all (`PRIOR`), or the constants that profiles have.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from heddle_calibrate.serving.constants import ServingConstants, Terms, level_keys, summed
from heddle_calibrate.serving.errors import PredictedRun, predicted
from heddle_calibrate.serving.replay import SpanWork
from heddle_calibrate.serving.samples import ServingSample

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
Levels = Mapping[str, Mapping[str, float]]
"""Prior spread of what each level adds to each quantity."""
LEVELS: Levels = {
    "decode": {"model": 0.15, "profile": 0.06},
    "doubling": {"gpu": 0.03, "model": 0.03},
    "prefill": {"family": 0.2, "version": 0.2, "model": 0.6, "profile": 1.0},
    "per_step": {"family": 0.5e-3, "version": 0.5e-3, "profile": 0.3e-3},
    "per_running": {"family": 10e-6, "version": 10e-6, "model": 20e-6},
    "per_prefill": {"family": 0.5e-3, "version": 0.5e-3},
    "per_request": {"family": 10e-3, "version": 20e-3, "profile": 20e-3},
}
"""Prior spread of what each level adds to a quantity. Attention and experts of prompts have other
kernels on each GPU class and in each release; SGLang 0.5.10 on B300 takes six times B200's time."""
SGLANG_LEVELS: Levels = {**LEVELS, "per_request": {**LEVELS["per_request"], "family": 50e-3}}
"""SGLang launches the kernels of prompts one by one: most of its groups wait 20 to 80 ms longer for
a first token than kernels take, whatever the prompt."""
SPREAD = 0.05
"""Relative error of a TPOT that is no surprise; larger ones count linearly."""
FEWEST = 6
"""Runs of a model; fewer do not tell a kernel factor from an accident, and are not fitted."""
TTFT_WEIGHT = 0.25
TTFT_SPREAD = 0.2

PartOf = Callable[[ServingSample], Hashable]
"""What a sample is left out of a fit with."""
LEFT_OUT: dict[str, PartOf] = {
    "layout": lambda sample: sample.row.group,
    "engine version": lambda sample: sample.row.version,
    "model": lambda sample: sample.model,
}
"""A layout is an engine, model, GPU type, precision and TP degree."""

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
        prior = asdict(self.prior(profile, version))
        return summed(prior, self.nested(), profile, version)

    def nested(self) -> Terms:
        """Terms by quantity, level, and which one of that level."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (quantity, level, key), value in self.terms.items():
            found.setdefault(quantity, {}).setdefault(level, {})[key] = value
        return found


@dataclass(frozen=True, slots=True)
class _Design:
    """Weighted rows for the TPOT of each sample, then for the TTFT of each."""

    terms: list[Term]
    matrix: Floats
    target: Floats
    spread: Floats
    """Of each term, before the fit."""
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


def _design(
    found: Sequence[ServingSample], prior: PriorOf, levels: Levels | None = None
) -> _Design:
    """Relative errors; runs that repeat others count as one."""
    place: dict[Term, int] = {}
    entries: list[tuple[int, int, float]] = []
    target: list[float] = []
    alike = [(*s.row.work, s.row.dp, s.row.concurrency) for s in found]
    times = {work: alike.count(work) for work in set(alike)}
    if levels is None:
        levels = SGLANG_LEVELS if found[0].row.engine == "sglang" else LEVELS
    for first in (False, True):
        for sample, work in zip(found, alike, strict=True):
            row, at = sample.row, len(target)
            part = sample.work.first_token if first else sample.work.per_token
            measured = row.ttft_s if first else row.tpot_s
            scale = (TTFT_WEIGHT if first else 1.0) / measured / times[work] ** 0.5
            columns, keys = (
                _columns(sample, part, first=first),
                level_keys(f"{sample.model}.{row.gpu}", row.version),
            )
            before = asdict(prior(keys["profile"], row.version))
            known = sum(before[name] * value for name, value in columns.items())
            target.append((measured - known) * scale)
            for name, value in columns.items():
                for level in levels[name]:
                    column = place.setdefault((name, level, keys[level]), len(place))
                    entries.append((at, column, value * scale))
    matrix = np.zeros((len(target), len(place)))
    for at, column, value in entries:
        matrix[at, column] = value
    spread = np.array([levels[name][level] for name, level, _ in place])
    return _Design(list(place), matrix, np.array(target), spread, prior)


def _solve(design: _Design, chosen: NDArray[np.bool_]) -> ServingFit:
    """Ridge regression of the chosen samples; large errors count linearly."""
    rows = np.concatenate([chosen, chosen])
    matrix, target = design.matrix[rows], design.target[rows]
    n = int(chosen.sum())
    usual = np.repeat([SPREAD, TTFT_SPREAD * TTFT_WEIGHT], n)
    prior = SPREAD / design.spread
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
    found: Sequence[ServingSample],
    prior: PriorOf = same_for_all,
    part: str = "layout",
    levels: Levels | None = None,
) -> dict[Hashable, ServingFit]:
    """Fit once without the rows of each `LEFT_OUT`, by what is left out."""
    design, enough = _design(found, prior, levels), _enough(found)
    parts = list(map(LEFT_OUT[part], found))
    return {
        left_out: _solve(design, enough & np.array([other != left_out for other in parts]))
        for left_out in dict.fromkeys(parts)
    }


def left_out_runs(
    found: Sequence[ServingSample],
    prior: PriorOf = same_for_all,
    part: str = "layout",
    levels: Levels | None = None,
) -> list[PredictedRun]:
    """Predict each run by a fit that has not seen its layout, or other part of `LEFT_OUT`; runs are
    of one family of engines, and `levels` None are the shipped ones."""
    without, part_of = fits_without(found, prior, part, levels), LEFT_OUT[part]
    return [
        predicted(s, without[part_of(s)].constants(f"{s.model}.{s.row.gpu}", s.row.version))
        for s in found
    ]
