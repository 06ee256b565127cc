"""Fit host time and kernel factors of profiles to published serving runs.

    python -m tools.profiles serving ROWS.csv... --fit DIR

`heddle profile check` prints the errors of profiles alone.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import numpy as np

from heddle.cli.outputs import OutputError, new_file, write
from heddle.cli.serving import no_runs, plain_report, show_report
from heddle.cli.tables import new_table, show
from heddle_calibrate.fit.kernel_profile import GPUS
from heddle_calibrate.profiles import encode_plain, encode_profile
from heddle_calibrate.serving.errors import (
    PredictedRun,
    Profiles,
    ServingReport,
    part_error,
    predicted,
    shipped_profiles,
)
from heddle_calibrate.serving.published_rows import PublishedRowsError
from heddle_calibrate.serving.rows import ENGINES, read_serving_rows
from heddle_calibrate.serving.samples import ServingSample, samples
from heddle_calibrate.serving.sglang import TERMS_FILE
from heddle_sim.profile_files import Profile, ProfileError, read_profile
from heddle_sim.profile_parts import release
from tools.profiles.serving_fit import (
    FEWEST,
    LEFT_OUT,
    PRIOR,
    ServingFit,
    fit_serving,
    fittable,
    left_out_runs,
    same_for_all,
)
from tools.profiles.serving_page import serving_page
from tools.profiles.serving_profile import inherited, newest_last, stated_before, with_serving

NO_RUNS = "no runs of it"
TRENDS = {"per_step": "host time of a step in ms", "prefill": "factor on kernel time of prompts"}
TABLE_HOST = "host time of dense models in bfloat16 comes with their tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedServing:
    """Errors of a fit, and its profiles."""

    samples: Sequence[ServingSample]
    seen: ServingReport
    unseen: Mapping[str, ServingReport]
    """The same runs by fits without the layout, engine version or model of each run."""
    profiles: Sequence[Profile]
    """Those with the constants of the vLLM runs."""
    kept: Mapping[str, str]
    """Why the other profiles ("model.gpu") are as they were."""
    sglang: Mapping[str, object] | None = None
    """`sglang.json`, where there are rows of it."""
    trends: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Of vLLM's runs, where they are of three releases or more; by a key of `TRENDS`."""


def fit_rows(
    paths: Iterable[Path], profiles: Profiles, *, from_scratch: bool = False
) -> FittedServing:
    """Fit published runs, each family of engines apart, and predict them with and without their
    layout, engine version and model in the fit.

    The constants that profiles have are the prior, so that few runs change them little; with
    `from_scratch`, it is the same for all.

    Raises PublishedRowsError with file, line and column for a table that cannot be read.
    """
    rows, unread = read_serving_rows(paths)
    found, out = samples(rows, profiles)
    prior = same_for_all if from_scratch else stated_before(profiles.values())
    seen: list[PredictedRun] = []
    unseen: dict[str, list[PredictedRun]] = {part: [] for part in LEFT_OUT}
    trends: dict[str, tuple[float, float, float]] = {}
    for engine in sorted({sample.row.engine for sample in found}):
        own = [sample for sample in found if sample.row.engine == engine]
        fit = fit_serving(own, prior)
        if engine == "vllm" and len({release(s.row.version) for s in own} - {()}) > 2:
            trends = {quantity: release_trend(fit, quantity) for quantity in TRENDS}
        for part in LEFT_OUT:
            unseen[part] += left_out_runs(own, prior, part)
        seen += [predicted(s, fit.constants(f"{s.model}.{s.row.gpu}", s.row.version)) for s in own]
    vllm, sglang = (
        [sample for sample in found if sample.row.engine == engine] for engine in ENGINES
    )
    fitted, kept = fitted_profiles(
        profiles, vllm, seen, unseen["layout"], from_scratch=from_scratch
    )
    left_out = [*unread, *out]
    return FittedServing(
        samples=found,
        seen=ServingReport(runs=seen, left_out=left_out),
        unseen={part: ServingReport(runs=runs, left_out=left_out) for part, runs in unseen.items()},
        profiles=fitted,
        kept=kept,
        sglang=sglang_terms(sglang, seen, unseen["layout"]) if sglang else None,
        trends=trends,
    )


