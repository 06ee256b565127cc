"""`heddle calibrate`: from a real engine to a profile, and from a profile to its error."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from click.exceptions import Exit

from heddle.cli.errors import FAILED
from heddle.cli.options import NumberRange, config_files
from heddle.cli.replay import ALLOW_POLICY
from heddle.cli.serving import serving

if TYPE_CHECKING:
    from heddle.config import RunConfig
    from heddle_calibrate.measure.session import SweepSpec
    from heddle_sim.profile_files import Profile

OUT = click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="File to write"
)
FORCE = click.option("--force", is_flag=True, help="Replace the file if it exists")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")


@click.group()
def calibrate() -> None:
    """Measure an engine, fit a profile to it, and state the profile's error."""


@calibrate.command("measure")
@config_files
@click.option("--engine", type=click.Choice(["vllm", "fake"]), default=None, help="[fake]")
@click.option("--model-dir", default=None, help="Folder of the model that vLLM serves")
@click.option(
    "--model", default=None, help="Name for the profile; with fake engines, their profile"
)
@click.option("--gpu", default=None, help="GPU class of the profile [cpu, without a GPU]")
@click.option("--tp", "tps", default="1", show_default=True, help="TP degrees, as 1,2")
@click.option("--sweep", "size", type=click.Choice(["quick", "small", "full"]), default="small")
@click.option("--max-running", type=int, default=None, help="Largest batch [32; 128 on GPUs]")
@click.option("--max-context", type=int, default=None, help="Longest context [2048; 16384 on GPUs]")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws order and tokens")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key, repeated")
@OUT
@FORCE
def measure_(
    configs: tuple[Path, ...],
    tps: str,
    settings: tuple[str, ...],
    out: Path,
    force: bool,
    **options: Any,
) -> None:
    """Sweep one real engine at a time: decoding, prompts, starts, aborts, and moves between two.

    Takes minutes. Other load on the machine changes the result. A sweep that breaks off is kept
    as far as it got.
    """
    from heddle.calibration.measure import sweep_engines
    from heddle.cli.outputs import new_file, write
    from heddle.cli.progress import progress
    from heddle_calibrate.sweeps import Sweep, encode_sweep

    new_file(out, force)
    config, spec, model = _sweep_spec(configs, tps, settings, options)
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


def _sweep_spec(
    configs: tuple[Path, ...], tps: str, settings: tuple[str, ...], options: dict[str, Any]
) -> "tuple[RunConfig, SweepSpec, str]":
    """Read the options as configuration; what is not given is chosen by the machine."""
    from heddle.calibration.measure import choose_sweep
    from heddle.cli.options import take_config

    given = {
        "runtime__engine": options["engine"],
        "runtime__model_dir": options["model_dir"],
        "seed": options["seed"],
    }
    fake = options["engine"] != "vllm"
    if fake:
        given |= {"cluster__model": options["model"], "cluster__gpu": options["gpu"]}
    # A sweep replays no trace, but is configured as a run that would.
    config, _ = take_config(("(none)",), {"configs": configs}, settings, **given)
    spec, model = choose_sweep(
        config,
        _degrees("--tp", tps),
        size=options["size"],
        model=options["model"],
        gpu=options["gpu"],
        max_running=options["max_running"],
        max_context=options["max_context"],
    )
    return config, spec, model


def _degrees(option: str, text: str) -> tuple[int, ...]:
    from heddle.config_files import ConfigError

    try:
        degrees = tuple(dict.fromkeys(int(tp) for tp in text.split(",")))
    except ValueError:
        degrees = ()
    if not degrees or min(degrees) < 1:
        raise ConfigError(f"{option} {text}: write TP degrees with commas between: 1,2")
    return degrees


@calibrate.command("fit")
@click.argument(
    "sweeps", metavar="SWEEP...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--name", default=None, help="Name of the model in the profile [the sweep's]")
