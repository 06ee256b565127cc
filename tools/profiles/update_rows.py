"""Rows of published weight updates: which are updates by a known method, and what each says."""

import re
from dataclasses import dataclass
from pathlib import Path

from heddle_calibrate.serving.published_rows import LeftOut, Line, PublishedRowsError, read_rows
from heddle_sim.trained_models import trained_model
from heddle_sim.weight_update import GATHERED_IN_BF16, WEIGHT_BYTES, tensors_of
from tools.profiles.training_rows import document, model_name

COLUMNS = ("model", "params_b", "dtype", "method", "layout", "seconds", "what", "source")
METHODS = (
    (r"^checkpoint-engine (broadcast|p2p)", "checkpoint_engine"),
    (r"nccl checkpoint engine|nccl_parallel|bucket", "nccl_bucket"),
    (r"nixl", "rdma_p2p"),
    (r"rdma", "rdma"),
    (r"colocated", "colocated"),
    (r"tcp", "tcp"),
    (r"push\+pull", "store"),
    (r"delta", "delta"),
    (r"nccl|^slime$", "nccl"),
)
NCCL_OF = {
    "checkpoint-engine-refit": "nccl_sharded",
    "issues 7262": "nccl_bucket",
    "slime pull 67": "colocated",
}
"""What a table calls NCCL: all ranks of NeMo-RL send, verl's engine fills buckets, and slime's pull
is of `update_weights_from_tensor`, on common GPUs."""
TIMED = ("update", "refit", "transfer", "exposed", "median")
SHORTEST_S = 0.5
"""Of a whole model; shorter ones leave out the set-up, or imply rates that no link has."""

FURTHER_ROWS = (
    ("qwen3-8b", "delta", 3.34, "verl-project/verl issue 7324"),
    ("qwen3-8b", "delta", 3.0, "verl-project/verl issue 7324"),
    ("qwen3-30b-a3b", "colocated", 7.0, "THUDM/slime, CUDA IPC"),
)
"""Models, methods, seconds and sources of updates in bf16 that the tables do not have: A800 with
16 + 16 and 8 + 8 GPUs (7324), slime after its buckets. Full updates of 7324, 34.26 and 11.0 s by
NCCL, are left out: no rate explains both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRow:
    """One published update."""

    line: int
    """0 for figures that this module holds."""
    source: str
    method: str
    size_bytes: float
    tensors: int
    """0 where the shape of the model is not known."""
    seconds: float
    paused: bool = False
    """The seconds are those in which engines wait."""


def further_rows() -> list[UpdateRow]:
    """Return the published updates that the tables do not have."""
    return [
        UpdateRow(
            line=0,
            source=source,
            method=method,
            size_bytes=WEIGHT_BYTES["bf16"] * trained_model(name).parameters,
            tensors=tensors_of(trained_model(name)),
            seconds=seconds,
        )
        for name, method, seconds, source in FURTHER_ROWS
    ]


def read_update_rows(*paths: Path) -> tuple[list[UpdateRow], list[LeftOut]]:
    """Read tables of published weight updates, in their order.

    Raises PublishedRowsError with file and line for a table that cannot be read.
    """
    return read_rows(paths, COLUMNS, _row)


def _method(line: Line) -> str | None:
    method = next((m for pattern, m in METHODS if re.search(pattern, line["method"].lower())), None)
    own = next((m for part, m in NCCL_OF.items() if part in line["source"]), None)
    return own if own is not None and method == "nccl" else method


def _row(line: Line) -> UpdateRow | str:
    """One row, or the rule that leaves it out."""
    method = _method(line)
    what = re.split(r"[ ,]", line["what"])[0]
    if what in ("sleep", "wake", "switch", "metadata"):
        return f"a part beside the update: {what}"
    if method is None or what not in TIMED:
        return "not the time of an update by a modelled method"
    if "instead of" in line["method"]:
        return "a variant that its source shows for comparison"
    seconds = line.positive("seconds")
    if seconds is None:
        raise PublishedRowsError(f"{line.path.name}:{line.number}: seconds are missing")
    name = model_name(line["model"])
    billions = line.positive("params_b") or (trained_model(name).parameters / 1e9 if name else None)
    # A row without a data type is of the weights that its trainer has.
    kind = "bf16" if line["dtype"] == "-" or method in GATHERED_IN_BF16 else line["dtype"]
    if billions is None or kind not in WEIGHT_BYTES:
        return "the size of the model is not published"
    if seconds < SHORTEST_S:
        return f"less than {SHORTEST_S} s for a whole model"
    return UpdateRow(
        line=line.number,
        source=document(line["source"]),
        method=method,
        size_bytes=billions * 1e9 * WEIGHT_BYTES[kind],
        tensors=tensors_of(trained_model(name)) if name else 0,
        seconds=seconds,
        paused="overlapped" in line["method"],
    )
