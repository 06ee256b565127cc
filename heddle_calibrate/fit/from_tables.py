"""Make profile files from performance tables.

    python -m heddle_calibrate.fit.from_tables --perf DIR --out DIR

What is fitted from which rows, and how well, stands in each file and in `docs/calibration.md`. The
same tables give the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from heddle_calibrate.fit.curves import BeliefFit, table_entry
from heddle_calibrate.fit.host import (
    HostFit,
    MeasuredRun,
    fit_host,
    halves,
    measured_errors,
    measured_runs,
)
from heddle_calibrate.fit.kernel_tables import (
    Tables,
    decode_errors,
    fit_belief,
    fit_decode,
    fit_prefill,
    prefill_errors,
    read_tables,
)
from heddle_calibrate.profiles import encode_profile
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import MAX_BATCH, Profile, ProfileError, expand
from heddle_sim.profile_parts import (
    Host,
    Roofline,
    Source,
    TpTable,
    Transfer,
)

TPS = (1, 2, 4, 8)
MEASURED_ON = (
    "Qwen3-32B on H100 SXM, vLLM 0.12.0, TP 2 and 4, precision unlabelled (bf16 assumed), "
    "client time included"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU class: name in the tables, peak memory bandwidth of one GPU, and where that is
    stated."""

    file: str
    bandwidth_bytes_per_s: float
    source: str


