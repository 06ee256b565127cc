"""Rows of published serving runs: closed loops at a fixed concurrency, TTFT and TPOT."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from heddle_calibrate.roofline.by_name import profile_by_name
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.memory import MAX_BATCHED_TOKENS
from heddle_calibrate.roofline.missing_layouts import with_layouts
from heddle_calibrate.roofline.pairs import shape_of
from heddle_calibrate.roofline.profile import impossible
from heddle_calibrate.roofline.sglang_memory import chunk_tokens
from heddle_calibrate.serving.limits import Limits, limits, recipe_of
from heddle_calibrate.serving.published_rows import LeftOut, Line, PublishedRowsError, read_rows
from heddle_sim.model_names import known_model
from heddle_sim.profile_files import Profile, ProfileError

COLUMNS = (
    "backend",
    "model",
    "gpu",
    "precision",
    "tp",
    "input_tokens",
    "output_tokens",
    "concurrency",
    "TTFT_ms",
    "TPOT_ms",
)
"""What a table needs. Read where they are: `backend_version`, `moe_ep`, `attention_dp`, `measured`
(a date) and `ASSUMED`."""
ENGINES = ("vllm", "sglang")
SUFFIX = {
    "bf16": "-bf16",
    "bfloat16": "-bf16",
    "unlabelled": "",
    "fp8": "-fp8",
    "fp4": "-nvfp4",
    "nvfp4": "-nvfp4",
    "mxfp4": "-mxfp4",
    "int4": "-int4",
}
"""Precision of a row -> end of a profile's name. Rows without a label have that of their model's
weights as published."""
UNNAMED = "unnamed"
"""Model of shared rows whose shape is not known."""
NO_LIMITS = limits({}, clients=1, input_tokens=1)
MOST_CLIENTS, MOST_REQUESTS = 8192, 1_000_000
SLOWER = 1.15
"""A run this much slower than the same run with as many clients or more had another disturbance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One published run, and the layout of its engine: of `gpus` GPUs, `dp` ranks."""

    line: int
    engine: str
    version: str
    """Of the engine; empty where it is not published."""
    model: str
    precision: str
    gpu: str
    tp: int
    """As published."""
    rank_tp: int
    """TP degree of one rank."""
    dp: int
    expert_parallel: bool
    input_tokens: int
    output_tokens: int
    concurrency: int
    ttft_s: float
    tpot_s: float
    limits: Limits

    @property
    def group(self) -> tuple[str, str, str, str, int]:
        """What a fit leaves out at once: engine, model, GPU class, precision and TP degree."""
        return (self.engine, self.model, self.gpu, self.precision, self.tp)

    @property
    def work(self) -> tuple[object, ...]:
        """What the clients sent, to which engine."""
        return (*self.group, self.version, self.input_tokens, self.output_tokens)


def read_serving_rows(
    paths: Iterable[Path], *, every: bool = False
) -> tuple[list[ServingRow], list[LeftOut]]:
    """Read tables of published serving runs, each run once; disturbed ones too with `every`.

    Raises PublishedRowsError with file, line and column for a table that cannot be read.
    """
    rows, out = read_rows(paths, COLUMNS, _row)
    kept, again = _once(rows)
    credible, slow = (kept, []) if every else _credible(kept)
    return credible, [*out, *again, *slow]


def _row(line: Line) -> ServingRow | str:
    engine, precision = line["backend"].lower(), line["precision"].lower()
    if engine not in ENGINES:
        return f"engine {engine}: only {' and '.join(ENGINES)} are modelled"
    if precision not in SUFFIX:
        return f"precision {precision!r}: known are {', '.join(SUFFIX)}"
    tp, rank_tp, ranks, spread = _layout(line)
    clients = _whole(line, "concurrency")
    if clients > MOST_CLIENTS:
        return f"{clients:,} clients: replayed are {MOST_CLIENTS:,} at most"
    row = ServingRow(
        line=line.number,
        engine=engine,
        version=line.cells.get("backend_version", ""),
        model=_weights(line["model"]),
        precision=precision,
        gpu=line["gpu"].lower().removesuffix("_sxm"),
        tp=tp,
        rank_tp=rank_tp,
        dp=ranks,
        expert_parallel=spread > 1,
        input_tokens=_whole(line, "input_tokens"),
        output_tokens=_whole(line, "output_tokens"),
        concurrency=clients,
        ttft_s=_number(line, "TTFT_ms") / 1e3,
        tpot_s=_number(line, "TPOT_ms") / 1e3,
        limits=NO_LIMITS,
    )
    found = with_recipe(row, line)
    if found.limits.requests > MOST_REQUESTS:
        return f"{found.limits.requests:,} requests: replayed are {MOST_REQUESTS:,} at most"
    if found.limits.speculation:
        return f"speculative decoding ({found.limits.speculation}): its acceptance is not published"
    return found


def _layout(line: Line) -> tuple[int, int, int, int]:
    """TP degree as published, that of a rank, ranks of attention, and GPUs of experts.

    Tables give the same number for TP and for ranks where attention is not cut at all: the KV that
    those runs held is that of `tp` GPUs, not of their product. Others give TP as the product of TP
    degree and GPUs of experts, or leave out ranks that the GPUs of experts tell.
    """
    tp, ranks = _whole(line, "tp"), _whole(line, "attention_dp", missing=1)
    cut, spread = (_whole(line, name, missing=1) for name in ("moe_tp", "moe_ep"))
    if ranks == tp > 1:
        return tp, 1, ranks, spread
    if ranks == 1 < cut == spread:
        return spread, spread, 1, spread
    return tp, tp, max(ranks, cut * spread // tp), spread


def with_recipe(row: ServingRow, line: Line) -> ServingRow:
    """Return the row with the limits of its line, of its recipe where the line has none."""
    known = {name: str(getattr(row, name)) for name in ("model", "gpu", "precision", "tp")}
    known |= {"backend": row.engine, "versions": row.version, "clients": str(row.concurrency)}
    known["inputs"] = f"{row.input_tokens}/{row.output_tokens}"
    recipe = recipe_of({**known, "date": line.cells.get("measured", "")})
    stated = {name: text for name, text in line.cells.items() if text not in ("", "-")}
    try:
        own = limits(
            {**recipe, **stated},
            clients=row.concurrency,
            input_tokens=row.input_tokens,
            usual_tokens=chunk_tokens(row.gpu) if row.engine == "sglang" else MAX_BATCHED_TOKENS,
        )
    except ValueError as e:
        raise PublishedRowsError(f"{line.path.name}:{line.number}: {e}") from None
    spread = row.expert_parallel or recipe.get("expert_parallel", "") == "1"
    return replace(row, limits=own, expert_parallel=spread)


def _number(line: Line, column: str) -> float:
    value = line.positive(column)
    if value is None:
        raise PublishedRowsError(
            f"{line.path.name}:{line.number}: {column} is empty; give a positive number, or leave "
            "the line out"
        )
    return value


def _whole(line: Line, column: str, missing: int | None = None) -> int:
    if missing is not None and line.cells.get(column, "") in ("", "-"):
        return missing
    value = _number(line, column)
    if value != int(value):
        raise PublishedRowsError(
            f"{line.path.name}:{line.number}: {column} is {line[column]!r}, not a whole number"
        )
    return int(value)


def _weights(model: str) -> str:
    """Name of published weights as profiles have it: no owner, no precision, small letters."""
    name = model.rpartition("/")[2].lower().removeprefix("meta-")
    name = re.sub(r"-(instruct|fp8|nvfp4)(?=-|$)", "", name)
    known = known_model(name)
    return known.profile if known is not None else name


def _once(rows: Sequence[ServingRow]) -> tuple[list[ServingRow], list[LeftOut]]:
    """Each run once, and of the same figures under two layouts those without ranks."""
    plain = {_figures(row) for row in rows if row.dp == 1}
    seen: set[object] = set()
    kept: list[ServingRow] = []
    out: list[LeftOut] = []
    for row in rows:
        same = (_figures(row), row.dp, row.expert_parallel)
        if row.dp > 1 and _figures(row) in plain:
            out.append(LeftOut(row.line, "the same figures are given for another layout"))
        elif same in seen:
            out.append(LeftOut(row.line, "the same run again"))
        else:
            seen.add(same)
            kept.append(row)
    return kept, out


def _figures(row: ServingRow) -> tuple[object, ...]:
    """Work and times of a run; times to 0.01 ms, as some tables round them."""
    return (*row.work, row.concurrency, round(row.ttft_s, 5), round(row.tpot_s, 5))


def _credible(rows: Sequence[ServingRow]) -> tuple[list[ServingRow], list[LeftOut]]:
    """Without runs that were slower than the same work with at least as many clients."""
    by_work: dict[object, list[ServingRow]] = {}
    for row in rows:
        by_work.setdefault((row.work, row.dp, row.expert_parallel), []).append(row)
    slow = set()
    for same in by_work.values():
        for row in same:
            least = min(r.tpot_s for r in same if r.concurrency >= row.concurrency)
            if row.tpot_s > SLOWER * least:
                slow.add(row)
    reason = "slower than the same run with as many clients or more: disturbed"
    return [r for r in rows if r not in slow], [LeftOut(r.line, reason) for r in rows if r in slow]


def profile_name(row: ServingRow) -> str:
    """Name that a profile of the row's model and precision has."""
    own = known_model(row.model)
    if own is None or (row.precision == "fp4" and own.precision == "mxfp4"):
        narrow = own is None and row.model != UNNAMED and row.precision in ("fp8", "fp4", "nvfp4")
        return row.model + (SUFFIX[row.precision] if narrow else "")
    found = known_model(row.model + SUFFIX[row.precision])
    return found.profile if found is not None else row.model


