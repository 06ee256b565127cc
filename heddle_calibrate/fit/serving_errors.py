"""Errors of predicted serving runs, by model and GPU class, TP, concurrency; with and without the
group of a run in the fit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from heddle_calibrate.fit.serving_fit import (
    ServingConstants,
    ServingSample,
    fit_serving,
    fits_without,
    fittable,
)
from heddle_calibrate.fit.serving_fit import samples as replayed
from heddle_calibrate.fit.serving_profile import constants_of, with_serving
from heddle_calibrate.fit.serving_rows import ENGINES, ServingRow, read_serving_rows
from heddle_calibrate.fit.training_rows import LeftOut
from heddle_sim.profile_files import Profile, known_profiles, load_profile

Profiles = Mapping[tuple[str, str], Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """One run: measured, predicted, and the signed relative errors."""

    row: ServingRow
    model: str
    """Of the profile."""
    gpus: int
    tpot_s: float
    ttft_s: float
    unseen: "PredictedRun | None" = None
    """By a fit without the group of the run."""

    @property
    def tpot(self) -> float:
        """Relative error of TPOT."""
        return self.tpot_s / self.row.tpot_s - 1

    @property
    def ttft(self) -> float:
        """Relative error of TTFT."""
        return self.ttft_s / self.row.ttft_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartError:
    """Errors of some runs in percent: means of absolute values, and the signed mean."""

    part: str
    runs: int
    tpot: float
    bias: float
    worst: float
    ttft: float
    tpot_unseen: float | None
    ttft_unseen: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """Predicted runs of all engines, and rows that none was predicted for."""

    runs: Sequence[PredictedRun]
    left_out: Sequence[LeftOut]
    fitted: Sequence[Profile] = ()
    """The profiles with the constants of a fit, where one was made."""

    @property
    def engines(self) -> list[str]:
        """Families of engines that have runs."""
        return [name for name in ENGINES if any(run.row.engine == name for run in self.runs)]

    def parts(self, part_of: Callable[[PredictedRun], str], engine: str) -> list[PartError]:
        """Errors by a name that each run gives itself, of one family of engines."""
        found: dict[str, list[PredictedRun]] = {}
        for run in self.runs:
            if run.row.engine == engine:
                found.setdefault(part_of(run), []).append(run)
        return [part_error(name, runs) for name, runs in sorted(found.items())]

    def groups(self, engine: str) -> list[PartError]:
        """Errors by what a fit leaves out at once."""
        return self.parts(lambda run: f"{by_profile(run)} TP {run.row.tp}", engine)

    def worst(self, engine: str, most: int = 10) -> list[PredictedRun]:
        """List the runs with the largest errors of TPOT."""
        own = [run for run in self.runs if run.row.engine == engine]
        return sorted(own, key=lambda run: -abs(run.tpot))[:most]


def by_profile(run: PredictedRun) -> str:
    """Name model and GPU class of a run."""
    return f"{run.model} {run.row.gpu}"


def by_tp(run: PredictedRun) -> str:
    """Name the TP degree of a run as published."""
    return f"TP {run.row.tp}"


def by_clients(run: PredictedRun) -> str:
    """Name the concurrency of a run, in classes of a power of two."""
    low = 1 << (run.row.concurrency.bit_length() - 1)
    return f"{low:>4} to {2 * low - 1} clients"


def part_error(name: str, runs: Sequence[PredictedRun]) -> PartError:
    """Sum up the errors of runs."""
    without = [run.unseen for run in runs if run.unseen is not None]
    return PartError(
        part=name,
        runs=len(runs),
        tpot=_percent(abs(run.tpot) for run in runs),
        bias=_percent(run.tpot for run in runs),
        worst=round(max(abs(run.tpot) for run in runs) * 100, 1),
        ttft=_percent(abs(run.ttft) for run in runs),
        tpot_unseen=_percent(abs(run.tpot) for run in without) if without else None,
        ttft_unseen=_percent(abs(run.ttft) for run in without) if without else None,
    )


def _percent(values: Iterable[float]) -> float:
    return round(fmean(values) * 100, 2)


def median_of_groups(report: ServingReport, engine: str) -> tuple[float, float | None]:
    """Median over groups of the mean absolute error of TPOT in percent: seen, and unseen."""
    groups = report.groups(engine)
    unseen = [part.tpot_unseen for part in groups if part.tpot_unseen is not None]
    return median(part.tpot for part in groups), median(unseen) if unseen else None


# -- predicting and fitting ------------------------------------------------------------------------


def shipped_profiles() -> dict[tuple[str, str], Profile]:
    """Load every shipped profile, by model and GPU class."""
    return {names: load_profile(*names) for names in known_profiles()}


def predict_rows(paths: Iterable[Path], profiles: Profiles) -> ServingReport:
    """Predict published runs with the constants in profile files.

    Raises PublishedRowsError with file, line and column for a table that cannot be read.
    """
    rows, unread = read_serving_rows(paths)
    found, out = replayed(rows, profiles)
    runs = [
        _error(sample, constants_of(profiles[sample.model, sample.row.gpu], sample.row.version))
        for sample in found
    ]
    return ServingReport(runs=runs, left_out=[*unread, *out])


def fit_rows(paths: Iterable[Path], profiles: Profiles) -> ServingReport:
    """Fit published runs, each family of engines apart, and predict them with and without their
    group in the fit.

    ``fitted`` has the profiles with the constants of the vLLM runs: the ground truth takes every
    second run of each profile, the cost estimate the others.

    Raises PublishedRowsError as `predict_rows`.
    """
    rows, unread = read_serving_rows(paths)
    found, out = replayed(rows, profiles)
    runs: list[PredictedRun] = []
    for engine in sorted({sample.row.engine for sample in found}):
        own = [sample for sample in found if sample.row.engine == engine]
        fit, without = fit_serving(own), fits_without(own)
        for sample in own:
            names = f"{sample.model}.{sample.row.gpu}", sample.row.version
            seen = _error(sample, fit.constants(*names))
            left = without[sample.row.group].constants(*names)
            runs.append(replace(seen, unseen=_error(sample, left)))
    vllm = [sample for sample in found if sample.row.engine == "vllm"]
    return ServingReport(runs=runs, left_out=[*unread, *out], fitted=_fitted(profiles, vllm, runs))


def _error(sample: ServingSample, constants: ServingConstants) -> PredictedRun:
    return PredictedRun(
        row=sample.row,
        model=sample.model,
        gpus=sample.gpus,
        tpot_s=constants.tpot_s(sample),
        ttft_s=constants.ttft_s(sample),
    )


def _fitted(
    profiles: Profiles, found: Sequence[ServingSample], runs: Sequence[PredictedRun]
) -> list[Profile]:
    ordered = sorted(found, key=lambda s: (s.model, s.row.group, s.row.work, s.row.concurrency))
    truth, estimate = fit_serving(ordered[::2]), fit_serving(ordered[1::2])
    made = []
    for (model, gpu), profile in profiles.items():
        dense_bf16 = not profile.experts and profile.source.precision == "bfloat16"
        if profile.source.files or dense_bf16:
            continue  # `from_tables` gives these their host time
        own = [s for s in fittable(ordered[::2]) if (s.model, s.row.gpu) == (model, gpu)]
        errors = [
            run for run in runs if (run.model, run.row.gpu, run.row.engine) == (model, gpu, "vllm")
        ]
        measured: dict[str, object] = {"runs": len(errors)}
        if errors:
            part = part_error("", errors)
            measured |= {
                "tpot_mean_abs_pct": part.tpot,
                "tpot_worst_pct": part.worst,
                "ttft_mean_abs_pct": part.ttft,
                "tpot_unseen_mean_abs_pct": part.tpot_unseen,
                "ttft_unseen_mean_abs_pct": part.ttft_unseen,
            }
        made.append(with_serving(profile, truth, estimate, own, measured))
    return made
