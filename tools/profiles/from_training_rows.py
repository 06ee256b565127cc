"""Make the profile of trainers and weight updates from tables of published figures.

    python -m tools.profiles training --training CSV... --updates CSV... [--out FILE]

Prints the errors; the file has them, too. `docs/training-time.md` explains both. A table of other
documents is tried by giving it, too: its rows' unseen errors are of a fit without them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.serving.published_rows import LeftOut, PublishedRowsError
from heddle_sim.training import TrainingProfile
from heddle_sim.training_files import TrainingFile
from heddle_sim.weight_update import WeightUpdateProfile
from tools.profiles.training_fit import RowError, fit_rows, row_errors
from tools.profiles.training_gpus import WITHOUT_ROWS, derived_efficiency
from tools.profiles.training_rows import TrainingRow, read_training_rows
from tools.profiles.update_actor import (
    colocated_pairs,
    read_actor_rows,
    same_batches,
    scaling_errors,
)
from tools.profiles.update_fit import FACTOR, UpdateError, fit_updates, share_within, update_errors
from tools.profiles.update_rows import UpdateRow, further_rows, read_update_rows

TARGET_PCT = {"dense": 10.0, "MoE": 15.0, "FP8": 15.0}
TARGET_UPDATE_SHARE = 0.8
ABOUT = (
    "absolute errors in percent, and share within a factor of 1.5; unseen: the row's document took "
    "no part in the fit"
)
ABOUT_SHARES = (
    "share of updates within a factor of 1.5; row_unseen: that row took no part in the fit, "
    "document_unseen: nor did any of its document"
)


def _digits(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _rounded(by_name: dict[str, float]) -> dict[str, float]:
    return {name: _digits(value) for name, value in by_name.items()}


def _spread(errors: Sequence[float]) -> dict[str, float]:
    sizes = 100 * np.abs(errors)
    return {
        "median": round(float(np.median(sizes)), 1),
        "p90": round(float(np.percentile(sizes, 90)), 1),
        "within": round(share_within([1 + one for one in errors]), 2),
    }


def _figures(errors: Sequence[RowError]) -> dict[str, object]:
    return {
        "rows": len(errors),
        "documents": len({one.row.source for one in errors}),
        "seen": _spread([one.seen for one in errors]),
        "unseen": _spread([one.unseen for one in errors]),
    }


def _groups(errors: Sequence[RowError]) -> dict[str, list[RowError]]:
    """Errors by class (bf16 but for FP8), by its parts, by document; and of rows not fitted."""
    groups: dict[str, list[RowError]] = {name: [] for name in TARGET_PCT}
    parts: dict[str, list[RowError]] = {}
    documents: dict[str, list[RowError]] = {}
    doubtful: dict[str, list[RowError]] = {}
    for one in errors:
        row = one.row
        if row.doubt:
            doubtful.setdefault(f"not fitted: {row.doubt}", []).append(one)
            continue
        groups[row.group if row.precision == "bf16" else "FP8"].append(one)
        use = "RL" if row.use == "rl" else "pretraining, SFT"
        parts.setdefault(f"{row.group}, {row.backend}, {use}", []).append(one)
        documents.setdefault(row.source, []).append(one)
    return {**groups, **dict(sorted(parts.items())), **documents, **doubtful}


def _sources(
    rows: Sequence[TrainingRow] | Sequence[UpdateRow], out: Sequence[LeftOut], paths: Iterable[Path]
) -> dict[str, object]:
    lines: dict[str, list[int]] = {}
    for row in rows:
        lines.setdefault(row.source, []).append(row.line)
    left_out = Counter(one.rule for one in out)
    return {
        "files": [path.name for path in paths],
        "lines": lines,
        "left_out": dict(left_out.most_common()),
    }


def make_training(*paths: Path) -> tuple[TrainingProfile, list[RowError]]:
    """Fit trainers to tables of published steps; return the profile with its errors."""
    rows, out = read_training_rows(*paths)
    actors = read_actor_rows(*paths)
    fitted = fit_rows(rows)
    profile, errors = fitted.profile, row_errors(rows)
    pairs = colocated_pairs(actors, same_batches(*paths))
    scaling = scaling_errors(actors, profile)
    profile = replace(
        profile,
        matmul=_rounded(profile.matmul),
        attention=_rounded(profile.attention),
        low_precision_share=_digits(profile.low_precision_share),
        gpu_efficiency=_rounded(
            {gpu: derived_efficiency(profile, gpu) for gpu in WITHOUT_ROWS}
            | dict(profile.gpu_efficiency)
        ),
        link_efficiency=_digits(profile.link_efficiency),
        expert_layer_s=_digits(profile.expert_layer_s),
        colocated_efficiency={
            backend: _digits(math.exp(sum(map(math.log, found)) / len(found)), 3)
            for backend, found in pairs.items()
        },
        errors={
            "about": ABOUT,
            "target_pct": TARGET_PCT,
            "groups": {name: _figures(of) for name, of in _groups(errors).items() if of},
            "written_s_per_billion": _digits(fitted.written_s_per_billion, 3),
            "scaling_over_gpus_pct": {
                str(line): round(100 * one, 1) for line, one in scaling.items()
            },
            "colocated_pairs": {
                name: [round(one, 2) for one in found] for name, found in pairs.items()
            },
        },
        source=_sources(rows, out, paths),
    )
    return profile, errors


def make_updates(*paths: Path) -> tuple[WeightUpdateProfile, list[UpdateError]]:
    """Fit weight updates to tables of published ones; return the profile with its errors."""
    table, out = read_update_rows(*paths)
    rows = [*table, *further_rows()]
    errors = update_errors(rows)
    methods = {
        name: replace(
            one,
            setup_s=_digits(one.setup_s, 3),
            tensor_s=_digits(one.tensor_s, 3),
            bytes_per_s=_digits(one.bytes_per_s, 3),
        )
        for name, one in fit_updates(rows).methods.items()
    }
    groups = {"all": list(errors), "method in another document": [e for e in errors if e.covered]}
    for one in errors:
        groups.setdefault(one.row.method, []).append(one)
    for one in errors:
        groups.setdefault(one.row.source, []).append(one)
    profile = WeightUpdateProfile(
        methods=methods,
        errors={
            "about": ABOUT_SHARES,
            "target_share": TARGET_UPDATE_SHARE,
            "groups": {name: _shares(of) for name, of in groups.items() if of},
        },
        source=_sources(rows, out, paths),
    )
    return profile, errors


def _shares(errors: Sequence[UpdateError]) -> dict[str, float]:
    return {
        "rows": len(errors),
        "documents": len({one.row.source for one in errors}),
        "seen": round(share_within([one.seen for one in errors]), 2),
        "row_unseen": round(share_within([one.row_unseen for one in errors]), 2),
        "document_unseen": round(share_within([one.source_unseen for one in errors]), 2),
    }


def report(file: TrainingFile) -> list[str]:
    """Lines of the error table of a profile."""
    lines = [
        "training time: absolute error in percent, share within a factor of 1.5",
        f"{'':52}{'':11}{'seen':>8}{'':13}{'unseen':>7}",
        f"{'':52}{'rows':>5}{'docs':>6}{'median':>8}{'P90':>6}{'1.5':>6}{'median':>8}{'P90':>6}"
        f"{'1.5':>6}",
    ]
    for name, one in file.training.errors["groups"].items():
        lines.append(
            f"{_short(name):52}{one['rows']:>5}{one['documents']:>6}"
            + "".join(
                f"{e['median']:>8.0f}{e['p90']:>6.0f}{e['within']:>6.2f}"
                for e in (one["seen"], one["unseen"])
            )
        )
    lines += [
        "",
        f"weight updates: share within a factor of {FACTOR}",
        f"{'':52}{'rows':>5}{'docs':>6}{'seen':>8}{'row':>8}{'document':>10}",
    ]
    for name, one in file.weight_update.errors["groups"].items():
        lines.append(
            f"{_short(name):52}{one['rows']:>5}{one['documents']:>6}{one['seen']:>8.2f}"
            f"{one['row_unseen']:>8.2f}{one['document_unseen']:>10.2f}"
        )
    return lines


def _short(name: str) -> str:
    return name if len(name) <= 50 else f"...{name[-47:]}"


def _row_lines(errors: Sequence[RowError], updates: Sequence[UpdateError]) -> list[str]:
    lines = []
    for step in errors:
        r = step.row
        lines.append(
            f"{r.line:4} {r.group:10} {r.backend:9} {r.model:16} {r.gpu:6} {r.kind:8}"
            f"{100 * step.seen:+8.1f} % {100 * step.unseen:+8.1f} %  {r.source} {r.doubt}"
        )
    lines += [
        f"{one.row.line:4} {one.row.method:18} {one.row.size_bytes / 1e9:8.0f} GB "
        f"{one.row.seconds:8.2f} s  x {one.seen:.2f} {one.row_unseen:.2f} "
        f"{one.source_unseen:.2f}  {one.row.source}"
        for one in updates
    ]
    return lines


CSV = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("training")
@click.option("--training", type=CSV, required=True, multiple=True, help="Published steps.")
@click.option("--updates", type=CSV, required=True, multiple=True, help="Published updates.")
@click.option("--rows", is_flag=True, help="Print the error of each row, or why it has none.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
def command(
    training: tuple[Path, ...], updates: tuple[Path, ...], rows: bool, out: Path | None
) -> None:
    """Fit trainers and weight updates to published figures, and print the errors."""
    try:
        trainers, step_errors = make_training(*training)
        methods, of_updates = make_updates(*updates)
    except PublishedRowsError as e:
        raise click.ClickException(str(e)) from e
    file = TrainingFile(schema="heddle.training/1", training=trainers, weight_update=methods)
    for text in report(file):
        click.echo(text)
    if rows:
        for text in _row_lines(step_errors, of_updates):
            click.echo(text)
        for path in (*training, *updates):
            _, left_out = (read_training_rows if path in training else read_update_rows)(path)
            for each in left_out:
                click.echo(f"{path.name}:{each.line} {each.rule}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(encode_profile(file))
        click.echo(out)
