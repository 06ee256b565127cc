"""The points of the tables, queried from AIConfigurator's package instead of read from CSV files.

The rows are those of `aiconfigurator_*.csv`, in the same rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from heddle_calibrate.fit.kernel_tables import PREFILL_KNOTS, KernelTables
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import layout_name

BATCHES = (1, 2, 4, 8, 16, 32, 64, 100, 128, 256)
CONTEXTS = (1024, 4096, 8192, 16384, 32768)
PROMPTS = ((512, 0), (2048, 0), (8192, 0), (32768, 0), (2048, 1536), (8192, 7680), (32768, 32256))
"""(prompt tokens, of which cached)."""
MIXED_BATCHES, MIXED_CONTEXT = (1, 8, 32, 64, 100), 8192
MEMORY_SHARE, MAX_BATCHED_TOKENS, MAX_BATCH = 0.9, 8192, 256
"""vLLM's, for the KV that an engine holds."""
_LINKS = ("_ar", "_ar_1", "_ar_2", "_allreduce", "_dispatch", "_p2p")
"""Ends of the names of operations that move activations between GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One model, GPU class, engine and precision of the package."""

    path: str
    """The package's name of the model, or a folder with its configuration."""
    system: str
    backend: str
    backend_version: str
    sdk: Any
    """`aiconfigurator_core.sdk`, which is not installed everywhere."""
    experts: int = 0
    quantisation: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the package that override the precision of the model's configuration."""

    def layout(self, shape: EngineShape) -> dict[str, Any]:
        """The package's arguments for engines of a shape."""
        sizes: dict[str, Any] = {"tp_size": shape.tp, **self.quantisation}
        if self.experts:
            sizes |= {
                "moe_tp_size": shape.gpus // shape.ep,
                "moe_ep_size": shape.ep,
                "attention_dp_size": shape.dp,
            }
        return sizes


def query_tables(query: Query, name: str, shapes: Sequence[EngineShape]) -> KernelTables:
    """Query the rows of a model, which they call `name`, for engines of each shape.

    A shape that the package has no kernel times for has a row of its memory alone; one that it
    cannot lay out at all has none.
    """
    rows: dict[str, list[dict[str, Any]]] = {
        "decode": [],
        "prefill": [],
        "mixed": [],
        "capacity": [],
    }
    for shape in shapes:
        at = _capacity(query, name, shape)
        if at is None:
            continue
        rows["capacity"].append(at)
        if at["kv_capacity_tokens"] <= 0:
            continue
        try:
            found = _query_engine(query, shape, at)
        except (ValueError, RuntimeError):  # the package's errors for missing kernel times
            continue
        for kind, more in found.items():
            rows[kind] += more
    return KernelTables(**{kind: pd.DataFrame(found) for kind, found in rows.items()})


def _query_engine(
    query: Query, shape: EngineShape, at: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    engine = query.sdk.EngineHandle.compile(
        query.path,
        query.system,
        query.backend,
        backend_version=query.backend_version,
        **query.layout(shape),
    )
    rows: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": [], "mixed": []}
    mine = {name: at[name] for name in ("model", "layout", "tp")}
    decode_ms = {
        (batch, context): round(engine.predict_decode_latency(batch, context, 2), 4)
        for batch in BATCHES
        for context in CONTEXTS
    }
    for (batch, context), ms in decode_ms.items():
        operations = engine.decode_step_per_op(batch, context, 2)
        links_ms = sum(part[1] for part in operations if part[0].endswith(_LINKS))
        fits = int(batch * context <= at["kv_capacity_tokens"])
        at_point = {"batch": batch, "context": context, "TPOT_ms": ms, "fits_kv": fits}
        rows["decode"].append({**mine, **at_point, "allreduce_ms": round(links_ms, 4)})
    for prompt, cached in PROMPTS:
        ms = round(engine.predict_prefill_latency(1, prompt, cached), 4)
        lone = {"prompt_tokens": prompt, "prefix_cached_tokens": cached, "prefill_ms": ms}
        rows["prefill"].append({**mine, **lone})
    for batch in MIXED_BATCHES:
        for chunk in PREFILL_KNOTS:
            step = {
                "decode_batch": batch,
                "decode_context": MIXED_CONTEXT,
                "prefill_chunk_tokens": chunk,
                "step_ms": round(engine.mixed_step_latency(chunk, batch, MIXED_CONTEXT, 2), 4),
                "decode_only_ms": decode_ms[batch, MIXED_CONTEXT],
            }
            rows["mixed"].append({**mine, **step})
    return rows


def _capacity(query: Query, name: str, shape: EngineShape) -> dict[str, Any] | None:
    """Memory of one rank; a capacity of 0 where the weights leave none, None where the model cannot
    be cut so."""
    try:
        found = query.sdk.estimate_kv_cache(
            query.path,
            query.system,
            query.backend,
            query.backend_version,
            max_num_tokens=MAX_BATCHED_TOKENS,
            max_batch_size=MAX_BATCH,
            memory_fraction_kind="of_total",
            memory_fraction_value=MEMORY_SHARE,
            **query.layout(shape),
        )
    except ValueError as error:
        if "no KV budget" not in str(error):
            return None
        found = {"memory_breakdown": {}}
    return {
        "model": name,
        "layout": layout_name(shape),
        "tp": shape.tp,
        "backend_version": query.backend_version,
        "kv_capacity_tokens": int(found.get("total_kv_size_tokens", 0)),
        "kv_bytes_per_token_per_gpu": int(found.get("kv_size_per_token_bytes", 0)),
        "mem_weights_bytes": int(found["memory_breakdown"].get("weights_bytes", 0)),
    }
