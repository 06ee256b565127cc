"""The fit of the efficiencies that profiles from a configuration use, and its cross-validation.

    python -m tools.profiles efficiencies --perf ../shared/perf

Reads tables of kernel times, and the shipped profiles of models that are in no table; writes
`efficiencies.json`. Configurations are those of `configs.json`. Each kind of kernel has three
numbers: a launch time, and shares of peak bandwidth and peak arithmetic. They
are fitted on all GPU classes together, and then for each class near that mean; numbers for which a
class has no rows stay at the mean. Errors are of models and of classes that were left out.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from heddle_calibrate.roofline.efficiency import FILE, nearest_key, parent
from heddle_calibrate.roofline.operators import Floats
from tools.profiles.kernel_points import (
    CLASSES,
    PARTS,
    PROFILES,
    Mask,
    Points,
    points,
    read_rows,
)

START = {"elementwise": 2.0, "gemm": 3.0, "experts": 15.0}
"""Launch in microseconds from which a fit begins; other kinds 8."""
START_SHARES = (0.75, 0.6)
THINNED = 3
"""A fit of the cross-validation takes one row of so many; its errors are of all rows left out."""
FREEDOM, CHILD_FREEDOM, CLASS_FREEDOM = 1.0, 0.3, 0.5
"""Standard deviation, as a logarithm, of a number from its start, its parent's and the mean."""
PART_WEIGHT, PREFILL_WEIGHT, PRIOR_WEIGHT = 0.7, 1.0, 0.1


def predicted(p: Points, numbers: Floats, chosen: Any = slice(None)) -> Floats:
    """Seconds of each row's parts; `numbers` are logarithms by key, or by class and key."""
    key = p.key[chosen]
    own = numbers[key] if numbers.ndim == 2 else numbers[p.gpu[chosen], key]
    launch, bandwidth, arithmetic = np.exp(own).T
    each = launch / 1e6 + np.hypot(p.moved_s[chosen] / bandwidth, p.computed_s[chosen] / arithmetic)
    index = p.row[chosen] * len(PARTS) + p.part[chosen]
    total = np.bincount(index, p.count[chosen] * each, minlength=len(PARTS) * len(p.rows))
    return np.asarray(total.reshape(-1, len(PARTS)))


def fit_mean(p: Points, rows: Mask) -> Floats:
    """Fit one set of numbers on the chosen rows of all classes; keys without rows take their
    parent's."""
    start = np.array(
        [[np.log(START.get(k.split()[0], 8.0)), *np.log(START_SHARES)] for k in p.keys]
    )
    index = {key: i for i, key in enumerate(p.keys)}
    parents = [nearest_key(parent(key) or "", index) for key in p.keys]
    above = np.array([index.get(key or "", -1) for key in parents])
    one_arithmetic = p.arithmetic[above] == np.arange(len(p.keys))

    def expected(numbers: Floats) -> Floats:
        wanted = np.where((above >= 0)[:, None], numbers[above], start)
        wanted[one_arithmetic, 2] = start[one_arithmetic, 2]
        return wanted

    freedom = np.where(above >= 0, CHILD_FREEDOM, FREEDOM)[:, None]
    every = np.arange(len(p.keys))
    return _solve(p, rows, start, every, expected, freedom, p.arithmetic)


def fit_classes(p: Points, rows: Mask, mean: Floats) -> Floats:
    """Fit the numbers of each class on its chosen rows, near the mean."""
    classes = []
    gpus = p.rows["gpu"].to_numpy()
    for gpu in CLASSES:
        mine = rows & (gpus == gpu)
        keys = np.unique(p.key[mine[p.row]])
        near = mean[keys]
        own = np.arange(len(p.keys))
        classes.append(_solve(p, mine, mean, keys, partial(_constant, near), CLASS_FREEDOM, own))
    return np.stack(classes)


def _constant(near: Floats, _: Floats) -> Floats:
    return near


def _solve(
    p: Points,
    rows: Mask,
    start: Floats,
    keys: NDArray[np.int64],
    expected: Callable[[Floats], Floats],
    freedom: Any,
    arithmetic: NDArray[np.int64],
) -> Floats:
    """Robust least squares of relative errors, of whole iterations and of their parts.

    Numbers of `keys` are fitted, near what `expected` returns for them; the share of arithmetic of
    each key is that of the key in `arithmetic`.
    """
    chosen = np.flatnonzero(rows[p.row])
    index, true = np.flatnonzero(rows), p.seconds
    decodes = p.decodes[index]
    stated = p.rows[list(PARTS)].to_numpy(np.float64)[index][decodes] / 1e3
    steps = true[index][decodes][:, None]
    weight = np.where(decodes, 1.0, PREFILL_WEIGHT)
    prior = PRIOR_WEIGHT * np.sqrt(len(index) / 300)

    def assembled(values: Floats) -> Floats:
        numbers = start.copy()
        numbers[keys] = values.reshape(-1, 3)
        numbers[:, 2] = numbers[arithmetic, 2]
        return numbers

    def residuals(values: Floats) -> Floats:
        numbers = assembled(values)
        parts = predicted(p, numbers, chosen)[index]
        whole = weight * np.log(parts.sum(axis=1) / true[index])
        each = PART_WEIGHT * np.nan_to_num((parts[decodes] - stated) / steps)
        away = prior * (numbers[keys] - expected(numbers)) / freedom
        return np.concatenate([whole, each.ravel(), away.ravel()])

    most = np.tile([np.log(1e3), 0.0, 0.0], len(keys))
    begin = np.minimum(start[keys].ravel(), most - 1e-3)
    found = least_squares(
        residuals, begin, bounds=(-12.0, most), loss="soft_l1", f_scale=0.1, max_nfev=100
    )
    return assembled(found.x)


