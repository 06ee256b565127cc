"""`heddle profile check ROWS.csv`: published serving runs beside what profiles predict."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from heddle.cli.errors import FAILED

if TYPE_CHECKING:
    from heddle_calibrate.serving.errors import PartError, PredictedRun, Profiles, ServingReport

SCHEMA = "heddle.serving/1"


def check_rows(
    tables: Sequence[Path], files: Sequence[Path], *, most_pct: float | None, as_json: bool
) -> None:
    """Predict published serving runs from profiles (files, or all that are shipped), and print it.
    A file's profile is also that of shared rows without a model's name, where it is the only one
    of its GPU type.

    The exit status is 1 where TPOT is off by more than `most_pct` percent, in the median over the
    groups of an engine.

    Raises:
        PublishedRowsError: no row can be predicted, or two files are of one model and GPU type.
    """
    from heddle_calibrate.serving.errors import median_of_groups, predict_rows, shipped_profiles
    from heddle_calibrate.serving.published_rows import PublishedRowsError
    from heddle_calibrate.serving.rows import UNNAMED
    from heddle_sim.profile_files import Profile, read_profile

    given: dict[tuple[str, str], Profile] = {}
    for path in files:
        found = read_profile(path)
        if (found.model, found.gpu) in given:
            raise PublishedRowsError(
                f"{path}: a second profile of {found.model} on {found.gpu}; give one"
            )
        given[found.model, found.gpu] = found
    of_type = Counter(gpu for _, gpu in given)
    unnamed = {(UNNAMED, gpu): p for (_, gpu), p in given.items() if of_type[gpu] == 1}
    profiles = {**unnamed, **given} if files else shipped_profiles()
    report = predict_rows(tables, profiles)
    if files:
        report = _of_files(report, profiles, ", ".join(f"{m} on {gpu}" for m, gpu in given))
    if not report.runs:
        raise PublishedRowsError(no_runs(report))
    failed = [
        f"{engine}: TPOT {off:.1f} % off over groups, allowed {most_pct:g} %"
        for engine in report.engines
        if most_pct is not None and (off := median_of_groups(report, engine)) > most_pct
    ]
    if as_json:
        click.echo(json.dumps({**plain_report(report), "failed": failed}))
    else:
        show_report(report)
    for line in failed:
        click.echo(f"failed: {line}", err=True)
    if failed:
        raise Exit(FAILED)


def _of_files(report: "ServingReport", profiles: "Profiles", given: str) -> "ServingReport":
    """Leave out the runs whose model and class none of the given profiles has."""
    from heddle_calibrate.serving.published_rows import LeftOut

    runs, out = [], list(report.left_out)
    for run in report.runs:
        if (run.model, run.row.gpu) in profiles:
            runs.append(run)
        else:
            why = f"no --model FILE is of {run.model} on {run.row.gpu}, but of {given}"
            out.append(LeftOut(run.row.line, why))
    return replace(report, runs=runs, left_out=out)


def no_runs(report: "ServingReport") -> str:
    """Say why a report has no runs, and what to do."""
    rules = Counter(left.rule for left in report.left_out)
    why = "; ".join(f"{rule} ({number})" for rule, number in rules.most_common(3))
    if not why:
        return "no row can be predicted: the tables have no rows below their first line; add some"
    return (
        f"no row can be predicted: {why}; take rows of models and classes that `heddle profile "
        "list` shows, or give profiles with --model FILE"
    )


# -- what is printed -------------------------------------------------------------------------------


def _parts(report: "ServingReport", engine: str) -> dict[str, list["PartError"]]:
    from heddle_calibrate.serving.errors import by_clients, by_profile, by_tp

    return {
        "model and GPU class": report.parts(by_profile, engine),
        "TP degree": report.parts(by_tp, engine),
        "concurrency": report.parts(by_clients, engine),
        "group": report.groups(engine),
    }


def show_report(report: "ServingReport") -> None:
    """Print tables of errors, the runs with the largest ones, and why rows were left out."""
    from heddle.cli.tables import new_table, show
    from heddle_calibrate.serving.errors import median_of_groups
    from heddle_calibrate.serving.limits import ASSUMED

    for engine in report.engines:
        for name, parts in _parts(report, engine).items():
            table = new_table(
                f"{engine}, errors in percent by {name}",
                *("runs", "TPOT", "mean", "worst", "TTFT"),
            )
            for part in parts:
                table.add_row(part.part, *_cells(part))
            show(table)
        click.echo(f"TPOT, median over groups: {median_of_groups(report, engine):.1f} %")
        table = new_table(f"{engine}, largest errors", *(*["in", "out", "clients"], *RUN))
        for run in report.worst(engine):
            table.add_row(_named(run), *_run(run))
        show(table)
    for name, number in report.assumed().items():
        click.echo(f"assumed:  {number:>4}  {name}: {ASSUMED[name]}")
    rules = Counter(left.rule for left in report.left_out)
    for rule, number in rules.most_common():
        click.echo(f"left out: {number:>4}  {rule}")


RUN = ("TPOT ms", "predicted", "error %", "TTFT ms", "predicted", "error %")


def _cells(part: "PartError") -> list[str]:
    errors = f"{part.tpot:.1f}", f"{part.bias:+.1f}", f"{part.worst:.0f}", f"{part.ttft:.0f}"
    return [str(part.runs), *errors]


def _named(run: "PredictedRun") -> str:
    row = run.row
    ranks = f" dp{row.dp}" if row.dp > 1 else ""
    return f"{run.model} {row.gpu} TP {row.tp}{ranks} {row.version}".rstrip()


def _run(run: "PredictedRun") -> list[str]:
    row = run.row
    return [
        *(str(n) for n in (row.input_tokens, row.output_tokens, row.concurrency)),
        *(f"{row.tpot_s * 1e3:.2f}", f"{run.tpot_s * 1e3:.2f}", f"{run.tpot * 100:+.0f}"),
        *(f"{row.ttft_s * 1e3:.0f}", f"{run.ttft_s * 1e3:.0f}", f"{run.ttft * 100:+.0f}"),
    ]


def plain_report(report: "ServingReport") -> dict[str, Any]:
    """Return a report as --json prints it."""
    from heddle_calibrate.serving.errors import median_of_groups

    engines: dict[str, Any] = {}
    for engine in report.engines:
        engines[engine] = {
            "tpot_median_of_groups_pct": median_of_groups(report, engine),
            **{
                name.replace(" ", "_"): [asdict(part) for part in parts]
                for name, parts in _parts(report, engine).items()
            },
        }
    return {
        "schema": SCHEMA,
        "engines": engines,
        "runs": [_run_json(run) for run in report.runs],
        "assumed": report.assumed(),
        "left_out": [{"line": left.line, "rule": left.rule} for left in report.left_out],
    }


def _run_json(run: "PredictedRun") -> dict[str, Any]:
    row = run.row
    return {
        "line": row.line,
        "engine": row.engine,
        "version": row.version,
        "model": run.model,
        "gpu": row.gpu,
        "tp": row.tp,
        "attention_dp": row.dp,
        "input_tokens": row.input_tokens,
        "output_tokens": row.output_tokens,
        "concurrency": row.concurrency,
        "tpot_ms": row.tpot_s * 1e3,
        "tpot_predicted_ms": run.tpot_s * 1e3,
        "ttft_ms": row.ttft_s * 1e3,
        "ttft_predicted_ms": run.ttft_s * 1e3,
    }
