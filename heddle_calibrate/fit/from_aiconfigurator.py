"""Profiles from AIConfigurator's kernel times, queried point by point instead of read from tables.

The package `aiconfigurator-core` (NVIDIA, Apache-2.0; the extra `heddle-rl[aiconfigurator]`) puts
measured kernel times end to end. This module finds the model, the GPU class and the version in it,
and makes the fit of the shipped profiles. The package has no host time and no transfers: those of
the shipped profiles are used.
"""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heddle_calibrate.fit.kernel_profile import GPUS, fit_kernels, with_host
from heddle_calibrate.fit.kernel_tables import KernelTables
from heddle_calibrate.fit.model_config import model_spec, routed_experts, weight_precision
from heddle_calibrate.fit.package_tables import Query, query_tables
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.pairs import least_pairs_s, with_kv_of
from heddle_core.ids import EngineShape
from heddle_sim.config_fields import ModelConfigError, read_object
from heddle_sim.model_config import model_shape
from heddle_sim.profile_files import Profile, layout_name, load_profile
from heddle_sim.profile_parts import HostFit

PACKAGE = "aiconfigurator-core"
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
HOST_OF = ("qwen3-32b", "h100")
"""The shipped profile whose host time was measured; it is carried over."""


class EstimatorError(ValueError):
    """The package is missing, or lacks the model, the GPU class, the version or the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """The engine and the precision whose kernels a profile is made of."""

    backend: str = "vllm"
    backend_version: str | None = None
    """None: the package's current one."""
    precision: str | None = None
    """Of the weights, as the profile states it; None: that of the model's configuration."""
    quantisation: Mapping[str, str] = field(default_factory=dict)
    """The package's arguments, where the configuration does not state the precision."""
    note: str = ""
    """For the reader of the profile."""


def fit_shapes(
    model: str,
    gpu: str,
    shapes: Sequence[EngineShape],
    source: KernelSource,
    *,
    name: str | None = None,
) -> Profile:
    """Fit a profile of these shapes of engines.

    Raises:
        EstimatorError: the package is not installed, or does not have the model, the GPU class, the
            version or any of the layouts; or the model fits in none of them.
    """
    own_config = Path(model) / "config.json"
    if own_config.is_file():
        _check_experts(model, routed_experts(read_object(own_config)), shapes)
    package = _package()
    card = GPUS.get(gpu.lower())
    system = _system(gpu.lower() if card is None or card.table else card.file, package)
    path = _model(model, package)
    config = _config(path, package)
    experts = routed_experts(config)
    _check_experts(model, experts, shapes)
    query = Query(
        path=path,
        system=system,
        backend=source.backend,
        backend_version=_version(system, source.backend, source.backend_version),
        sdk=import_module("aiconfigurator_core.sdk"),
        experts=experts,
        quantisation=source.quantisation,
    )
    name = (name or Path(model).resolve().name).lower()
    short = gpu.lower() if card is not None else system.partition("_")[0]
    tables = query_tables(query, name, shapes)
    names = [layout_name(shape) for shape in shapes]
    if tables.decode.empty:
        raise EstimatorError(_nothing_found(name, short, source, tables, names))
    try:
        spec = model_spec(name, config, source.precision or weight_precision(config))
    except KeyError as e:
        raise EstimatorError(
            f"{model}: its config.json has no {e}, which a model with experts needs"
        ) from None
    if card is not None and card.link_factor != 1.0:
        tables = tables.with_slower_links(card.link_factor)
    profile = fit_kernels(
        tables,
        (name, short),
        spec,
        GPU_CLASSES.get(short) if spec.vocabulary else None,
        version=version(PACKAGE),
        share=None,
        files=(),
        layouts=names,
        backend=source.backend,
        note=source.note,
        derived=card.derived if card is not None else "",
        least_pair_s=_least_pairs_s(config, tables, shapes, short),
    )
    return with_carried_host(profile)


