"""Make profile files from performance tables.

    python -m tools.profiles from-tables --perf DIR --out DIR

Each file and `docs/profiles.md` list the rows of each fit and its errors. The
same tables give the same bytes.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from heddle_calibrate.fit.kernel_profile import GPUS, GpuTables, ModelSpec, fit_kernels, with_host
from heddle_calibrate.fit.kernel_tables import KernelTables
from heddle_calibrate.profiles import encode_profile
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.memory import MEMORY_SHARE
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, ProfileError, layout_name
from heddle_sim.profile_parts import HostTimes
from tools.profiles.host import (
    MeasuredRun,
    estimate_tables,
    fit_host,
    ground_truth_tables,
    halves,
    measured_errors,
    measured_runs,
)

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
VLLM_0_26 = HostTimes(per_step_s=0.0, per_running_s=0.0, per_prefill_s=0.0025, per_request_s=0.0)
"""By `benchmarks/gpu_h200.json`: its steps take no longer than their kernels; the time of a prompt
has the least mean error of the 36 prompts there."""


def _files(card: GpuTables, *, mixed: bool) -> list[str]:
    kinds = ("", "_prefill", "_kv_capacity")
    files = [f"{card.table or 'aiconfigurator_' + card.file}{kind}.csv" for kind in kinds]
    return [*files, "aiconfigurator_mixed_step.csv"] if mixed else files


def _tables(perf: Path, card: GpuTables) -> KernelTables:
    found = read_tables(perf, card.file, files=card.table)
    return found if card.link_factor == 1.0 else found.with_slower_links(card.link_factor)


def layouts_of(tables: KernelTables, model: str) -> list[str]:
    """Layouts of a model that there are rows for, in their order."""
    rows = tables.capacity[tables.capacity["model"] == model]
    return list(dict.fromkeys(rows["layout"]))


def read_tables(
    perf: Path, gpu_file: str, *, files: str = "", backend: str = "vllm"
) -> KernelTables:
    """Read the four tables of a GPU class (``gpu_file`` as in the column ``gpu``, ``h100_sxm``).

    `files` is what the names of its files begin with, where that is not
    ``aiconfigurator_<gpu_file>``.
    """
    files = files or f"aiconfigurator_{gpu_file}"

    def read(name: str) -> pd.DataFrame:
        frame = pd.read_csv(perf / name)
        frame = frame[(frame["backend"] == backend) & (frame["gpu"] == gpu_file)]
        return frame.assign(layout=[_layout(row) for row in frame.to_dict("records")])

    return KernelTables(
        decode=read(f"{files}.csv"),
        prefill=read(f"{files}_prefill.csv"),
        mixed=read("aiconfigurator_mixed_step.csv"),
        capacity=read(f"{files}_kv_capacity.csv"),
    )


def _layout(row: Mapping[Hashable, Any]) -> str:
    """The layout of a row; tables of dense models have no column but `tp`."""
    dp, ep = (int(row.get(column) or 1) for column in ("attention_dp", "moe_ep"))
    return layout_name(EngineShape("", int(row["tp"]), ep=ep, dp=dp))


def fit_tables(perf: Path, version: str = "0.12.0") -> dict[tuple[str, str], Profile]:
    """Fit every model and GPU class of the tables, without host time."""
    fitted: dict[tuple[str, str], Profile] = {}
    shares: list[float] = []
    by_gpu = {gpu: _tables(perf, GPUS[gpu]) for gpu in (*MEASURED, *DERIVED)}
    h20 = by_gpu["h20"].capacity
    # Its table takes the 96 GiB of the data sheet; CUDA reports less.
    missing = MEMORY_SHARE * (h20["gpu_mem_bytes_per_gpu"] - GPU_CLASSES["h20"].memory)
    each = (missing / h20["kv_bytes_per_token_per_gpu"]).astype(int)
    h20["kv_capacity_tokens"] = h20["kv_capacity_tokens"] - each
    for mixed in (True, False):
        share = float(np.median(shares)) if shares else None
        for gpu, tables in by_gpu.items():
            for model, spec in MODELS.items():
                if bool((tables.mixed["model"] == spec.table).any()) is not mixed:
                    continue
                layouts = layouts_of(tables, spec.table)
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
    made = {
        names: with_host(profile, host, estimate_host, measured)
        for names, profile in fitted.items()
    }
    times = HostTimes(
        **{name: getattr(host, name) for name in ("per_step_s", "per_running_s", "per_prefill_s")},
        per_request_s=0.0,
    )
    since = {"0.12.0": times, "0.26.0": VLLM_0_26}
    for names in (("qwen3-8b", "h200"), ("qwen3-8b", "h20")):
        made[names] = replace(made[names], host_versions=since)
    return list(made.values())


def write_profiles(profiles: Sequence[Profile], out: Path) -> list[Path]:
    """Write one file per profile; return the paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for p in profiles:
        path = out / f"{p.model}.{p.gpu}.json"
        path.write_bytes(encode_profile(p))
        paths.append(path)
    return paths


@click.command("from-tables")
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
def command(perf: Path, out: Path) -> None:
    """Fit latency profiles from performance tables."""
    try:
        paths = write_profiles(make_profiles(perf), out)
    except (OSError, KeyError, ProfileError) as e:
        raise click.ClickException(f"cannot fit from {perf}: {type(e).__name__}: {e}") from e
    for path in paths:
        click.echo(path)