def _by_shape(named: str, gpu: str) -> Profile | str:
    """Make the roofline's profile of a known shape, or say why there is none."""
    if known_model(named) is None:
        remedy = ": give its --model FILE, the only one of this GPU type" * (named == UNNAMED)
        return f"no profile of {named} on {gpu}{remedy}"
    try:
        return profile_by_name(named, gpu)
    except ProfileError as error:
        return f"no profile of {named} on {gpu}: {error}"


def profile_of(row: ServingRow, profiles: Mapping[tuple[str, str], Profile]) -> Profile | str:
    """Find the profile of a row's model, precision and GPU class, laid out as its engine; or say
    what is missing.

    Where experts cannot be cut as published, the engine spreads them over its GPUs.
    """
    named = profile_name(row)
    found = profiles.get((named, row.gpu)) or _by_shape(named, row.gpu)
    if isinstance(found, str):
        return found
    layouts = dict.fromkeys((row.expert_parallel, bool(found.experts)))
    for complete, experts in product((False, True), layouts):
        spread = experts and found.experts > 0
        own = (
            with_layouts(found, expert_parallel=spread, attention_dp=row.dp) if complete else found
        )
        laid = replace(own, expert_parallel=spread, attention_dp=row.dp)
        if row.rank_tp in laid.tps:
            return laid
    model, gpu = shape_of(found), GPU_CLASSES.get(row.gpu)
    shape = replace(found, expert_parallel=False, attention_dp=row.dp).shape(row.rank_tp)
    why = impossible(model, shape, gpu) if model is not None and gpu is not None else ""
    return (
        f"the profile of {named} on {row.gpu} has no table at TP {row.rank_tp} with {row.dp} ranks"
        + (f": {why}" if why else "")
    )
