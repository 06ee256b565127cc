"""Profiles from AIConfigurator's kernel times, queried point by point instead of read from tables.

The package `aiconfigurator-core` (NVIDIA, Apache-2.0; the extra `heddle[aiconfigurator]`) puts
measured kernel times end to end. The shipped profiles were fitted to tables made with it. This
module queries the same points and makes the same fit. The package has no host time and no
transfers: those of the shipped profiles are used. Mixture-of-experts models are refused, because
the fit has no term for experts.
"""

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from heddle_calibrate.fit.host import HostFit
from heddle_calibrate.fit.kernel_profile import GPUS, ModelSpec, fit_kernels, with_host
from heddle_calibrate.fit.kernel_tables import PREFILL_KNOTS, KernelTables
from heddle_sim.profile_files import Profile, load_profile

PACKAGE = "aiconfigurator-core"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 100, 128, 256)
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (32768, 0), (2048, 1536), (8192, 7680), (32768, 32256))
"""(prompt tokens, of which cached)."""
MIXED_BATCHES, MIXED_CONTEXT = (1, 8, 32, 64, 100), 8192
MEMORY_SHARE, MAX_BATCHED_TOKENS, MAX_BATCH = 0.9, 8192, 256
"""vLLM's, for the KV that an engine holds."""
HOST_OF = ("qwen3-32b", "h100")
"""The shipped profile whose host time was measured; it is carried over."""
EXPERTS_IN_NAME = re.compile(
    r"-a\d+(\.\d+)?b\b|mixtral|gpt-oss|deepseek-(v[2-9]|r1(?!-distill))|kimi-k|minimax-m|-moe\b",
    re.IGNORECASE,
)
"""Names of mixture-of-experts models: "A3B" counts the parameters that are active for a token."""


class EstimatorError(ValueError):
    """The package is missing, or lacks the model, GPU or version; or the model is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Query:
    """One model, GPU class and engine version of the package."""

    path: str
    """The package's name of the model, or a folder with its configuration."""
    system: str
    backend_version: str
    sdk: Any
    """`aiconfigurator_core.sdk`, which is not installed everywhere."""


def profile_from_aiconfigurator(
    model: str,
    gpu: str,
    *,
    tps: Sequence[int] = (1, 2, 4, 8),
    backend_version: str | None = None,
    name: str | None = None,
) -> Profile:
    """Fit a profile of `model`, by a name of the package or as a folder with a
    ``config.json``, on a GPU class, for vLLM in bfloat16.

    Raises:
        EstimatorError: the package is not installed, or does not have the model, the GPU class or
            the version; or the model fits at none of the degrees, or has experts.
    """
    own_config = Path(model) / "config.json"
    _refuse_experts(model, _read_config(own_config) if own_config.is_file() else None)
    package = _package()
    sdk = import_module("aiconfigurator_core.sdk")
    card = GPUS.get(gpu.lower())
    system = _system(card.file if card is not None else gpu.lower(), package)
    query = _Query(
        path=_model(model, package),
        system=system,
        backend_version=_version(system, backend_version),
        sdk=sdk,
    )
    config = _config(query.path, package)
    _refuse_experts(model, config)
    name = (name or Path(model).resolve().name).lower()
    short = gpu.lower() if card is not None else system.partition("_")[0]
    tables = _tables(query, name, tps)
    if tables.capacity.empty or not (tables.capacity["kv_capacity_tokens"] > 0).any():
        raise EstimatorError(
            f"{name} on {short}: fits at no TP degree of {', '.join(map(str, tps))}; try others"
        )
    spec = ModelSpec(
        table=name,
        vocabulary=int(config.get("vocab_size", 0)),
        hidden=int(config.get("hidden_size", 0)),
    )
    profile = fit_kernels(
        tables,
        (name, short),
        spec,
        card if spec.vocabulary else None,
        version=version(PACKAGE),
        share=None,
        files=(),
        tps=tps,
    )
    return _with_carried_host(profile)


