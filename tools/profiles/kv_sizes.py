"""`python -m tools.profiles kv`: published sizes of the KV cache beside ours.

`kv_cache_sizes.csv` has what engines print when they start ("GPU KV cache size").
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from heddle.cli.tables import new_table, show
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.kv_precision import KV_BYTES
from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.memory import kv_capacity_tokens, reserved_bytes
from heddle_calibrate.roofline.pairs import shape_of
from heddle_calibrate.serving.limits import limits, with_limits
from heddle_core.ids import EngineShape
from heddle_sim.model_names import short_model_name
from heddle_sim.profile_files import known_profiles, load_profile
from heddle_sim.profile_files import layout_name as named

FILE = Path(__file__).with_name("kv_cache_sizes.csv")
FAULTY = {
    "github.com/vllm-project/vllm/issues/21348": "the thread reports the size as a fault: an "
    "engine of another kind holds twice as much on the same GPUs"
}
"""Sources whose sizes are not those of a sound engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """Tokens of KV that an engine printed, and ours for its options and version."""

    model: str
    engine: EngineShape
    version: str
    source: str
    published: int
    roofline: int
    shipped: int | None
    """Of the shipped profile; None without one."""

    @property
    def errors_pct(self) -> tuple[float, float | None]:
        """Of the roofline and of the shipped profile."""
        ours = None if self.shipped is None else (self.shipped / self.published - 1) * 100
        return (self.roofline / self.published - 1) * 100, ours


def kv_sizes() -> Iterator[KvSize]:
    """Yield the published sizes."""
    with FILE.open(newline="", encoding="utf-8") as file:
        yield from map(_size, csv.DictReader(file))


def _size(row: dict[str, str]) -> KvSize:
    tp, share = int(row["tp"]), float(row["memory_share"])
    spread = tp if row["expert_parallel"] == "1" else 1
    engine = EngineShape(row["gpu"], tp, ep=spread)
    shape, _ = find_model(row["model"])
    shape = replace(shape, kv_element_bytes=KV_BYTES[row["kv_dtype"]])
    return KvSize(
        model=row["model"],
        engine=engine,
        version=row["version"],
        source=row["source"],
        published=int(row["tokens"]),
        roofline=kv_capacity_tokens(
            shape, engine, GPU_CLASSES[row["gpu"]], memory_share=share, version=row["version"]
        ),
        shipped=_shipped(row, engine),
    )


def _shipped(row: dict[str, str], engine: EngineShape) -> int | None:
    """Capacity of the shipped profile, with the options of a row and the reserve of its version."""
    names = short_model_name(row["model"], {m for m, _ in known_profiles()}), row["gpu"]
    profile = load_profile(*names) if names in known_profiles() else None
    if profile is None or named(engine) not in profile.tables:
        return None
    laid_out = replace(profile, expert_parallel=engine.ep > 1)
    own = limits(row, clients=1, input_tokens=1)
    table = with_limits(laid_out.table(engine.tp), profile, own)
    later = reserved_bytes(engine, row["version"]) - reserved_bytes(engine)
    each = profile.kv_bytes_per_token / min(engine.tp, profile.kv_heads or engine.tp)
    own_shape = shape_of(profile)
    assert own_shape is not None
    each *= KV_BYTES[row["kv_dtype"]] / own_shape.kv_element_bytes
    return int(table.kv_capacity_tokens - later / each)


@click.command("kv")
def command() -> None:
    """Compare published sizes of the KV cache with ours, in tokens and percent."""
    table = new_table(
        "tokens of KV", *("GPU", "layout", "vLLM", "published", "roofline", "%", "shipped %")
    )
    for size in kv_sizes():
        error, ours = size.errors_pct
        table.add_row(
            size.model,
            *(size.engine.gpu, named(size.engine), size.version),
            *(f"{size.published:,}", f"{size.roofline:,}", f"{error:+.1f}"),
            "" if ours is None else f"{ours:+.1f}",
        )
    show(table)
