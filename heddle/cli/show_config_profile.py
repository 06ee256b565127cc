"""Profiles that were made from a configuration, as text: what their times consist of."""

from typing import Any

import numpy as np
import rich_click as click

from heddle.cli.show import new_table, show
from heddle.cli.show_profile import iterations, layouts
from heddle_calibrate.roofline.from_config import ConfigProfile
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.memory import count_parameters, weight_bytes_per_gpu
from heddle_calibrate.roofline.operators import decode_iterations, prefill_iterations
from heddle_calibrate.roofline.profile import error_statement, step_seconds
from heddle_calibrate.roofline.slower_layouts import BATCHES, CONTEXT, PROMPT
from heddle_sim.profile_files import layout_name


def show_config_profile(made: ConfigProfile) -> None:
    """What a profile from a configuration holds, what its times consist of, and its error."""
    profile, model = made.profile, made.shape
    p = count_parameters(model)
    active = p.total - p.experts + p.active_experts
    click.echo(profile.summary)
    of_them = f", {active / 1e9:.2f} billion active" if model.experts is not None else ""
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
        return ["kernel times of AIConfigurator (--source roofline for the roofline)"]
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
        "parameters": p.total,
        "active_parameters": p.total - p.experts + p.active_experts,
        "kv_bytes_per_token": profile.kv_bytes_per_token,
        "kv_capacity_tokens": {name: t.kv_capacity_tokens for name, t in profile.tables.items()},
        "refused": profile.refused,
        "operators": operator_shares(made),
        "errors": profile.errors,
        "notes": list(model.notes),
    }