def _with_carried_host(profile: Profile) -> Profile:
    reference = load_profile(*HOST_OF)
    host, measured = reference.host, reference.errors["measured"]
    carried = HostFit(
        per_step_s=host.per_step_s,
        per_running_s=host.per_running_s,
        per_prefill_s=host.per_prefill_s,
    )
    return with_host(profile, carried, HostFit(**measured["belief_host"]), measured)


# -- models and GPUs of the package ----------------------------------------------------------------


def _package() -> Path:
    """The folder of the package, whose warnings about fallback rows are silenced."""
    try:
        module = import_module("aiconfigurator_core")
    except ImportError:
        raise EstimatorError(
            f"{PACKAGE} is not installed: pip install 'heddle[aiconfigurator]'"
        ) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    assert module.__file__ is not None
    return Path(module.__file__).parent


def _system(wanted: str, package: Path) -> str:
    """A GPU class by its full name, or by the one that begins with it."""
    known = sorted(
        path.stem for path in (package / "systems").glob("*.yaml") if (_data(package, path.stem))
    )
    full = [name for name in known if name in (wanted, f"{wanted}_sxm")]
    if not full:
        raise EstimatorError(_unknown("GPU class", wanted, known))
    return full[-1]


def _data(package: Path, system: str) -> bool:
    return (package / "systems" / "data" / system).is_dir()


def _model(wanted: str, package: Path) -> str:
    """A folder as it is, or the package's own name for a model."""
    if (Path(wanted) / "config.json").is_file():
        return str(Path(wanted).resolve())
    suffix = "_config.json"
    names = [
        path.name.removesuffix(suffix).replace("--", "/")
        for path in sorted((package / "model_configs").glob(f"*{suffix}"))
        if not path.name.endswith("_hf_quant_config.json")
    ]
    by_name = {name.partition("/")[2].lower(): name for name in names}
    by_name |= {name.lower(): name for name in names}
    # A name with "Meta-" before it is the same model by its older name.
    found = by_name.get(wanted.lower()) or by_name.get(f"meta-{wanted.lower()}")
    if found is None:
        raise EstimatorError(
            _unknown("model", wanted, [name.partition("/")[2].lower() for name in names])
            + "; or give a folder with the model's config.json"
        )
    return found


def _unknown(what: str, wanted: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted.lower(), known, n=3, cutoff=0.4)
    said = f"; near: {', '.join(near)}" if near else f"; known: {', '.join(known)}"
    return f"{PACKAGE} {version(PACKAGE)} knows no {what} {wanted!r}{said}"


def _config(path: str, package: Path) -> dict[str, Any]:
    folder = Path(path) / "config.json"
    known = package / "model_configs" / f"{path.replace('/', '--')}_config.json"
    return _read_config(folder if folder.is_file() else known)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise EstimatorError(f"{path}: not JSON ({e}); give a model's config.json") from None
    if not isinstance(values, dict):
        raise EstimatorError(f"{path}: holds no JSON object; give a model's config.json")
    return values


def _refuse_experts(model: str, config: Mapping[str, Any] | None) -> None:
    """Raise for a mixture-of-experts model: by its configuration, or without one by its name."""
    name = Path(model).resolve().name
    by_name = EXPERTS_IN_NAME.search(name) is not None
    if _experts(config) > 1 if config is not None else by_name:
        raise EstimatorError(
            f"{name} is a mixture-of-experts model, which kernel times do not give a profile of: "
            f"give a dense model, or measure its engines (heddle calibrate measure)"
        )


def _experts(config: Mapping[str, Any]) -> int:
    """The largest number of experts that a configuration states in any section; 0 without one."""
    numbers = [0]
    for key, value in config.items():
        if isinstance(value, dict):
            numbers.append(_experts(value))
        elif "experts" in key and isinstance(value, int):
            numbers.append(value)
    return max(numbers)