GPUS = {
    "h100": Gpu(
        file="h100_sxm", bandwidth_bytes_per_s=3.35e12, source="NVIDIA H100 SXM data sheet"
    ),
    "h200": Gpu(file="h200_sxm", bandwidth_bytes_per_s=4.8e12, source="NVIDIA H200 SXM data sheet"),
    "a100": Gpu(
        file="a100_sxm", bandwidth_bytes_per_s=2.039e12, source="NVIDIA A100 80GB SXM data sheet"
    ),
    "l40s": Gpu(file="l40s", bandwidth_bytes_per_s=0.864e12, source="NVIDIA L40S data sheet"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model: name in the tables, and the size of its input embedding (bf16), from its config."""

    table: str
    vocabulary: int
    hidden: int


MODELS = {
    "qwen3-8b": Model(table="Qwen3-8B", vocabulary=151_936, hidden=4096),
    "qwen3-14b": Model(table="Qwen3-14B", vocabulary=151_936, hidden=5120),
    "qwen3-32b": Model(table="Qwen3-32B", vocabulary=151_936, hidden=5120),
    "llama-3.1-8b": Model(table="Llama-3.1-8B", vocabulary=128_256, hidden=4096),
}

KV_BYTES = (147_456, 163_840, 262_144)
MIGRATION_CODING_S = (0.26, 0.27, 0.35)
MIGRATION_MATH_S = (0.24, 0.25, 0.33)
"""Heddle paper (arXiv 2603.28101v1), table 1: seconds per migration for Qwen3-8B, 14B and 32B."""
TRANSFER_BYTES_PER_S = 25e9
"""Half of a 400 Gb/s link. Table 1 gives only tokens moved over bandwidth, 7.9e-7 s per (byte per
token): at line rate every move would be of 39,500 tokens, the length limit; at half, of 19,800."""


def fit_transfer(seconds: Sequence[float]) -> Transfer:
    """Fixed time of a migration: the intercept of seconds over KV bytes per token."""
    _, fixed_s = np.polyfit(KV_BYTES, seconds, 1)
    return Transfer(fixed_s=round(float(fixed_s), 3), bytes_per_s=TRANSFER_BYTES_PER_S)


NO_HOST = Host(
    per_step_s=0.0, per_running_s=0.0, per_prefill_s=0.0, measured_on="", carried_over=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One model on one GPU class before host time is known."""

    profile: Profile
    beliefs: Mapping[int, BeliefFit]


def _capacity(t: Tables) -> int:
    return int(t.capacity["kv_capacity_tokens"].iloc[0]) if len(t.capacity) else 0


def fit_kernels(
    tables: Tables,
    names: tuple[str, str],
    spec: Model,
    card: Gpu | None,
    *,
    version: str,
    share: float | None,
    files: Sequence[str],
    tps: Sequence[int] = TPS,
) -> Fitted:
    """Fit every TP degree of one model on one GPU class, which are called `names`; host time 0.

    `card` is None for a class whose bandwidth nobody stated.
    """
    model, gpu = names
    entries: dict[str, TpTable] = {}
    beliefs: dict[int, BeliefFit] = {}
    refused: dict[str, str] = {}
    for tp in tps:
        t = tables.of(spec.table, tp)
        capacity = _capacity(t)
        if capacity <= 0:
            refused[str(tp)] = "its weights leave no memory for KV (capacity 0 tokens)"
            continue
        decode = fit_decode(t.decode)
        prefill = fit_prefill(t, float(decode.base_s[0]), share)
        beliefs[tp] = fit_belief(t)
        entry = table_entry(decode, prefill, beliefs[tp], capacity)
        errors = {**decode_errors(t, decode, beliefs[tp]), **prefill_errors(t, decode, prefill)}
        entries[str(tp)] = replace(entry, errors=errors)
    rows = tables.capacity[
        (tables.capacity["model"] == spec.table) & (tables.capacity["kv_capacity_tokens"] > 0)
    ]
    first = rows.iloc[0]
    tp = int(first["tp"])
    weights = int(first["mem_weights_bytes"]) * tp
    roofline = None
    if card is not None:
        roofline = Roofline(
            weights_read_bytes=weights - 2 * spec.vocabulary * spec.hidden,
            bandwidth_bytes_per_s=card.bandwidth_bytes_per_s,
            source=card.source,
        )
    profile = Profile(
        schema="heddle.profile/1",
        model=model,
        gpu=gpu,
        source=Source(
            package="aiconfigurator-core",
            version=version,
            backend="vllm",
            backend_version=str(first["backend_version"]),
            licence="Apache-2.0",
            precision="bfloat16",
            files=tuple(files),
        ),
        kv_bytes_per_token=int(first["kv_bytes_per_token_per_gpu"]) * tp,
        roofline=roofline,
        host=NO_HOST,
        transfer=fit_transfer(MIGRATION_CODING_S),
        belief_transfer=fit_transfer(MIGRATION_MATH_S),
        tables=entries,
        refused=refused,
    )
    return Fitted(profile=profile, beliefs=beliefs)


def truth_tables(profile: Profile, host: HostFit, tps: Sequence[int]) -> Mapping[int, LatencyTable]:
    """Truth at these degrees under another host overhead."""
    tried = replace(NO_HOST, **asdict(host))
    return {tp: expand(profile, tp, host=tried) for tp in tps}


def belief_tables(
    profile: Profile, host: HostFit, tps: Sequence[int]
) -> Mapping[int, LatencyTable]:
    """Belief put in a table's form, to be replayed like a truth."""
    reach = 8192
    tables = {}
    for tp in tps:
        b = profile.at(tp).belief
        t0_s, t1_s = b.t0_s + host.per_step_s, b.t1_s + host.per_running_s
        tables[tp] = LatencyTable(
            model=profile.model,
            gpu=profile.gpu,
            tp=tp,
            base_s=[t0_s + t1_s * n for n in range(MAX_BATCH + 1)],
            per_context_s=[b.t2_s] * (MAX_BATCH + 1),
            prefill_tokens=(0, reach),
            prefill_knots_s=(0.0, reach * b.prefill_s),
            prefill_pair_s=0.0,
            host_per_prefill_s=0.0,
            kv_capacity_tokens=b.kv_capacity_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
        )
    return tables


def with_host(
    profile: Profile, truth: HostFit, belief: HostFit, measured: Mapping[str, Any]
) -> Profile:
    """Add both host overheads, and the errors against the measured runs where this profile has
    any."""
    here = (profile.model, profile.gpu) == ("qwen3-32b", "h100")
    entries = {
        tp: replace(
            e,
            belief=replace(
                e.belief,
                t0_s=round(e.belief.t0_s + belief.per_step_s, 7),
                t1_s=round(e.belief.t1_s + belief.per_running_s, 9),
            ),
        )
        for tp, e in profile.tables.items()
    }
    none = {"runs": 0, "note": "no measured bf16 vLLM runs of this model on this GPU"}
    return replace(
        profile,
        host=Host(**asdict(truth), measured_on=MEASURED_ON, carried_over=not here),
        tables=entries,
        errors={"measured": dict(measured) if here else none},
    )


def _files(card: Gpu, *, mixed: bool) -> list[str]:
    kinds = ("", "_prefill", "_kv_capacity")
    files = [f"aiconfigurator_{card.file}{kind}.csv" for kind in kinds]
    return [*files, "aiconfigurator_mixed_step.csv"] if mixed else files


def make_profiles(perf: Path, version: str = "0.12.0") -> list[Profile]:
    """Fit all profiles: tables first, then host time by replaying the measured runs on them.

    Truth takes every second measured run, belief the others.
    """
    fitted: dict[tuple[str, str], Fitted] = {}
    shares: list[float] = []
    by_gpu = {gpu: read_tables(perf, card.file) for gpu, card in GPUS.items()}
    for mixed in (True, False):
        share = float(np.median(shares)) if shares else None
        for gpu, tables in by_gpu.items():
            for model, spec in MODELS.items():
                if bool((tables.mixed["model"] == spec.table).any()) is not mixed:
                    continue
                one = fit_kernels(
                    tables,
                    (model, gpu),
                    spec,
                    GPUS[gpu],
                    version=version,
                    share=share,
                    files=_files(GPUS[gpu], mixed=mixed),
                )
                fitted[model, gpu] = one
                if mixed:
                    bases = [e.decode.base_ms for e in one.profile.tables.values()]
                    shares += [base[0] / base[1] for base in bases]
    reference = fitted["qwen3-32b", "h100"].profile
    runs = measured_runs(perf)
    for_truth, for_belief = halves(runs)
    truth = fit_host(for_truth, lambda h, tps: truth_tables(reference, h, tps))
    belief = fit_host(
        for_belief, lambda h, tps: belief_tables(reference, h, tps), per_prefill=False
    )
    seen: list[tuple[str, Sequence[MeasuredRun]]] = [("fitted", for_truth), ("unseen", for_belief)]
    measured = measured_errors(seen, truth_tables(reference, truth, reference.tps)) | {
        "belief_host": asdict(belief)
    }
    return [
        with_host(fitted[model, gpu].profile, truth, belief, measured)
        for model in MODELS
        for gpu in GPUS
    ]


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