def sglang_terms(
    found: Sequence[ServingSample], seen: Sequence[PredictedRun], unseen: Sequence[PredictedRun]
) -> dict[str, object]:
    """Return `sglang.json`: terms of the ground truth by every second run, of the cost estimate by
    the others."""
    ordered = sorted(found, key=lambda s: (s.model, s.row.group, s.row.work, s.row.concurrency))
    parts = {"truth": ordered[::2], "estimate": ordered[1::2]}
    fitted = {part: fit_serving(of).nested() for part, of in parts.items()}
    apart = ServingReport(runs=unseen, left_out=()).groups("sglang")
    return {
        "runs": len(found),
        "versions": newest_last([s.row.version for s in found if s.row.version]),
        "layout_left_out": {
            "tpot_median_pct": round(median(part.tpot for part in apart), 1),
            "tpot_p90_pct": round(float(np.quantile([part.tpot for part in apart], 0.9)), 1),
            "ttft_median_pct": round(median(part.ttft for part in apart), 1),
        },
        "profiles": {
            f"{model}.{gpu}": _measured((model, gpu), seen, unseen, "sglang")
            for model, gpu in sorted({(s.model, s.row.gpu) for s in fittable(found)})
        },
        "prior": PRIOR,
        **{
            part: {
                quantity: {
                    level: {key: float(f"{value:.4g}") for key, value in sorted(of.items())}
                    for level, of in levels.items()
                }
                for quantity, levels in terms.items()
            }
            for part, terms in fitted.items()
        },
    }


# -- the profiles of a fit -------------------------------------------------------------------------


def fitted_profiles(
    profiles: Profiles,
    found: Sequence[ServingSample],
    seen: Sequence[PredictedRun],
    unseen: Sequence[PredictedRun],
    *,
    from_scratch: bool,
) -> tuple[list[Profile], dict[str, str]]:
    """Return the profiles with constants of a fit, and why each of the others is as it was.

    The ground truth takes every second run of a profile, the cost estimate the others. Changed are
    profiles with runs in both, and those derived from them; with `from_scratch`, those without runs
    as well.
    """
    # A fit that began at constants of an earlier one may have seen each group there.
    unseen = unseen if from_scratch else []
    ordered = sorted(found, key=lambda s: (s.model, s.row.group, s.row.work, s.row.concurrency))
    by_name: dict[tuple[str, str], list[ServingSample]] = {}
    for s in ordered:
        by_name.setdefault((s.model, s.row.gpu), []).append(s)
    halves = [[s for own in by_name.values() for s in own[half::2]] for half in (0, 1)]
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
            measured = _measured(names, seen, unseen)
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
    names: tuple[str, str],
    seen: Sequence[PredictedRun],
    unseen: Sequence[PredictedRun],
    engine: str = "vllm",
) -> dict[str, object]:
    """Errors of the runs of a profile with an engine."""

    def of_profile(runs: Sequence[PredictedRun]) -> list[PredictedRun]:
        return [r for r in runs if (r.model, r.row.gpu, r.row.engine) == (*names, engine)]

    own, without = of_profile(seen), of_profile(unseen)
    measured: dict[str, object] = {"runs": len(own)}
    if own:
        part = part_error("", own)
        measured |= {
            "tpot_mean_abs_pct": part.tpot,
            "tpot_worst_pct": part.worst,
            "ttft_mean_abs_pct": part.ttft,
        }
    if without:
        part = part_error("", without)
        measured["tpot_unseen_mean_abs_pct"] = part.tpot
        measured["ttft_unseen_mean_abs_pct"] = part.ttft
        by_tp = ServingReport(runs=without, left_out=()).parts(lambda run: str(run.row.tp), engine)
        measured["tpot_unseen_pct_by_tp"] = {each.part: each.tpot for each in by_tp}
    return measured


COLUMNS = ("engine", "groups", "TPOT median", "TPOT P90", "TPOT worst", "TTFT median")


def left_out_errors(fitted: FittedServing) -> list[dict[str, str | float]]:
    """Errors over groups, each a layout, by what the fits have not seen: nothing first."""
    reports = {"nothing": fitted.seen, **fitted.unseen}
    return [row for part, report in reports.items() for row in errors_of_groups(part, report)]


def errors_of_groups(part: str, report: ServingReport) -> list[dict[str, str | float]]:
    """Errors over groups of each engine, under the name of what a fit has not seen."""
    return [
        {
            "part": part,
            "engine": engine,
            "groups": len(groups),
            "TPOT median": round(median(group.tpot for group in groups), 1),
            "TPOT P90": round(float(np.quantile([group.tpot for group in groups], 0.9)), 1),
            "TPOT worst": round(max(group.tpot for group in groups), 1),
            "TTFT median": round(median(group.ttft for group in groups), 1),
        }
        for engine in report.engines
        for groups in [report.groups(engine)]
    ]


# -- the command -----------------------------------------------------------------------------------