def _version(system: str, wanted: str | None) -> str:
    database = import_module("aiconfigurator_core.sdk.perf_database")
    slots: dict[str, str | None] = database.get_version_slots(system, "vllm") or {}
    known = [number for number in slots.values() if number]
    if wanted is None:
        wanted = slots.get("current")
    if wanted is None or wanted not in known:
        raise EstimatorError(
            f"{PACKAGE} {version(PACKAGE)} has no kernel times of vLLM "
            f"{wanted or '(any version)'} on {system}; it has: {', '.join(known) or 'none'}"
        )
    return wanted


# -- the points of the tables ----------------------------------------------------------------------


def _tables(query: _Query, name: str, tps: Sequence[int]) -> KernelTables:
    """The rows that `aiconfigurator_*.csv` hold, in the same rounding."""
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": [], "mixed": []}
    capacity = [_capacity(query, name, tp) for tp in tps]
    for at in capacity:
        if at["kv_capacity_tokens"] > 0:
            _query_engine(query, name, at, rows)
    return KernelTables(
        decode=pd.DataFrame(rows["decode"]),
        prefill=pd.DataFrame(rows["prefill"]),
        mixed=pd.DataFrame(rows["mixed"]),
        capacity=pd.DataFrame(capacity),
    )


def _query_engine(
    query: _Query, name: str, at: dict[str, Any], rows: dict[str, list[dict[str, Any]]]
) -> None:
    tp: int = at["tp"]
    engine = query.sdk.EngineHandle.compile(
        query.path, query.system, "vllm", backend_version=query.backend_version, tp_size=tp
    )
    mine = {"model": name, "tp": tp}
    decode_ms = {
        (batch, context): round(engine.predict_decode_latency(batch, context, 2), 4)
        for batch in BATCHES
        for context in CONTEXTS
    }
    for (batch, context), ms in decode_ms.items():
        fits = int(batch * context <= at["kv_capacity_tokens"])
        rows["decode"].append(
            {**mine, "batch": batch, "context": context, "TPOT_ms": ms, "fits_kv": fits}
        )
    for prompt, cached in PROMPTS:
        rows["prefill"].append(
            {
                **mine,
                "prompt_tokens": prompt,
                "prefix_cached_tokens": cached,
                "prefill_ms": round(engine.predict_prefill_latency(1, prompt, cached), 4),
            }
        )
    for batch in MIXED_BATCHES:
        for chunk in PREFILL_KNOTS:
            step_ms = engine.mixed_step_latency(chunk, batch, MIXED_CONTEXT, 2)
            rows["mixed"].append(
                {
                    **mine,
                    "decode_batch": batch,
                    "decode_context": MIXED_CONTEXT,
                    "prefill_chunk_tokens": chunk,
                    "step_ms": round(step_ms, 4),
                    "decode_only_ms": decode_ms[batch, MIXED_CONTEXT],
                }
            )


def _capacity(query: _Query, name: str, tp: int) -> dict[str, Any]:
    """Memory at one TP degree; a capacity of 0 where the weights leave none, or the model cannot
    be cut so."""
    row = {"model": name, "tp": tp, "backend_version": query.backend_version}
    try:
        found = query.sdk.estimate_kv_cache(
            query.path,
            query.system,
            "vllm",
            query.backend_version,
            max_num_tokens=MAX_BATCHED_TOKENS,
            max_batch_size=MAX_BATCH,
            memory_fraction_kind="of_total",
            memory_fraction_value=MEMORY_SHARE,
            tp_size=tp,
        )
    except ValueError:
        return {**row, "kv_capacity_tokens": 0, "mem_weights_bytes": 0} | {
            "kv_bytes_per_token_per_gpu": 0
        }
    return {
        **row,
        "kv_capacity_tokens": int(found["total_kv_size_tokens"]),
        "kv_bytes_per_token_per_gpu": int(found["kv_size_per_token_bytes"]),
        "mem_weights_bytes": int(found["memory_breakdown"]["weights_bytes"]),
    }
