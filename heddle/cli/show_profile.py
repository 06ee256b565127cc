"""Profiles as text: shipped ones, those made from a configuration or a sweep, and their errors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import rich_click as click

from heddle.cli.profile_line import KINDS, decode_error, error_class, measured_runs
from heddle.cli.tables import new_table, show
from heddle.runs.conditions import BUSY
from heddle_calibrate.roofline.from_config import ConfigProfile
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.kv_precision import KV_NAMES, kv_dtype_of
from heddle_calibrate.roofline.memory import weight_bytes_per_gpu
from heddle_calibrate.roofline.operators import decode_iterations, prefill_iterations
from heddle_calibrate.roofline.profile import error_statement, step_seconds
from heddle_calibrate.roofline.slower_layouts import (
    BATCHES,
    CONTEXT,
    PROMPT,
    shown_seconds,
    slower_layouts,
)
from heddle_core.ids import EngineShape
from heddle_sim.model_shape import count_parameters
from heddle_sim.profile_files import (
    Profile,
    known_profiles,
    layout_name,
    load_profile,
    read_layout,
)
from heddle_sim.profile_parts import release

if TYPE_CHECKING:
    from heddle_calibrate.check import Checked, Ranking

PARTS = {
    "decode_fitted": "decode, fitted",
    "decode_unseen": "decode, held out",
    "prefill_fitted": "prompts, fitted",
    "prefill_unseen": "prompts alone, held out",
    "prefill": "prompts alone",
    "mixed_unseen": "prompts beside decoding, held out",
    "mixed": "prompts beside decoding",
    "belief_unseen": "cost estimate, on the fitted",
    "repeats": "repeats, against their median",
}
"""Errors of a table in the order of interest."""


def show_profiles(profiles: Sequence[Profile]) -> None:
    """One row for each model, with its GPU classes."""
    classes: dict[tuple[str, str], list[str]] = {}
    for p in profiles:
        classes.setdefault((p.model, p.source.precision), []).append(p.gpu_label)
    table = new_table("model", "precision", "GPU classes")
    for (model, precision), gpus in classes.items():
        table.add_row(model, precision, ", ".join(gpus))
    show(table)
    click.echo(
        "one of them: heddle profile show MODEL GPU; "
        "any other model: heddle profile from-config CONFIG.json --gpu GPU -o FILE.json"
    )


def show_profile(profile: Profile) -> None:
    """Source, memory and times of each layout, and the errors of the fit."""
    fitted(profile)
    iterations(profile)
    click.echo(
        f"KV in {kv_dtype_of(profile) or 'an unstated precision'}: "
        f"{profile.kv_bytes_per_token:,} bytes a token"
    )
    runs, off = measured_runs(profile), decode_error(profile, profile.tps[0])
    if runs:
        times = KINDS.get(profile.source.package, "kernel tables")
        click.echo(f"error class: measured, {runs}; {times}{off}")
    else:
        click.echo(f"error class: {error_class(profile)}{off}")
        click.echo("no measured runs of this model on this GPU class")
    if profile.derived:
        click.echo(f"{profile.gpu_label}: {profile.derived}")
    if profile.source.note:
        click.echo(f"note: {profile.source.note}")
    host = profile.host
    click.echo(
        f"host time {host.per_step_s * 1e3:.3f} ms a step, {host.per_running_s * 1e3:.3f} ms a "
        f"running sequence, {host.per_prefill_s * 1e3:.3f} ms a prompt in prefill and step, "
        f"measured on {host.measured_on}"
    )
    known = {v: each for v, each in (profile.host_versions or {}).items() if release(v)}
    if known:
        each = ", ".join(f"{v} {times.per_step_s * 1e3:.3f} ms" for v, times in known.items())
        click.echo(f"host time of a step by release: {each}; another takes the nearest of them")
    for line in slower_lines(profile):
        click.echo(line)


def slower_lines(profile: Profile) -> list[str]:
    """Name the layouts that are slower than on lesser classes, for each such class."""
    known = [names for names in known_profiles() if names[0] == profile.model]
    others = [load_profile(*names) for names in known if names[1] != profile.gpu]
    lines = []
    for gpu, layouts in slower_layouts(profile, others).items():
        each = ", ".join(f"TP {name} {more * 100:.0f} %" for name, more in layouts.items())
        lines.append(
            f"slower than {gpu} by up to: {each}. No figure of the data sheets explains it: it is "
            "in the kernel times of the source, or in measured runs that one class alone has"
        )
    return lines


def iterations(profile: Profile, weights_gb: Mapping[str, float] = MappingProxyType({})) -> None:
    """One row for each layout; times include the host's.

    `weights_gb` has the gigabytes of weights on a GPU, by layout.
    """
    weights = ["weights GB/GPU"] if weights_gb else []
    table = new_table(
        "layout",
        *weights,
        "KV tokens",
        *(f"batch {b} at {CONTEXT // 1024}K, ms" for b in BATCHES),
        f"prompt of {PROMPT}, ms",
    )
    for shape, name in layouts(profile):
        laid_out = replace(profile, expert_parallel=shape.ep > 1, attention_dp=shape.dp)
        capacity = laid_out.table(shape.tp, max_batch=1).kv_capacity_tokens
        *steps, prompt = shown_seconds(profile, name)
        gigabytes = [f"{weights_gb[name]:.1f}"] if weights_gb else []
        table.add_row(
            name,
            *gigabytes,
            f"{capacity:,}",
            *(f"{s * 1e3:.2f}" for s in steps),
            f"{prompt * 1e3:.1f}",
        )
    show(table)
    if any(shape.dp > 1 for shape, _ in layouts(profile)):
        click.echo("batches are of each attention data-parallel rank")


def layouts(profile: Profile) -> list[tuple[EngineShape, str]]:
    """Return the engine shape of each layout of a profile, and its name."""
    found = []
    for name in profile.tables:
        tp, dp, ep = read_layout(name)
        found.append((EngineShape(profile.gpu, tp, dp=dp, ep=ep), name))
    return found


def fitted(profile: Profile) -> None:
    """Errors of each layout, then of the loops, then what was measured beside."""
    click.echo(profile.summary)
    table = new_table("errors in percent", "TP", "median", "worst", "points")
    for layout, entry in profile.tables.items():
        for name, said in PARTS.items():
            e = entry.errors.get(name, {})
            if e.get("points"):
                cells = (f"{e['median_pct']:g}", f"{e['worst_pct']:g}", str(e["points"]))
                table.add_row(said, layout, *cells)
    show(table)
    loops = profile.errors.get("measured", {}).get("loops", [])
    if loops:
        table = new_table("loops, held out", "TP", "makespan", "TPOT", "TTFT")
        for loop in loops:
            table.add_row(
                f"{loop['clients']} clients",
                str(loop["tp"]),
                *(f"{loop[f'{name}_pct']:+.1f}" for name in ("makespan", "tpot", "ttft")),
            )
        show(table)
    for line in _beside(profile):
        click.echo(line)


def _beside(profile: Profile) -> list[str]:
    costs = profile.costs
    if costs is None:
        return []
    lines = [
        f"driver's path {costs.dispatch_s * 1e3:.1f} ms a dispatch; transfer "
        f"{profile.transfer.fixed_s:.3f} s + bytes / {profile.transfer.bytes_per_s:.3g} per s"
    ]
    lines += [
        f"TP {tp}: starts in {life.start_s:.1f} s, stops in {life.stop_s:.1f} s"
        for tp, life in costs.engines.items()
    ]
    if costs.beside is not None:
        lines.append(
            f"beside another engine at work an iteration takes {costs.beside:.2f} times as long"
        )
    drift = profile.errors.get("drift_pct")
    if drift is not None:
        lines.append(f"drift over the sweep {drift:+.1f} %")
    return lines


def checks(checked: "Sequence[Checked]", ranked: "Sequence[Ranking]") -> None:
    """One row for each figure of each run, then the order of policies."""
    table = new_table("run", "figure", "measured", "simulated", "error")
    for each in checked:
        name = f"{each.policy} s{each.seed} {each.trace}"
        for figure, f in each.figures.items():
            unit = " pt" if figure == "prefix_hit" else " %"
            error = "-" if f.error_pct is None else f"{f.error_pct:+.1f}{unit}"
            table.add_row(
                name, figure, _four_figures(f.measured), _four_figures(f.simulated), error
            )
            name = ""
        order = "-" if each.finish_order is None else f"{each.finish_order:.3f}"
        table.add_row("", "finish_order", "", order, "")
        if each.other_cpu_share is not None:
            table.add_row("", "others' CPU", f"{each.other_cpu_share:.0%}", "", "")
    show(table)
    busy = sum((each.other_cpu_share or 0.0) > BUSY for each in checked)
    if busy:
        click.echo(
            f"The machine was busy with other processes in {busy} of {len(checked)} runs: their "
            "errors are not those of the profile alone"
        )
    for ranking in ranked:
        spread = ranking.spread_pct
        repeats = "no repeats" if spread is None else f"repeats within {spread:.1f} %"
        click.echo(
            f"{ranking.trace}: measured {' < '.join(ranking.measured)}; simulated "
            f"{' < '.join(ranking.simulated)}; {ranking.alike} of {ranking.pairs} pairs alike "
            f"({repeats})"
        )


def _four_figures(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def show_config_profile(made: ConfigProfile) -> None:
    """What a profile from a configuration holds, what its times consist of, and its error."""
    profile, model = made.profile, made.shape
    p = count_parameters(model)
    click.echo(profile.summary)
    of_them = f", {p.active / 1e9:.2f} billion active" if model.experts is not None else ""
    click.echo(
        f"{p.total / 1e9:.2f} billion parameters{of_them}; "
        f"{profile.kv_bytes_per_token:,} bytes of KV per token"
    )
    iterations(
        profile,
        {name: weight_bytes_per_gpu(model, shape) / 1e9 for shape, name in layouts(profile)},
    )
    _operators(made)
    for name, why in profile.refused.items():
        click.echo(f"no TP {name}: {why}")
    for note in model.notes:
        click.echo(f"note: {note}")
    for line in error_lines(made):
        click.echo(line)


def error_lines(made: ConfigProfile) -> list[str]:
    """State where the times come from and how far off they are."""
    if made.source == "aiconfigurator":
        return ["kernel times of AIConfigurator (profile.source = roofline for the roofline)"]
    e = error_statement(made.profile.gpu)
    on_class = f", {e.class_pct:g} % on this class" if e.class_pct is not None else ""
    which = (
        "models that were left out of the fit"
        if e.left_out == "model"
        else f"GPU classes that were left out of the fit, as {made.profile.gpu} has no tables"
    )
    lines = [
        f"error of a decode step, cross-validated on {which}: mean {e.mean_pct:g} %{on_class}, "
        f"median {e.median_pct:g} %, 90th percentile {e.p90_pct:g} %; host time apart",
        f"error of a prompt alone, likewise, over all classes: mean {e.prompt_mean_pct:g} %, "
        f"median {e.prompt_median_pct:g} %, 90th percentile {e.prompt_p90_pct:g} %",
    ]
    if made.why:
        lines.append(f"kernel times of AIConfigurator come first, but: {made.why}")
    return lines


def operator_shares(made: ConfigProfile) -> dict[str, dict[str, float]]:
    """Share of each operator in the roofline's time of an iteration, at the first layout."""
    if made.source != "roofline":
        return {}
    shape = made.profile.shape(made.profile.tps[0])
    gpu = GPU_CLASSES[made.profile.gpu]
    found = {}
    works = {
        f"batch {b} at {CONTEXT // 1024}K": decode_iterations(
            np.array([float(b)]), np.array([float(CONTEXT)])
        )
        for b in BATCHES
    }
    works[f"prompt of {PROMPT}"] = prefill_iterations(np.array([float(PROMPT)]), np.zeros(1))
    for name, work in works.items():
        times = {
            operator: float(s[0])
            for operator, s in step_seconds(made.shape, shape, gpu, work).items()
        }
        total = sum(times.values())
        found[name] = {operator: s / total for operator, s in times.items()}
    return found


def _operators(made: ConfigProfile) -> None:
    shares = operator_shares(made)
    if not shares:
        return
    first = layout_name(made.profile.shape(made.profile.tps[0]))
    table = new_table(f"operators at TP {first}", *shares)
    for operator in dict.fromkeys(name for each in shares.values() for name in each):
        table.add_row(
            operator, *(f"{each.get(operator, 0.0) * 100:.1f} %" for each in shares.values())
        )
    show(table)


def plain_config_profile(made: ConfigProfile) -> dict[str, Any]:
    """Return the same as plain values."""
    profile, model = made.profile, made.shape
    p = count_parameters(model)
    return {
        "schema": "heddle.from-config/1",
        "model": profile.model,
        "gpu": profile.gpu,
        "source": made.source,
        "precision": profile.source.precision,
        "kv_precision": KV_NAMES[model.kv_element_bytes],
        "parameters": p.total,
        "active_parameters": p.active,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "kv_capacity_tokens": {name: t.kv_capacity_tokens for name, t in profile.tables.items()},
        "refused": profile.refused,
        "operators": operator_shares(made),
        "errors": profile.errors,
        "notes": list(model.notes),
    }