@click.command("serving")
@click.argument(
    "tables", metavar="ROWS.csv...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--profile",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Profile file, repeated [those in DIR, else the shipped ones]",
)
@click.option(
    "--fit",
    "folder",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the profiles that have runs. Constants that its profiles have count as well",
)
@click.option(
    "--from-scratch",
    is_flag=True,
    help="Forget the constants that profiles have, and write those without rows too",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), default=None, help="HTML page")
@click.option("--force", is_flag=True, help="Replace files that exist")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def command(
    tables: tuple[Path, ...],
    files: tuple[Path, ...],
    folder: Path,
    from_scratch: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Fit host time and kernel factors to published serving runs, with the errors.

    Errors are those of the fit, and those of fits without the layout of a run (engine, model, GPU
    type, precision, TP degree), its engine version or its model. Without --from-scratch, few rows
    change the constants of their profiles little, and no others.
    """
    try:
        if out is not None:
            new_file(out, force)
        profiles = _named(files) if files else shipped_profiles()
        if not files:
            paths = [folder / f"{model}.{gpu}.json" for model, gpu in profiles]
            profiles |= _named([path for path in paths if path.is_file()])
        fitted = fit_rows(tables, profiles, from_scratch=from_scratch)
        if not fitted.seen.runs:
            raise PublishedRowsError(no_runs(fitted.seen))
        _save(fitted, folder, force)
        if out is not None:
            write(out, serving_page(fitted.seen, fitted.unseen["layout"]))
    except (OutputError, ProfileError, PublishedRowsError) as e:
        raise click.ClickException(str(e)) from e
    if as_json:
        report = {
            **plain_report(fitted.seen),
            "unseen": plain_report(fitted.unseen["layout"]),
            "parts_left_out": left_out_errors(fitted),
            "host_step_ms_by_release": fitted.trends.get("per_step"),
            "prompt_factor_by_release": fitted.trends.get("prefill"),
            "written": [f"{p.model}.{p.gpu}" for p in fitted.profiles],
            "kept": dict(fitted.kept),
        }
        click.echo(json.dumps(report))
        return
    show_report(fitted.seen)
    click.echo("\nby fits without the layout of each run:")
    show_report(fitted.unseen["layout"])
    table = new_table("errors in percent by what the fit has not seen", *COLUMNS)
    for row in left_out_errors(fitted):
        table.add_row(*(str(row[name]) for name in ("part", *COLUMNS)))
    show(table)
    for quantity, (slope, error, spread) in fitted.trends.items():
        click.echo(
            f"{TRENDS[quantity]} by vLLM release: {slope:+.2f} from one to the next, standard "
            f"error {error:.2f}; releases differ from that line by {spread:.2f}"
        )
    _show_written(fitted, folder, from_scratch=from_scratch)
    if out is not None:
        click.echo(f"page: {out}")


def release_trend(fit: ServingFit, of: str) -> tuple[float, float, float]:
    """A quantity of a fit, host time in ms: change from one release of vLLM to the next, its
    standard error, and the standard deviation about that line."""
    steps = {
        release(version): value * (1e3 if of == "per_step" else 1.0)
        for (quantity, level, version), value in fit.terms.items()
        if (quantity, level) == (of, "version") and release(version)
    }
    minor = np.array([numbers[1] for numbers in steps], float)
    value = np.array(list(steps.values()))
    slope, base = np.polyfit(minor, value, 1)
    spread = float(np.sqrt(((value - base - slope * minor) ** 2).sum() / (len(value) - 2)))
    return float(slope), spread / float(np.sqrt(((minor - minor.mean()) ** 2).sum())), spread


def _named(files: Iterable[Path]) -> dict[tuple[str, str], Profile]:
    return {(p.model, p.gpu): p for p in map(read_profile, files)}


def _save(fitted: FittedServing, folder: Path, force: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{p.model}.{p.gpu}.json": encode_profile(p) for p in fitted.profiles}
    if fitted.sglang is not None:
        files[folder / TERMS_FILE.name] = encode_plain(fitted.sglang)
    for path in files:
        new_file(path, force)
    for path, content in files.items():
        write(path, content)


def _show_written(fitted: FittedServing, folder: Path, *, from_scratch: bool) -> None:
    if not from_scratch:
        click.echo(
            "the fit began at the constants that the profiles have: errors without a group are of "
            "runs that an earlier fit may have seen"
        )
    names = ", ".join(f"{p.model}.{p.gpu}" for p in fitted.profiles)
    count = len(fitted.profiles)
    click.echo(f"written to {folder}: {count} profiles{': ' if names else ''}{names}")
    for name, why in fitted.kept.items():
        if why != NO_RUNS:
            click.echo(f"left as it was: {name}: {why}")
    without = sum(why == NO_RUNS for why in fitted.kept.values())
    click.echo(f"left as they were: {without} profiles without runs")
