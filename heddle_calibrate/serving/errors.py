"""Errors of predicted serving runs, by model and GPU class, TP degree and concurrency."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from heddle_calibrate.serving.constants import ServingConstants, constants_of
from heddle_calibrate.serving.published_rows import LeftOut
from heddle_calibrate.serving.rows import ENGINES, ServingRow, read_serving_rows
from heddle_calibrate.serving.samples import ServingSample, samples
from heddle_calibrate.serving.sglang import sglang_constants
from heddle_sim.profile_files import Profile, known_profiles, load_profile
from heddle_sim.profile_parts import release

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """Predicted runs of all engines, and rows that none was predicted for."""

    runs: Sequence[PredictedRun]
    left_out: Sequence[LeftOut]

    @property
    def engines(self) -> list[str]:
        """Families of engines that have runs."""
        return [name for name in ENGINES if any(run.row.engine == name for run in self.runs)]

    def assumed(self) -> dict[str, int]:
        """Count the runs of which a limit is assumed, by its name."""
        return dict(Counter(name for run in self.runs for name in run.row.limits.assumed))

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
    return PartError(
        part=name,
        runs=len(runs),
        tpot=_percent(abs(run.tpot) for run in runs),
        bias=_percent(run.tpot for run in runs),
        worst=round(max(abs(run.tpot) for run in runs) * 100, 1),
        ttft=_percent(abs(run.ttft) for run in runs),
    )


def _percent(values: Iterable[float]) -> float:
    return round(fmean(values) * 100, 2)


def median_of_groups(report: ServingReport, engine: str) -> float:
    """Median over groups of the mean absolute error of TPOT in percent."""
    return median(part.tpot for part in report.groups(engine))


# -- predicting ------------------------------------------------------------------------------------


def shipped_profiles() -> dict[tuple[str, str], Profile]:
    """Load every shipped profile, by model and GPU class."""
    return {names: load_profile(*names) for names in known_profiles()}


def _vllm_constants(profile: Profile, version: str) -> ServingConstants:
    """Of the release, or what simulations take for it."""
    return constants_of(profile.of_version(version if release(version) else ""), version)


def predict_rows(paths: Iterable[Path], profiles: Profiles) -> ServingReport:
    """Predict published runs with the constants in profile files.

    Raises PublishedRowsError with file, line and column for a table that cannot be read.
    """
    rows, unread = read_serving_rows(paths)
    found, out = samples(rows, profiles)
    of = {"vllm": _vllm_constants, "sglang": sglang_constants}
    runs = [
        predicted(sample, of[sample.row.engine](sample.profile, sample.row.version))
        for sample in found
    ]
    return ServingReport(runs=runs, left_out=[*unread, *out])


def predicted(sample: ServingSample, constants: ServingConstants) -> PredictedRun:
    return PredictedRun(
        row=sample.row,
        model=sample.model,
        gpus=sample.gpus,
        tpot_s=constants.tpot_s(sample),
        ttft_s=constants.ttft_s(sample),
    )