def _least_pairs_s(
    config: Mapping[str, Any], tables: KernelTables, shapes: Sequence[EngineShape], gpu: str
) -> Mapping[str, float]:
    """None of an architecture that the package knows and `model_shape` does not."""
    try:
        model = model_shape(config, place="config.json", name="")
    except ModelConfigError:
        return {}
    first = tables.capacity[tables.capacity["kv_capacity_tokens"] > 0].iloc[0]
    model = with_kv_of(model, float(first["kv_bytes_per_token_per_gpu"]), int(first["tp"]))
    return least_pairs_s(model, shapes, GPU_CLASSES.get(gpu))


def _nothing_found(
    name: str, gpu: str, source: KernelSource, tables: KernelTables, names: Sequence[str]
) -> str:
    known = not tables.capacity.empty
    full = known and not (tables.capacity["kv_capacity_tokens"] > 0).any()
    why = (
        f"its weights leave no memory for KV in any of the layouts {', '.join(names)}"
        if full
        else f"{PACKAGE} has no kernel times of {_ENGINES[source.backend]} for any of the layouts "
        + ", ".join(names)
    )
    return f"{name} on {gpu}: {why}; try other TP degrees or ranks, or another GPU class"


def _check_experts(model: str, experts: int, shapes: Sequence[EngineShape]) -> None:
    name = Path(model).resolve().name
    for shape in shapes:
        if shape.dp > 1 and not experts:
            raise EstimatorError(
                f"{name} has no experts: attention data parallelism would be engines of their own; "
                "leave attention ranks out"
            )
        if shape.ep > 1 and not experts:
            raise EstimatorError(f"{name} has no experts to spread: leave expert parallelism out")
        if experts % shape.ep:
            raise EstimatorError(
                f"{name} has {experts} experts of a layer, which do not divide over {shape.ep} "
                "GPUs (TP degree times ranks): take another TP degree or other ranks"
            )


def with_carried_host(profile: Profile, of_kind: HostFit | None = None) -> Profile:
    """Add host time to kernel times of any source: that of a kind of model, else that of the
    measured runs."""
    reference = load_profile(*HOST_OF)
    host, measured = reference.host, reference.errors["measured"]
    carried = HostFit(
        per_step_s=host.per_step_s,
        per_running_s=host.per_running_s,
        per_prefill_s=host.per_prefill_s,
    )
    estimate = of_kind or HostFit(**measured["belief_host"])
    return with_host(profile, of_kind or carried, estimate, measured)


# -- models and GPUs of the package ----------------------------------------------------------------


def _package() -> Path:
    """The folder of the package, whose warnings about fallback rows are silenced."""
    try:
        module = import_module("aiconfigurator_core")
    except ImportError:
        raise EstimatorError(
            f"{PACKAGE} is not installed: pip install 'heddle-rl[aiconfigurator]'"
        ) from None
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    assert module.__file__ is not None
    return Path(module.__file__).parent


def _system(wanted: str, package: Path) -> str:
    """A GPU class by its full name, or by the one that begins with it."""
    systems = package / "systems"
    known = sorted(p.stem for p in systems.glob("*.yaml") if (systems / "data" / p.stem).is_dir())
    full = [name for name in known if name in (wanted, f"{wanted}_sxm")]
    if not full:
        raise EstimatorError(_unknown("GPU class", wanted, known))
    return full[-1]


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
    return read_object(folder if folder.is_file() else known)


def _version(system: str, backend: str, wanted: str | None) -> str:
    database = import_module("aiconfigurator_core.sdk.perf_database")
    slots: dict[str, str | None] = database.get_version_slots(system, backend) or {}
    known = [number for number in slots.values() if number]
    if wanted is None:
        wanted = slots.get("current")
    if wanted is None or wanted not in known:
        raise EstimatorError(
            f"{PACKAGE} {version(PACKAGE)} has no kernel times of {_ENGINES[backend]} "
            f"{wanted or '(any version)'} on {system}; it has: {', '.join(known) or 'none'}"
        )
    return wanted
