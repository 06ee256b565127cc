"""Errors of predicted serving runs, by model and GPU class, TP, concurrency; with and without the
group of a run in the fit."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from heddle_calibrate.fit.kernel_profile import GPUS
from heddle_calibrate.fit.serving_fit import (
    FEWEST,
    ServingConstants,
    ServingSample,
    fit_serving,
    fits_without,
    fittable,
    same_for_all,
)
from heddle_calibrate.fit.serving_fit import samples as replayed
from heddle_calibrate.fit.serving_profile import (
    constants_of,
    inherited,
    stated_before,
    with_serving,
)
from heddle_calibrate.fit.serving_rows import ENGINES, ServingRow, read_serving_rows
from heddle_calibrate.fit.training_rows import LeftOut
from heddle_sim.profile_files import Profile, known_profiles, load_profile

Profiles = Mapping[tuple[str, str], Profile]
NO_RUNS = "no runs of it"
TABLE_HOST = "host time of dense models in bfloat16 comes with their tables"


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
    kept: Mapping[str, str] = field(default_factory=dict)
    """Why the other profiles ("model.gpu") are as they were, where a fit was made."""

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


def fit_rows(
    paths: Iterable[Path], profiles: Profiles, *, from_scratch: bool = False
) -> ServingReport:
    """Fit published runs, each family of engines apart, and predict them with and without their
    group in the fit.

    The constants that profiles have are the prior, so that few runs change them little; with
    `from_scratch`, it is the same for all. ``fitted`` has the profiles with the constants of the
    vLLM runs (`fitted_profiles`), ``kept`` says why the others are as they were.

    Raises PublishedRowsError as `predict_rows`.
    """
    rows, unread = read_serving_rows(paths)
    found, out = replayed(rows, profiles)
    prior = same_for_all if from_scratch else stated_before(profiles.values())
    runs: list[PredictedRun] = []
    for engine in sorted({sample.row.engine for sample in found}):
        own = [sample for sample in found if sample.row.engine == engine]
        fit, without = fit_serving(own, prior), fits_without(own, prior)
        for sample in own:
            names = f"{sample.model}.{sample.row.gpu}", sample.row.version
            seen = _error(sample, fit.constants(*names))
            left = without[sample.row.group].constants(*names)
            runs.append(replace(seen, unseen=_error(sample, left)))
    vllm = [sample for sample in found if sample.row.engine == "vllm"]
    fitted, kept = fitted_profiles(profiles, vllm, runs, from_scratch=from_scratch)
    return ServingReport(runs=runs, left_out=[*unread, *out], fitted=fitted, kept=kept)


def _error(sample: ServingSample, constants: ServingConstants) -> PredictedRun:
    return PredictedRun(
        row=sample.row,
        model=sample.model,
        gpus=sample.gpus,
        tpot_s=constants.tpot_s(sample),
        ttft_s=constants.ttft_s(sample),
    )


# -- the profiles of a fit -------------------------------------------------------------------------


def fitted_profiles(
    profiles: Profiles,
    found: Sequence[ServingSample],
    runs: Sequence[PredictedRun],
    *,
    from_scratch: bool,
) -> tuple[list[Profile], dict[str, str]]:
    """Return the profiles with constants of a fit, and why each of the others is as it was.

    The ground truth takes every second run, the cost estimate the others. Changed are profiles with
    runs in both, and those derived from them; with `from_scratch`, those without runs as well.
    """
    ordered = sorted(found, key=lambda s: (s.model, s.row.group, s.row.work, s.row.concurrency))
    halves = ordered[::2], ordered[1::2]
    prior = [stated_before(profiles.values(), estimate=rough) for rough in (False, True)]
    if from_scratch:
        prior = [same_for_all, same_for_all]
    truth, estimate = (fit_serving(*each) for each in zip(halves, prior, strict=True))
    by_half = [Counter((s.model, s.row.gpu) for s in fittable(half)) for half in halves]
    by_model = Counter(s.model for s in ordered)
    made: dict[tuple[str, str], Profile] = {}
    kept: dict[str, str] = {}
    for names, profile in sorted(profiles.items(), key=lambda item: bool(item[1].derived)):
        model, gpu = names
        here = sum((s.model, s.row.gpu) == names for s in ordered)
        base = made.get((model, _base(gpu)))
        if not profile.experts and profile.source.precision == "bfloat16":
            kept[f"{model}.{gpu}"] = TABLE_HOST if here else NO_RUNS
        elif base is not None and not here:
            made[names] = inherited(profile, base)
        elif from_scratch or all(half[names] for half in by_half):
            own = [s for s in fittable(halves[0]) if (s.model, s.row.gpu) == names]
            measured = _measured(names, runs, from_scratch=from_scratch)
            made[names] = with_serving(
                profile, truth, estimate, own, measured, update=not from_scratch
            )
        else:
            kept[f"{model}.{gpu}"] = _too_few(here, by_model[model]) if here else NO_RUNS
    return [made[names] for names in profiles if names in made], kept


def _base(gpu: str) -> str:
    card = GPUS.get(gpu)
    return card.base if card is not None else ""


def _too_few(here: int, of_model: int) -> str:
    if of_model < 2 * FEWEST:
        return f"{of_model} runs of the model; a fit needs {2 * FEWEST}"
    return f"{here} run of it; a fit needs one for the ground truth and one for the cost estimate"


def _measured(
    names: tuple[str, str], runs: Sequence[PredictedRun], *, from_scratch: bool
) -> dict[str, object]:
    """Errors of the vLLM runs of a profile; those without the group of a run only where no earlier
    fit can have seen it."""
    own = [run for run in runs if (run.model, run.row.gpu, run.row.engine) == (*names, "vllm")]
    measured: dict[str, object] = {"runs": len(own)}
    if own:
        part = part_error("", own)
        measured |= {
            "tpot_mean_abs_pct": part.tpot,
            "tpot_worst_pct": part.worst,
            "ttft_mean_abs_pct": part.ttft,
        }
        if from_scratch and part.tpot_unseen is not None:
            measured["tpot_unseen_mean_abs_pct"] = part.tpot_unseen
            measured["ttft_unseen_mean_abs_pct"] = part.ttft_unseen
    return measured
