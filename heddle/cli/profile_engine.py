"""`heddle profile measure`, `fit` and `check`: from a real engine to a profile and its error."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from heddle.cli.errors import FAILED
from heddle.cli.options import NUMBERS, config_files, settings_option, take_settings
from heddle.cli.replay import ALLOW_POLICY
from heddle.cli.serving import check_rows

if TYPE_CHECKING:
    from heddle.command_config import Config, ProfileSettings
    from heddle_calibrate.measure.session import SweepSpec
    from heddle_sim.profile_files import Profile

OUT = click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write"
)
FORCE = click.option("--force", is_flag=True, help="Replace the file if it exists")
OF_RUNS = ("max_makespan_error", "max_p99_error", "min_finish_order", "same_ranking")
"""Bounds that `check` of rows does not have."""
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")


@click.command()
@config_files
@click.option("--engine", type=click.Choice(["vllm", "fake"]), default=None, help="[fake]")
@click.option("--model-dir", default=None, help="Folder of the model that vLLM serves")
@click.option(
    "--model", default=None, help="Name for the profile; with fake engines, their profile"
)
@click.option("--gpu", default=None, help="GPU class of the profile [cpu, without a GPU]")
@click.option("--tp", "tps", type=NUMBERS, default="1", show_default=True, help="TP degrees")
@click.option("--max-running", type=int, default=None, help="Largest batch [32; 128 on GPUs]")
@settings_option
@OUT
def measure(
    configs: tuple[Path, ...],
    settings: tuple[str, ...],
    out: Path,
    **options: Any,
) -> None:
    """Sweep one real engine at a time: decoding, prompts, starts, aborts, and moves between two.

    Takes minutes. Other load on the machine changes the result. A sweep that breaks off is kept
    as far as it got. profile.sweep says how much is measured, quick, small or full, and
    profile.max_context the longest context.
    """
    from heddle.calibration.measure import sweep_engines
    from heddle.cli.outputs import new_file, write
    from heddle.cli.progress import progress
    from heddle_calibrate.serving.shared import before_and_after, shared_rows
    from heddle_calibrate.sweeps import Sweep, encode_sweep

    new_file(out)
    config, spec, model = _sweep_spec(configs, settings, options)
    share = Path(config.profile.share)
    if spec.served:
        if share.suffix != ".csv":
            raise click.UsageError(f"profile.share is {share}: name a new file that ends in .csv")
        new_file(share)
    with progress("measure", "measurements") as bar:

        def on_progress(done: int, total: int, what: str) -> None:
            bar.now(what)
            bar.at(done, total)

        def save(found: Sweep) -> None:
            write(out, encode_sweep(found))

        sweep = sweep_engines(config, spec, model=model, on_progress=on_progress, save=save)
    trials = len(sweep.decode) + len(sweep.prefill)
    click.echo(f"{out}: {trials:,} timed iterations and prompts, {sweep.spoiled} left out")
    for note in sweep.notes:
        click.echo(f"note: {note}", err=True)
    if spec.served:
        write(share, shared_rows(sweep))
        click.echo(f"{share}: {len(sweep.served)} closed loops, to send upstream")
        for line in before_and_after(sweep, share, worst_pct=config.profile.max_fit_error):
            click.echo(line)


def _sweep_spec(
    configs: tuple[Path, ...], settings: tuple[str, ...], options: dict[str, Any]
) -> "tuple[Config, SweepSpec, str]":
    """Read the options as configuration; what is not given is chosen by the machine."""
    from heddle.calibration.measure import choose_sweep

    given = {
        "runtime__engine": options["engine"],
        "runtime__model_dir": options["model_dir"],
    }
    fake = options["engine"] != "vllm"
    if fake:
        given |= {"cluster__model": options["model"], "cluster__gpu": options["gpu"]}
    config = take_settings(settings, configs, **given)
    spec, model = choose_sweep(
        config,
        tuple(dict.fromkeys(options["tps"])),
        size=config.profile.sweep,
        model=options["model"],
        gpu=options["gpu"],
        max_running=options["max_running"],
        max_context=config.profile.max_context,
        served=bool(config.profile.share),
    )
    return config, spec, model


@click.command()
@click.argument(
    "sweeps", metavar="SWEEP...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--model", "name", default=None, help="Name of the model in the profile [the sweep's]"
)
@click.option("--gpu", default=None, help="GPU class in the profile [the sweep's]")
@settings_option
@OUT
@FORCE
@JSON
def fit(
    sweeps: tuple[Path, ...],
    name: str | None,
    gpu: str | None,
    settings: tuple[str, ...],
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Fit a profile to a sweep, with its error on the held-out part.

    Several sweeps of the same engine, made at different times, are fitted together: the speed of a
    shared machine drifts, and one sweep knows one hour of it.

    Held out are batches, contexts and prompt lengths between those of the grid, and whole loops of
    clients: no truth is fitted on them. A fit that is off by more than profile.max_fit_error
    percent in the median is refused.
    """
    from heddle.cli.outputs import new_file
    from heddle_calibrate.fit.from_sweep import fit_sweep
    from heddle_calibrate.sweeps import pooled, read_sweep

    worst_pct = take_settings(settings).profile.max_fit_error
    new_file(out, force)
    if out.suffix != ".json":
        raise click.UsageError(f"--out {out}: a profile is named by a path that ends in .json")
    files = tuple(path.name for path in sweeps)
    sweep = pooled({path: read_sweep(path) for path in sweeps})
    profile = fit_sweep(sweep, file=", ".join(files), worst_pct=worst_pct)
    source = replace(profile.source, files=files)
    profile = replace(profile, model=name or profile.model, gpu=gpu or profile.gpu, source=source)
    _save_profile(profile, out, as_json)


