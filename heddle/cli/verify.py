"""`heddle verify`: what ran is simulated, and put beside what was measured."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import rich_click as click

from heddle.cli.diagnose import read_steps
from heddle.cli.logs import rules_of
from heddle.cli.options import config_files, given_keys, settings_option, take_config
from heddle.config_error import ConfigError

if TYPE_CHECKING:
    from heddle.command_config import Config
    from heddle.diagnosis.again import Ran
    from heddle.diagnosis.beside import Verified
    from heddle.diagnosis.fitted import FittedConstants
    from heddle_trace.observed.columns import ObservedSteps

USUAL: Final = {"missing.tool_s": "zero"}
"""What took no recorded time takes none in simulation either, and is a difference."""


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="LOGS...|RUN")
@config_files
@settings_option
@click.option(
    "--fit", is_flag=True, help="Fit two constants on half of the groups; judge on the others"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def verify(
    sources: tuple[str, ...],
    configs: tuple[Path, ...],
    settings: tuple[str, ...],
    fit: bool,
    as_json: bool,
) -> None:
    """Say how far a prediction of what ran is off, by part, and the likely cause.

    A RUN is a run directory of Heddle's, which knows what ran; cluster.model names another profile
    for it. LOGS are measured steps with tokens and one clock, as `heddle diagnose` reads them: what
    ran is [cluster] and policy.preset. Engines that LOGS name are counted where cluster.gpus is
    not stated, and metrics beside them say the slots where cluster.max_running is not. Where LOGS
    record decode apart, its sum is an input: the speed of engines. All else is predicted.

    --fit takes host seconds of an iteration and a factor on kernel times from half of the groups of
    trajectories, and states the errors on the other half.
    """
    from heddle.cli.progress import progress
    from heddle.cli.tables import show_verdict
    from heddle.diagnosis.beside import beside
    from heddle.diagnosis.fitted import Constants, FittedConstants, at_measured_speed
    from heddle.diagnosis.fitted import fit as fitted_to

    given = given_keys({"configs": configs}, settings)
    config, _ = take_config(sources, {"configs": configs}, settings, usual=USUAL, logs=True)
    ran = _ran(sources, config, given)
    fitted: FittedConstants | None = None
    with progress("simulating what ran") as bar:
        simulated = ran.simulate(Constants().adjusted)
        found = beside(ran, simulated)
        if ran.speed_measured:
            speed, at_speed = at_measured_speed(ran, simulated)
            if speed != Constants():
                found = replace(beside(ran, at_speed), kernel=speed.kernel, by_profile=found)
        if fit:
            fitted = fitted_to(ran, simulated, lambda at: bar.now(f"fitting, round {at + 1}"))
    if as_json:
        click.echo(json.dumps(found.plain(fitted), allow_nan=False))
        return
    show_verdict(found.sentence)
    _show(found)
    if fitted is not None:
        _show_fit(fitted)


def _ran(sources: Sequence[str], config: "Config", given: set[str]) -> "Ran":
    from heddle.diagnosis.again import of_run, of_steps
    from heddle.diagnosis.own_runs import own_run
    from heddle.policies.plugins import foreign_names
    from heddle_trace import Trace
    from heddle_trace.observed.records import records_of

    run = own_run(sources, "verified")
    if run is not None:
        profile = Path(config.cluster.model) if "cluster.model" in given else None
        return of_run(run, profile, foreign_names(config.policy.preset, ()))
    steps, name = read_steps(sources, config.logs)
    config = _stated(config, given, steps)
    task = config.logs.workload or "agent"
    if records := records_of(steps, task):
        rules = rules_of(Trace("measured", records, ""), config.missing)
        config = replace(config, missing=rules)
    return of_steps(steps, config, task, name)


def _stated(config: "Config", given: set[str], steps: "ObservedSteps") -> "Config":
    """The cluster that ran: as stated, and as the engines show.

    Raises:
        ConfigError: nothing of it is stated.
    """
    if not any(key.startswith("cluster.") for key in given):
        raise ConfigError(
            "no cluster is stated, so what ran is unknown: write [cluster] (model, gpu, gpus, tp, "
            "max_running) and policy.preset into heddle.toml, or give --set cluster.gpus=8 ..."
        )
    cluster, seen = config.cluster, steps.engines or steps.requests
    engines = len(seen["engine"].occurring()) if "engine" in seen else 0
    if engines and not given & {"cluster.gpus", "cluster.engines"}:
        cluster = replace(cluster, gpus=engines * cluster.tp)
        click.echo(f"{engines} engines in the logs: {cluster.gpus} GPUs", err=True)
    if steps.engines and "cluster.max_running" not in given:
        full = steps.engines["running"].values[steps.engines["waiting"].values > 0]
        if len(full):
            cluster = replace(cluster, max_running=int(full.max()))
            click.echo(f"{cluster.max_running} slots of an engine, by its metrics", err=True)
    return replace(config, cluster=cluster)


def _show(found: "Verified") -> None:
    from heddle.cli.tables import fact, show_rows

    total_s = max(found.measured_s, found.simulated_s) or 1.0
    whole = ("all", found.measured_s, found.simulated_s, found.simulated_s - found.measured_s)
    parts = [(p.part, p.measured_s, p.simulated_s, p.difference_s) for p in found.parts]
    click.echo()
    show_rows(
        [
            {
                "part": name,
                "measured s": f"{mine:,.1f}",
                "simulated s": f"{theirs:,.1f}",
                "difference s": f"{gap:+,.1f}",
            }
            for name, mine, theirs, gap in (*parts, whole)
            if max(mine, theirs) >= 0.0005 * total_s
        ]
    )
    click.echo()
    show_rows(
        [
            {
                "figure": name,
                "measured": f"{each.measured:,.3f}",
                "simulated": f"{each.simulated:,.3f}",
                "difference": _difference(name, each.error_pct),
            }
            for name, each in found.figures.items()
            if each.measured is not None and each.simulated is not None
        ]
    )
    click.echo()
    fact("source", found.source)
    ran = found.ran
    pools = " + ".join(f"{e['gpus']} x {e['gpu']} at TP {e['tp']}" for e in ran["engines"])
    if found.by_profile is not None:
        speed = f"kernel times x {found.kernel:.3f}: decode takes as long, in all, as was measured"
        fact("input", f"{speed}, so mean TPOT is no prediction")
        fact("profile", f"without it, {found.by_profile.sentence}")
    fact("ran", f"{ran['policy']} on {pools}, {ran['model']}, {ran['max_running']} slots")


def _difference(name: str, error_pct: float | None) -> str:
    if error_pct is None:
        return "-"
    return f"{error_pct:+.1f} {'points' if name == 'prefix_hit' else '%'}"


def _show_fit(fitted: "FittedConstants") -> None:
    from heddle.cli.tables import fact

    before, after = (
        " and ".join(
            f"{each[key]:+.1f} % of {what}"
            for key, what in (("duration_pct", "a trajectory's time"), ("makespan_pct", "the last"))
        )
        for each in (fitted.before, fitted.after)
    )
    found = fitted.constants
    fact(
        "fit",
        f"kernel times x {found.kernel:.3f}, {found.host_s * 1e3:+.2f} ms an iteration, from "
        f"{fitted.fitted_on:,} trajectories. On the other {fitted.judged_on:,}: {before} before, "
        f"{after} after",
    )
