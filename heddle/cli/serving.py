"""`heddle calibrate serving`: published serving runs beside what profiles predict of them."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

if TYPE_CHECKING:
    from heddle_calibrate.fit.serving_errors import PartError, PredictedRun, ServingReport
    from heddle_sim.profile_files import Profile

SCHEMA = "heddle.serving/1"


@click.command("serving")
@click.argument(
    "tables", metavar="ROWS.csv...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--profile",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Profile file, repeated [all shipped]",
)
@click.option(
    "--fit",
    "folder",
    default=None,
    type=click.Path(path_type=Path),
    help="Fit constants to these rows; write the profiles that have some into this folder. "
    "Constants that its profiles have count as well",
)
@click.option(
    "--from-scratch",
    is_flag=True,
    help="Forget the constants that profiles have, and write those without rows too; with --fit",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), default=None, help="HTML page")
@click.option("--force", is_flag=True, help="Replace files that exist")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def serving(
    tables: tuple[Path, ...],
    files: tuple[Path, ...],
    folder: Path | None,
    from_scratch: bool,
    out: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Predict published serving runs (closed loops of clients) from profiles, with the errors.

    Errors of TPOT and TTFT are printed by model and GPU class, TP degree and concurrency. With
    --fit, host time and kernel factors are fitted to the rows, and the errors are also those of
    fits without the group of a run (engine, model, GPU class, precision, TP degree). Without
    --from-scratch, few rows change the constants of their profiles little, and no others.
    """
    from heddle.cli.outputs import OutputError, new_file, write
    from heddle_calibrate.fit.published_rows import PublishedRowsError
    from heddle_calibrate.fit.serving_errors import fit_rows, predict_rows, shipped_profiles

    if out is not None:
        new_file(out, force)
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OutputError(f"--fit {folder}: is a file; name a folder for the profiles")
    if from_scratch and folder is None:
        raise click.UsageError("--from-scratch is for a fit: give --fit DIR as well")
    profiles = {(p.model, p.gpu): p for p in _read(files)} if files else shipped_profiles()
    if folder is None:
        report = predict_rows(tables, profiles)
    else:
        if not files:
            profiles |= _in_folder(folder, profiles)
        report = fit_rows(tables, profiles, from_scratch=from_scratch)
    if not report.runs:
        raise PublishedRowsError(_none(report))
    if folder is not None:
        _save(report.fitted, folder, force)
    if out is not None:
        from heddle.reports.serving import serving_page

        write(out, serving_page(report))
    if as_json:
        click.echo(json.dumps(_as_json(report)))
        return
    _show(report)
    if folder is not None:
        _show_written(report, folder, from_scratch=from_scratch)
    if out is not None:
        click.echo(f"page: {out}")


def _read(files: Sequence[Path]) -> list["Profile"]:
    from heddle_sim.profile_files import read_profile

    return [read_profile(path) for path in files]


def _in_folder(folder: Path, names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], "Profile"]:
    """Profiles of a folder that has files by these names."""
    paths = [folder / f"{model}.{gpu}.json" for model, gpu in names]
    return {(p.model, p.gpu): p for p in _read([path for path in paths if path.is_file()])}


def _none(report: "ServingReport") -> str:
    rules = Counter(left.rule for left in report.left_out)
    why = "; ".join(f"{rule} ({number})" for rule, number in rules.most_common(3))
    if not why:
        return "no row can be predicted: the tables have no rows below their first line; add some"
    return (
        f"no row can be predicted: {why}; take rows of models and classes that `heddle profile "
        "list` shows, or give profiles with --profile FILE"
    )


def _save(profiles: Sequence["Profile"], folder: Path, force: bool) -> None:
    from heddle.cli.outputs import new_file, write
    from heddle_calibrate.profiles import encode_profile

    folder.mkdir(parents=True, exist_ok=True)
    paths = {folder / f"{p.model}.{p.gpu}.json": p for p in profiles}
    for path in paths:
        new_file(path, force)
    for path, profile in paths.items():
        write(path, encode_profile(profile))


# -- what is printed -------------------------------------------------------------------------------