def _save_profile(profile: "Profile", out: Path, as_json: bool) -> None:
    from heddle.cli.outputs import write
    from heddle.cli.show_profile import fitted
    from heddle_calibrate.profiles import encode_profile

    write(out, encode_profile(profile))
    if not as_json:
        fitted(profile)
        click.echo(f"profile in {out}: use it as --model {out}")
        return
    errors = {**profile.errors, "tables": {tp: t.errors for tp, t in profile.tables.items()}}
    report = {
        "schema": "heddle.fit/1",
        "profile": str(out),
        "model": profile.model,
        "gpu": profile.gpu,
        "errors": errors,
        "transfer": asdict(profile.transfer),
        "costs": asdict(profile.costs) if profile.costs is not None else None,
    }
    click.echo(json.dumps(report))


@click.command()
@click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...|ROWS.csv..."
)
@click.option(
    "--model",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Profile file [the run's own]; of rows repeated [all shipped]",
)
@settings_option
@ALLOW_POLICY
@JSON
def check(
    paths: tuple[Path, ...],
    files: tuple[Path, ...],
    settings: tuple[str, ...],
    allow_policies: tuple[str, ...],
    as_json: bool,
) -> None:
    """Simulate finished runs on engines again, and print how far off that is.

    Same trace, configuration, policy, seed and context; engines as the profile says. Bounds are
    keys: profile.max_makespan_error, profile.max_p99_error, profile.max_tpot_error,
    profile.min_finish_order and profile.same_ranking.

    Of ROWS.csv, published serving runs (closed loops of clients), it prints the errors of TPOT and
    TTFT by model and GPU class, TP degree and concurrency. profile.max_tpot_error is then of the
    median over groups.
    """
    tables = [path for path in paths if path.suffix == ".csv"]
    bounds = take_settings(settings).profile
    if tables:
        if len(tables) < len(paths):
            raise click.UsageError("check runs or tables of rows (*.csv), not both at once")
        if others := [name for name in OF_RUNS if getattr(bounds, name) not in (None, False)]:
            raise click.UsageError(
                f"profile.{others[0]} is of runs; of rows, profile.max_tpot_error"
            )
        check_rows(tables, files, most_pct=bounds.max_tpot_error, as_json=as_json)
        return
    if len(files) > 1:
        raise click.UsageError("runs are checked against one profile: give --model once")
    _check_runs(paths, files[0] if files else None, bounds, allow_policies, as_json)


def _check_runs(
    runs: Sequence[Path],
    profile: Path | None,
    bounds: "ProfileSettings",
    allow_policies: tuple[str, ...],
    as_json: bool,
) -> None:
    from heddle.calibration.check import check as simulated_again
    from heddle.cli.progress import progress
    from heddle.cli.show import show_lateness
    from heddle.cli.show_profile import checks
    from heddle.runs import load_run
    from heddle_calibrate.check import rankings

    loaded = [load_run(run) for run in runs]
    for run in loaded:
        show_lateness(str(run.path), run.summary)
    checked = []
    with progress("simulate", "runs") as bar:
        for i, run in enumerate(loaded):
            bar.now(run.label)
            bar.at(i, len(loaded))
            checked.append(simulated_again(run, profile, allow_policies=allow_policies))
    ranked = rankings(checked, tie_pct=bounds.tie)
    failed = _failed(checked, ranked, bounds)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "schema": "heddle.check/1",
                    "runs": [each.plain() for each in checked],
                    "rankings": [asdict(each) for each in ranked],
                    "failed": failed,
                },
                allow_nan=False,
            )
        )
    else:
        checks(checked, ranked)
    for line in failed:
        click.echo(f"failed: {line}", err=True)
    if failed:
        raise Exit(FAILED)


def _failed(checked: Any, ranked: Any, bounds: "ProfileSettings") -> list[str]:
    """What is beyond its bound, one line each."""
    found = []
    for option, figure in (
        ("max_makespan_error", "makespan_s"),
        ("max_p99_error", "completion_p99_s"),
        ("max_tpot_error", "tpot_mean_ms"),
    ):
        bound = getattr(bounds, option)
        for each in checked if bound is not None else ():
            error_pct = each.figures[figure].error_pct
            if error_pct is None or abs(error_pct) > bound:
                said = "unknown" if error_pct is None else f"{error_pct:+.1f} %"
                found.append(f"{each.run}: {figure} {said}, allowed {bound:g} %")
    least = bounds.min_finish_order
    found += [
        f"{each.run}: finish order {each.finish_order:.3f}, required {least:g}"
        for each in checked
        if least is not None and each.finish_order is not None and each.finish_order < least
    ]
    if bounds.same_ranking:
        found += [
            f"{r.trace}: measured {' < '.join(r.measured)}, simulated {' < '.join(r.simulated)}"
            for r in ranked
            if r.alike < r.pairs
        ]
        if not ranked:
            found.append("nothing to rank: no trace and cluster has runs of two policies")
    return found
