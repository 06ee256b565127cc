"""Make the profile of trainers and weight updates from tables of published figures.

    python -m tools.profiles training --training CSV --updates CSV [--out FILE]

Prints the errors; the file has them, too. `docs/training-time.md` explains both.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.serving.published_rows import LeftOut, PublishedRowsError
from heddle_sim.training import TrainingProfile
from heddle_sim.training_files import TrainingFile
from heddle_sim.weight_update import WeightUpdateProfile
from tools.profiles.training_fit import RowError, fit_rows, mean_error, row_errors
from tools.profiles.training_rows import (
    TrainingRow,
    doubtful_documents,
    is_doubtful,
    read_training_rows,
)
from tools.profiles.update_actor import colocated_pairs, read_actor_rows, scaling_errors
from tools.profiles.update_fit import UpdateError, fit_updates, share_within, update_errors
from tools.profiles.update_rows import UpdateRow, delta_rows, read_update_rows

TARGET_STEP_PCT, TARGET_UPDATE_SHARE = 10.0, 0.8
ABOUT = "mean absolute error in percent; unseen: the row's document took no part in the fit"
ABOUT_SHARES = (
    "share of updates within a factor of 1.5; row_unseen: that row took no part in the fit, "
    "document_unseen: nor did any of its document"
)


def _digits(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def _rounded(by_name: dict[str, float]) -> dict[str, float]:
    return {name: _digits(value) for name, value in by_name.items()}


def _percent(errors: Sequence[RowError]) -> dict[str, float]:
    return {
        "rows": len(errors),
        "documents": len({one.row.source for one in errors}),
        "seen": round(100 * mean_error(errors, unseen=False), 1),
        "unseen": round(100 * mean_error(errors, unseen=True), 1),
    }


def _groups(rows: Sequence[TrainingRow], errors: Sequence[RowError]) -> dict[str, list[RowError]]:
    """Errors by class of rows; doubtful rows apart, the classes of RL first."""
    doubtful = doubtful_documents(rows)
    groups: dict[str, list[RowError]] = {}
    for one in sorted(errors, key=lambda e: (is_doubtful(e.row, doubtful), e.row.use != "rl")):
        name = one.row.group + (", not fitted" if is_doubtful(one.row, doubtful) else "")
        groups.setdefault(name, []).append(one)
    return groups


def _variants(rows: Sequence[TrainingRow]) -> dict[str, dict[str, float]]:
    """Errors on dense RL rows of fits with and without the sources of the pitfalls."""
    doubtful = doubtful_documents(rows)

    def dense(errors: Sequence[RowError]) -> dict[str, float]:
        kept = [e for e in errors if e.row.use == "rl" and e.row.group.startswith("dense")]
        plain = [e for e in kept if not is_doubtful(e.row, doubtful)]
        found = _percent(plain)
        if len(plain) < len(kept):
            others = [e for e in kept if is_doubtful(e.row, doubtful)]
            found["not_fitted_seen"] = _percent(others)["seen"]
        return found

    return {
        "shipped": dense(row_errors(rows)),
        "with the RL rows of doubtful documents": dense(row_errors(rows, doubtful=True)),
        "without SFT and pretraining": dense(
            row_errors([r for r in rows if r.use == "rl" and r.source not in doubtful])
        ),
        "without rows that give an MFU only": dense(row_errors([r for r in rows if r.seconds])),
    }


def _sources(
    path: Path, rows: Sequence[TrainingRow] | Sequence[UpdateRow], out: Sequence[LeftOut]
) -> dict[str, object]:
    lines: dict[str, list[int]] = {}
    for row in rows:
        lines.setdefault(row.source, []).append(row.line)
    left_out = Counter(one.rule for one in out)
    return {"file": path.name, "lines": lines, "left_out": dict(left_out.most_common())}


def make_training(path: Path) -> tuple[TrainingProfile, list[RowError]]:
    """Fit trainers to a table of published steps; return the profile with its errors."""
    rows, out = read_training_rows(path)
    actors = read_actor_rows(path)
    fitted = fit_rows(rows)
    errors = row_errors(rows)
    pairs = colocated_pairs(actors)
    scaling = scaling_errors(actors, fitted)
    colocated = {
        backend: _digits(math.exp(sum(map(math.log, found)) / len(found)), 3)
        for backend, found in pairs.items()
    }
    profile = replace(
        fitted,
        mfu={backend: _rounded(row) for backend, row in fitted.mfu.items()},
        gpu_efficiency=_rounded(fitted.gpu_efficiency),
        forward_speedup=_rounded(fitted.forward_speedup),
        fixed_s_per_billion=_rounded(fitted.fixed_s_per_billion),
        colocated_efficiency=colocated,
        errors={
            "about": ABOUT,
            "target_pct": TARGET_STEP_PCT,
            "groups": {name: _percent(of) for name, of in _groups(rows, errors).items()},
            "variants_dense_rl": _variants(rows),
            "scaling_over_gpus_pct": {
                str(line): round(100 * one, 1) for line, one in scaling.items()
            },
            "colocated_pairs": {
                name: [round(one, 2) for one in found] for name, found in pairs.items()
            },
        },
        source=_sources(path, rows, out),
    )
    return profile, errors


def make_updates(path: Path) -> tuple[WeightUpdateProfile, list[UpdateError]]:
    """Fit weight updates to a table of published ones; return the profile with its errors."""
    table, out = read_update_rows(path)
    rows = [*table, *delta_rows()]
    fitted = fit_updates(rows)
    errors = update_errors(rows)
    methods = {
        name: replace(
            one,
            setup_s=_digits(one.setup_s, 3),
            prepare_bytes_per_s=_digits(one.prepare_bytes_per_s, 3),
            gpu_exponent=_digits(one.gpu_exponent, 3),
        )
        for name, one in fitted.methods.items()
    }
    groups = {"all": list(errors)}
    for one in errors:
        groups.setdefault(one.row.method, []).append(one)
    groups["document_unseen, method covered elsewhere"] = [e for e in errors if e.covered]
    profile = WeightUpdateProfile(
        methods=methods,
        errors={
            "about": ABOUT_SHARES,
            "target_share": TARGET_UPDATE_SHARE,
            "groups": {name: _shares(of) for name, of in groups.items() if of},
        },
        source=_sources(path, rows, out),
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
    head = f"{'':52}{'rows':>5}{'docs':>6}{'seen':>8}{'unseen':>8}"
    lines = ["training time, mean absolute error in percent", head]
    for name, one in file.training.errors["groups"].items():
        lines.append(_line(name, one, one["seen"], one["unseen"]))
    lines += ["", "dense RL rows, by what is fitted", head]
    for name, one in file.training.errors["variants_dense_rl"].items():
        lines.append(_line(name, one, one["seen"], one["unseen"]))
    lines += [
        "",
        "weight updates, share within a factor of 1.5",
        f"{'':52}{'rows':>5}{'docs':>6}{'seen':>8}{'row':>8}{'document':>10}",
    ]
    for name, one in file.weight_update.errors["groups"].items():
        lines.append(
            _line(name, one, one["seen"], one["row_unseen"]) + f"{one['document_unseen']:>10}"
        )
    return lines


def _line(name: str, counts: dict[str, float], first: float, second: float) -> str:
    return f"{name:52}{counts['rows']:>5}{counts['documents']:>6}{first:>8}{second:>8}"


CSV = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("training")
@click.option("--training", type=CSV, required=True, help="Table of published training steps.")
@click.option("--updates", type=CSV, required=True, help="Table of published weight updates.")
@click.option("--rows", is_flag=True, help="Print the error of each row, too.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
def command(training: Path, updates: Path, rows: bool, out: Path | None) -> None:
    """Fit trainers and weight updates to published figures, and print the errors."""
    try:
        trainers, step_errors = make_training(training)
        methods, of_updates = make_updates(updates)
    except PublishedRowsError as e:
        raise click.ClickException(str(e)) from e
    file = TrainingFile(schema="heddle.training/1", training=trainers, weight_update=methods)
    for text in report(file):
        click.echo(text)
    if rows:
        for step in step_errors:
            r = step.row
            click.echo(
                f"{r.line:4} {r.group:32} {r.model:16} {r.gpu:6} {r.kind:8}"
                f"{100 * step.seen:+8.1f} % {100 * step.unseen:+8.1f} %"
            )
        for one in of_updates:
            click.echo(
                f"{one.row.line:4} {one.row.method:18} {one.row.size_bytes / 1e9:8.0f} GB "
                f"{one.row.seconds:8.2f} s  x {one.seen:.2f} {one.row_unseen:.2f} "
                f"{one.source_unseen:.2f}"
            )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(encode_profile(file))
        click.echo(out)