def _show_written(report: "ServingReport", folder: Path, *, from_scratch: bool) -> None:
    from heddle_calibrate.fit.serving_errors import NO_RUNS

    if not from_scratch:
        click.echo(
            "the fit began at the constants that the profiles have: errors without a group are of "
            "runs that an earlier fit may have seen"
        )
    names = ", ".join(f"{p.model}.{p.gpu}" for p in report.fitted)
    click.echo(f"written to {folder}: {len(report.fitted)} profiles{': ' if names else ''}{names}")
    for name, why in report.kept.items():
        if why != NO_RUNS:
            click.echo(f"left as it was: {name}: {why}")
    without = sum(why == NO_RUNS for why in report.kept.values())
    click.echo(f"left as they were: {without} profiles without runs")


def _parts(report: "ServingReport", engine: str) -> dict[str, list["PartError"]]:
    from heddle_calibrate.fit.serving_errors import by_clients, by_profile, by_tp

    return {
        "model and GPU class": report.parts(by_profile, engine),
        "TP degree": report.parts(by_tp, engine),
        "concurrency": report.parts(by_clients, engine),
        "group": report.groups(engine),
    }


def _show(report: "ServingReport") -> None:
    from heddle.cli.show import new_table, show
    from heddle_calibrate.fit.serving_errors import median_of_groups

    for engine in report.engines:
        unseen = any(run.unseen for run in report.runs if run.row.engine == engine)
        without = ("TPOT without", "TTFT without") if unseen else ()
        for name, parts in _parts(report, engine).items():
            table = new_table(
                f"{engine}, errors in percent by {name}",
                *("runs", "TPOT", "mean", "worst", "TTFT"),
                *without,
            )
            for part in parts:
                table.add_row(part.part, *_cells(part, unseen=unseen))
            show(table)
        seen, left = median_of_groups(report, engine)
        beside = f"; without the group {left:.1f} %" if left is not None else ""
        click.echo(f"TPOT, median over groups: {seen:.1f} %{beside}")
        table = new_table(f"{engine}, largest errors", *(*["in", "out", "clients"], *RUN))
        for run in report.worst(engine):
            table.add_row(_named(run), *_run(run))
        show(table)
    rules = Counter(left.rule for left in report.left_out)
    for rule, number in rules.most_common():
        click.echo(f"left out: {number:>4}  {rule}")


RUN = ("TPOT ms", "predicted", "error %", "TTFT ms", "predicted", "error %")


def _cells(part: "PartError", *, unseen: bool) -> list[str]:
    cells = [str(part.runs), f"{part.tpot:.1f}", f"{part.bias:+.1f}"]
    cells += [f"{part.worst:.0f}", f"{part.ttft:.0f}"]
    if unseen:
        cells.append("-" if part.tpot_unseen is None else f"{part.tpot_unseen:.1f}")
        cells.append("-" if part.ttft_unseen is None else f"{part.ttft_unseen:.0f}")
    return cells


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


def _as_json(report: "ServingReport") -> dict[str, Any]:
    from dataclasses import asdict

    from heddle_calibrate.fit.serving_errors import median_of_groups

    engines: dict[str, Any] = {}
    for engine in report.engines:
        seen, left = median_of_groups(report, engine)
        engines[engine] = {
            "tpot_median_of_groups_pct": seen,
            "tpot_median_of_groups_unseen_pct": left,
            **{
                name.replace(" ", "_"): [asdict(part) for part in parts]
                for name, parts in _parts(report, engine).items()
            },
        }
    return {
        "schema": SCHEMA,
        "engines": engines,
        "runs": [_run_json(run) for run in report.runs],
        "left_out": [{"line": left.line, "rule": left.rule} for left in report.left_out],
        "written": [f"{p.model}.{p.gpu}" for p in report.fitted],
        "kept": dict(report.kept),
    }


def _run_json(run: "PredictedRun") -> dict[str, Any]:
    row = run.row
    figures = {
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
    if run.unseen is not None:
        figures["tpot_unseen_ms"] = run.unseen.tpot_s * 1e3
        figures["ttft_unseen_ms"] = run.unseen.ttft_s * 1e3
    return figures
