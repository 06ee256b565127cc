"""Rows of published weight updates: which are updates by a known method, and what each says."""

import re
from dataclasses import dataclass
from pathlib import Path

from heddle_calibrate.serving.published_rows import LeftOut, Line, PublishedRowsError, read_lines
from tools.profiles.training_rows import document

COLUMNS = ("model", "params_b", "dtype", "method", "layout", "seconds", "what", "source")
METHODS = (
    (r"nccl checkpoint engine", "checkpoint_engine"),
    (r"nccl per tensor", "nccl_per_tensor"),
    (r"^nccl", "nccl"),
    (r"nixl", "rdma_p2p"),
    (r"rdma", "rdma"),
    (r"colocated", "colocated"),
    (r"tcp", "tcp"),
    (r"push\+pull, naive", "store"),
    (r"delta", "delta"),
)
TIMED = ("update", "refit", "transfer", "exposed")
POINT_TO_POINT = ("tcp", "rdma", "store", "delta")
"""Methods whose time does not depend on the number of GPUs, as far as the rows show."""
SHORTEST_S = 0.5
"""Of a whole model; shorter ones leave out the set-up, or imply rates that no link has."""
GPUS_PER_NODE = 8
BYTES = {"bf16": 2.0, "fp8": 1.0}

DELTA_ROWS = (
    (7.616e9, 4.4),
    (32.764e9, 6.2),
    (32.764e9, 11.55),
    (72.706e9, 12.5),
    (30.532e9, 7.1),
    (235.094e9, 13.15),
)
"""Parameters and seconds of steady delta updates, middles of the published ranges: verl,
docs/advance/delta_weight_sync.md at 08d36cd0 (SGLang, H100)."""
DELTA_SOURCE = "verl-project/verl docs/advance/delta_weight_sync.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """One published update."""

    line: int
    """0 for figures that this module holds."""
    source: str
    method: str
    size_bytes: float
    gpus: int
    seconds: float


def delta_rows() -> list[UpdateRow]:
    """Return the published delta updates, which the table does not have."""
    return [
        UpdateRow(
            line=0,
            source=DELTA_SOURCE,
            method="delta",
            size_bytes=2 * parameters,
            gpus=1,
            seconds=seconds,
        )
        for parameters, seconds in DELTA_ROWS
    ]


def read_update_rows(path: Path) -> tuple[list[UpdateRow], list[LeftOut]]:
    """Read a table of published weight updates, in its order.

    Raises PublishedRowsError with file and line for a table that cannot be read.
    """
    rows: list[UpdateRow] = []
    out: list[LeftOut] = []
    for line in read_lines(path, COLUMNS):
        found = _row(line)
        if isinstance(found, str):
            out.append(LeftOut(line.number, found))
        else:
            rows.append(found)
    return rows, out


def _row(line: Line) -> UpdateRow | str:
    """One row, or the rule that leaves it out."""
    method = next((m for pattern, m in METHODS if re.search(pattern, line["method"].lower())), None)
    what = line["what"].split()[0] if line["what"] else ""
    if method is None or what not in TIMED:
        return "not the time of an update by a modelled method"
    if "instead of" in line["method"]:
        return "a variant that its source shows for comparison"
    seconds, billions = line.positive("seconds"), line.positive("params_b")
    if seconds is None:
        raise PublishedRowsError(f"{line.path.name}:{line.number}: seconds are missing")
    if billions is None or line["dtype"] not in BYTES:
        return "the size of the model is not published"
    if seconds < SHORTEST_S:
        return f"less than {SHORTEST_S} s for a whole model"
    gpus = _gpus(line["layout"])
    if gpus is None and not (method in POINT_TO_POINT or what == "transfer"):
        return "the number of GPUs is not published"
    return UpdateRow(
        line=line.number,
        source=document(line["source"]),
        method=method,
        size_bytes=billions * 1e9 * BYTES[line["dtype"]],
        gpus=gpus or 16,
        seconds=seconds,
    )


def _gpus(layout: str) -> int | None:
    """GPUs of "16+16", "8 GPU Megatron", "1+3 nodes", "32 policy + 4 rollout nodes"."""
    two = re.match(r"(\d+)\s*\w*\s*\+\s*(\d+)", layout)
    if two:
        both = int(two.group(1)) + int(two.group(2))
        return both * GPUS_PER_NODE if "node" in layout else both
    one = re.match(r"(\d+) GPU", layout)
    return int(one.group(1)) if one else None