# -- errors ----------------------------------------------------------------------------------------


def relative_errors(p: Points, numbers: Floats) -> Floats:
    """Predicted over stated time, less 1."""
    return np.asarray(predicted(p, numbers).sum(axis=1) / p.seconds - 1)


def summary(rows: pd.DataFrame, error: Floats) -> dict[str, Any]:
    """Mean, median and 90th percentile of absolute errors in percent, and means by model."""
    size = pd.Series(np.abs(error) * 100, index=rows.index)
    by_model = size.groupby(rows["model"]).mean().round(1)
    return {
        "mean_pct": round(float(size.mean()), 1),
        "median_pct": round(float(size.median()), 1),
        "p90_pct": round(float(size.quantile(0.9)), 1),
        "points": len(size),
        "by_model_pct": {str(k): float(v) for k, v in by_model.items()},
    }


def without_models(p: Points) -> Floats:
    """Errors of each row under a fit that saw no row of its model, in any precision."""
    model = p.rows["model"].str.replace(r"-(FP8|NVFP4)$", "", regex=True).to_numpy()
    error = np.zeros(len(p.rows))
    for name in dict.fromkeys(model):
        left = model == name
        seen = ~left & _thinned(p)
        error[left] = relative_errors(p, fit_classes(p, seen, fit_mean(p, seen)))[left]
    return error


def without_classes(p: Points) -> Floats:
    """Errors of each row under the mean of a fit that saw no row of its GPU class."""
    gpu = p.rows["gpu"].to_numpy()
    error = np.zeros(len(p.rows))
    for name in CLASSES:
        left = gpu == name
        error[left] = relative_errors(p, fit_mean(p, ~left & _thinned(p)))[left]
    return error


def _thinned(p: Points) -> Mask:
    return np.asarray(np.arange(len(p.rows)) % THINNED == 0)


def cross_validated(p: Points, fitted: Floats) -> dict[str, Any]:
    """Errors by what was left out, apart for decode steps and for prompts."""
    found = {}
    for name, error in (
        ("fitted", relative_errors(p, fitted)),
        ("leave_one_model_out", without_models(p)),
        ("leave_one_class_out", without_classes(p)),
    ):
        d = p.decodes
        by_class = pd.Series(np.abs(error[d]) * 100).groupby(p.rows["gpu"].to_numpy()[d]).mean()
        decode = summary(p.rows[d], error[d])
        decode["by_class_pct"] = {str(k): round(float(v), 1) for k, v in by_class.items()}
        found[name] = {"decode": decode, "prefill": summary(p.rows[~d], error[~d])}
    return found


def efficiency_file(p: Points, mean: Floats, classes: Floats, errors: Mapping[str, Any]) -> str:
    """Format the file; three numbers by key: launch in microseconds, and two shares of the peak."""

    def table(numbers: Floats, seen: NDArray[np.int64]) -> dict[str, list[float]]:
        rows = np.exp(numbers)
        return {p.keys[i]: [float(f"{x:.4g}") for x in rows[i]] for i in seen}

    everywhere = np.arange(len(p.keys))
    values = {
        "source": {
            "package": "aiconfigurator-core",
            "version": "0.12.0",
            "backends": "vLLM 0.24.0 (A100: 0.14.0); FP8 of Qwen3: SGLang 0.5.14",
            "profiles": sorted(PROFILES),
            "models": sorted(set(p.rows["model"])),
        },
        "columns": ["launch_us", "share of peak bandwidth", "share of peak arithmetic"],
        "mean": table(mean, everywhere),
        "classes": {gpu: table(classes[i], everywhere) for i, gpu in enumerate(CLASSES)},
        "errors": errors,
    }
    return json.dumps(values, indent=1) + "\n"


@click.command("efficiencies", help=__doc__)
@click.option("--perf", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=FILE, show_default=False)
def command(perf: Path, out: Path) -> None:
    """Fit, cross-validate, and write the file."""
    p = points(read_rows(perf))
    everything = np.ones(len(p.rows), dtype=np.bool_)
    mean = fit_mean(p, everything)
    classes = fit_classes(p, everything, mean)
    errors = cross_validated(p, classes)
    out.write_text(efficiency_file(p, mean, classes, errors), encoding="utf-8")
    click.echo(json.dumps(errors, indent=1))
