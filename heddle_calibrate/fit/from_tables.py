"""Make profile files from performance tables.

    python -m heddle_calibrate.fit.from_tables --perf DIR --out DIR

Each file and `docs/calibration.md` list the rows of each fit and its errors. The
same tables give the same bytes.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
import numpy as np

from heddle_calibrate.fit.host import (
    MeasuredRun,
    estimate_tables,
    fit_host,
    ground_truth_tables,
    halves,
    measured_errors,
    measured_runs,
)
from heddle_calibrate.fit.kernel_profile import GPUS, GpuTables, ModelSpec, fit_kernels, with_host
from heddle_calibrate.fit.kernel_tables import KernelTables, read_tables
from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_sim.profile_files import Profile, ProfileError

MODELS = {
    "qwen3-8b": ModelSpec(table="Qwen3-8B", vocabulary=151_936, hidden=4096, kv_heads=8),
    "qwen3-14b": ModelSpec(table="Qwen3-14B", vocabulary=151_936, hidden=5120, kv_heads=8),
    "qwen3-32b": ModelSpec(table="Qwen3-32B", vocabulary=151_936, hidden=5120, kv_heads=8),
    "llama-3.1-8b": ModelSpec(table="Llama-3.1-8B", vocabulary=128_256, hidden=4096, kv_heads=8),
    "qwen3-30b-a3b": ModelSpec(
        table="Qwen3-30B-A3B",
        vocabulary=151_936,
        hidden=2048,
        kv_heads=4,
        experts=128,
        active_bytes=6_058_147_840,
    ),
}
MEASURED = ("h100", "h200", "a100", "l40s", "b200", "gb200")
DERIVED = ("h800", "h20")
"""GPU classes without kernel times of their own."""


def _files(card: GpuTables, *, mixed: bool) -> list[str]:
    kinds = ("", "_prefill", "_kv_capacity")
    files = [f"{card.table or 'aiconfigurator_' + card.file}{kind}.csv" for kind in kinds]
    return [*files, "aiconfigurator_mixed_step.csv"] if mixed else files


def _tables(perf: Path, card: GpuTables) -> KernelTables:
    found = read_tables(perf, card.file, files=card.table)
    return found if card.link_factor == 1.0 else found.with_slower_links(card.link_factor)


def fit_tables(perf: Path, version: str = "0.12.0") -> dict[tuple[str, str], Profile]:
    """Fit every model and GPU class of the tables, without host time."""
    fitted: dict[tuple[str, str], Profile] = {}
    shares: list[float] = []
    by_gpu = {gpu: _tables(perf, GPUS[gpu]) for gpu in (*MEASURED, *DERIVED)}
    for mixed in (True, False):
        share = float(np.median(shares)) if shares else None
        for gpu, tables in by_gpu.items():
            for model, spec in MODELS.items():
                if bool((tables.mixed["model"] == spec.table).any()) is not mixed:
                    continue
                layouts = tables.layouts_of(spec.table)
                if not layouts:
                    continue
                one = fit_kernels(
                    tables,
                    (model, gpu),
                    spec,
                    GPU_CLASSES[gpu],
                    version=version,
                    share=share,
                    files=_files(GPUS[gpu], mixed=mixed),
                    layouts=layouts,
                    derived=GPUS[gpu].derived,
                )
                fitted[model, gpu] = one
                if mixed and gpu in MEASURED:
                    bases = [e.decode.base_ms for e in one.tables.values()]
                    shares += [base[0] / base[1] for base in bases]
    return fitted


def make_profiles(perf: Path, version: str = "0.12.0") -> list[Profile]:
    """Fit all profiles: tables first, then host time by replaying the measured runs on them.

    The ground truth takes every second measured run, the estimate the others.
    """
    fitted = fit_tables(perf, version)
    reference = fitted["qwen3-32b", "h100"]
    runs = measured_runs(perf)
    fitted_runs, other_runs = halves(runs)
    host = fit_host(fitted_runs, lambda h, tps: ground_truth_tables(reference, h, tps))
    estimate_host = fit_host(
        other_runs, lambda h, tps: estimate_tables(reference, h, tps), per_prefill=False
    )
    parts: list[tuple[str, Sequence[MeasuredRun]]] = [
        ("fitted", fitted_runs),
        ("unseen", other_runs),
    ]
    measured = measured_errors(parts, ground_truth_tables(reference, host, reference.tps))
    measured["belief_host"] = asdict(estimate_host)
    return [with_host(profile, host, estimate_host, measured) for profile in fitted.values()]


def write_profiles(profiles: Sequence[Profile], out: Path) -> list[Path]:
    """Write one file per profile; return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for p in profiles:
        path = out / f"{p.model}.{p.gpu}.json"
        path.write_bytes(encode_profile(p))
        paths.append(path)
    return paths


@click.command()
@click.option(
    "--perf",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="Folder with the aiconfigurator_*.csv tables and the measured runs.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for the profile files.",
)
def main(perf: Path, out: Path) -> None:
    """Fit latency profiles from performance tables."""
    try:
        paths = write_profiles(make_profiles(perf), out)
    except (OSError, KeyError, ProfileError) as e:
        raise click.ClickException(f"cannot fit from {perf}: {type(e).__name__}: {e}") from e
    for path in paths:
        click.echo(path)


if __name__ == "__main__":
    main()
