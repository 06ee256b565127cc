"""Shipped profiles as text: their source, memory and times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import rich_click as click

from heddle.cli.profile_line import measured_runs
from heddle.cli.show import new_table, show
from heddle.cli.show_calibration import fitted
from heddle_calibrate.roofline.slower_layouts import (
    BATCHES,
    CONTEXT,
    PROMPT,
    shown_seconds,
    slower_layouts,
)
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, known_profiles, load_profile, read_layout


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
    click.echo(measured_runs(profile) or "no measured runs of this model on this GPU class")
    if profile.derived:
        click.echo(f"{profile.gpu_label}: {profile.derived}")
    if profile.source.note:
        click.echo(f"note: {profile.source.note}")
    host = profile.host
    click.echo(
        f"host time {host.per_step_s * 1e3:.3f} ms a step, {host.per_running_s * 1e3:.3f} ms a "
        f"running sequence, measured on {host.measured_on}"
    )
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