@click.option("--gpu", default=None, help="GPU class in the profile [the sweep's]")
@click.option(
    "--max-error",
    type=NumberRange(0.0),
    default=25.0,
    show_default=True,
    help="Refuse when the fit itself is off by more percent (median)",
)
@OUT
@FORCE
@JSON
def fit_(
    sweeps: tuple[Path, ...],
    name: str | None,
    gpu: str | None,
    max_error: float,
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Fit a profile to a sweep, with its error on the held-out part.

    Several sweeps of the same engine, made at different times, are fitted together: the speed of a
    shared machine drifts, and one sweep knows one hour of it.

    Held out are batches, contexts and prompt lengths between those of the grid, and whole loops of
    clients: no truth is fitted on them.
    """
    from heddle.cli.outputs import new_file
    from heddle_calibrate.fit.from_sweep import fit_sweep
    from heddle_calibrate.sweeps import pooled, read_sweep

    new_file(out, force)
    if out.suffix != ".json":
        raise click.UsageError(f"--out {out}: a profile is named by a path that ends in .json")
    files = tuple(path.name for path in sweeps)
    sweep = pooled({path: read_sweep(path) for path in sweeps})
    profile = fit_sweep(sweep, file=", ".join(files), worst_pct=max_error)
    source = replace(profile.source, files=files)
    profile = replace(profile, model=name or profile.model, gpu=gpu or profile.gpu, source=source)
    _save_profile(profile, out, as_json)


def _save_profile(profile: "Profile", out: Path, as_json: bool) -> None:
    """Write a profile and print its errors."""
    from heddle.cli.outputs import write
    from heddle.cli.show_calibration import fitted
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


@calibrate.command("check")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("--profile", type=click.Path(path_type=Path), default=None, help="[the run's own]")
@click.option(
    "--max-makespan-error", type=NumberRange(0.0), default=None, help="Percent; exit 1 above it"
)
@click.option(
    "--max-p99-error", type=NumberRange(0.0), default=None, help="The same for P99 completion"
)
@click.option("--max-tpot-error", type=NumberRange(0.0), default=None, help="The same for TPOT")
@click.option(
    "--min-finish-order",
    type=NumberRange(-1.0, 1.0),
    default=None,
    help="Rank correlation; 1 below it",
)
@click.option("--same-ranking", is_flag=True, help="Exit 1 unless policies are ranked alike")
@click.option(
    "--tie", type=NumberRange(0.0), default=1.0, show_default=True, help="Percent that rank nothing"
)
@ALLOW_POLICY
@JSON
def check_(
    runs: tuple[Path, ...],
    profile: Path | None,
    tie: float,
    allow_policies: tuple[str, ...],
    as_json: bool,
    **bounds: Any,
) -> None:
    """Simulate finished runs on engines again, and print how far off that is.

    Same trace, configuration, policy, seed and context; engines as the profile says.
    """
    from heddle.calibration.check import check
    from heddle.cli.progress import progress
    from heddle.cli.show import show_lateness
    from heddle.cli.show_calibration import checks
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
            checked.append(check(run, profile, allow_policies=allow_policies))
    ranked = rankings(checked, tie_pct=tie)
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


def _failed(checked: Any, ranked: Any, bounds: dict[str, Any]) -> list[str]:
    """What is beyond its bound, one line each."""
    found = []
    for option, figure in (
        ("max_makespan_error", "makespan_s"),
        ("max_p99_error", "completion_p99_s"),
        ("max_tpot_error", "tpot_mean_ms"),
    ):
        bound = bounds[option]
        for each in checked if bound is not None else ():
            error_pct = each.figures[figure].error_pct
            if error_pct is None or abs(error_pct) > bound:
                said = "unknown" if error_pct is None else f"{error_pct:+.1f} %"
                found.append(f"{each.run}: {figure} {said}, allowed {bound:g} %")
    least = bounds["min_finish_order"]
    found += [
        f"{each.run}: finish order {each.finish_order:.3f}, required {least:g}"
        for each in checked
        if least is not None and each.finish_order is not None and each.finish_order < least
    ]
    if bounds["same_ranking"]:
        found += [
            f"{r.trace}: measured {' < '.join(r.measured)}, simulated {' < '.join(r.simulated)}"
            for r in ranked
            if r.alike < r.pairs
        ]
        if not ranked:
            found.append("nothing to rank: no trace and cluster has runs of two policies")
    return found


calibrate.add_command(serving)
