"""Limits that an engine was started with: of a row, else of its published recipe, else assumed."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.kv_precision import KV_BYTES
from heddle_calibrate.roofline.memory import MAX_BATCHED_TOKENS, MEMORY_SHARE
from heddle_calibrate.roofline.pairs import shape_of
from heddle_calibrate.roofline.sglang_memory import kv_gain_tokens
from heddle_calibrate.serving.replay import SHORTEST
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile
from heddle_sim.profile_parts import MEASURED

RECIPES = Path(__file__).with_name("recipes.csv")
"""The first row that fits a run counts; empty cells fit all, `since` and `until` its date."""
ASSUMED = {
    "max_num_seqs": "as many as clients",
    "requests": "10 for each client",
    "max_num_batched_tokens": str(MAX_BATCHED_TOKENS),
    "memory_share": str(MEMORY_SHARE),
    "kv_dtype": "the profile's",
    "async_scheduling": "the engine's default: on since vLLM 0.14",
    "speculation": "none",
}
"""Optional columns of a row, and columns of a recipe; what is assumed where neither has one."""
FORMS = {
    "max_num_seqs": (r"[1-9]\d*|clients", "a whole number, or 'clients'"),
    "requests": (r"[1-9]\d*(\*clients)?", "a whole number, or as '3*clients'"),
    "max_num_batched_tokens": (r"[1-9]\d*(\*input)?", "a whole number, or as '2*input'"),
    "memory_share": (r"0?\.\d*[1-9]\d*|1(\.0*)?", "a number above 0, at most 1"),
    "kv_dtype": ("|".join(KV_BYTES), f"one of {', '.join(KV_BYTES)}"),
    "async_scheduling": ("[01]", "0 or 1"),
    "shortest": (r"0?\.\d*[1-9]\d*|1(\.0*)?", "a number above 0, at most 1"),
    "receive_every": (r"[1-9]\d*", "a whole number"),
    "least_batch": (r"[1-9]\d?", "a whole number below 100"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of each rank of an engine, and of its run."""

    max_running: int
    requests: int
    """Of the whole run; as many at once as there are clients."""
    batched_tokens: int
    memory_share: float
    kv_dtype: str
    """Empty: the profile's."""
    speculation: str
    shortest: float
    """Lengths are drawn from this part of the given ones."""
    receive_every: int
    """Iterations of decoding between looks at requests that came."""
    least_batch: int
    """Sequences, of all ranks, of which fewer take the time."""
    assumed: tuple[str, ...]
    """Names of `ASSUMED` that neither the row nor a recipe states."""


@cache
def recipes() -> tuple[Mapping[str, str], ...]:
    """Read the published recipes that are shipped, in their order."""
    with RECIPES.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def recipe_of(known: Mapping[str, str]) -> Mapping[str, str]:
    """Return the recipe of a run with these cells (`inputs` as "1024/8192") and `date`, or {}."""

    def fits(recipe: Mapping[str, str]) -> bool:
        since, until, date = recipe["since"], recipe["until"], known["date"]
        dated = not (since or until) or (date != "" and since <= date <= (until or date))
        return dated and all(recipe[n] in ("", known[n]) for n in known if n != "date")

    return next(filter(fits, recipes()), {})


def limits(
    cells: Mapping[str, str],
    *,
    clients: int,
    input_tokens: int,
    usual_tokens: int = MAX_BATCHED_TOKENS,
) -> Limits:
    """Read the limits of a row from its cells and its recipe's; `usual_tokens` are of an iteration
    where neither says.

    Raises:
        ValueError: a cell is not of its form; the message names column and form.
    """
    found = {name: cells.get(name, "") for name in (*FORMS, *ASSUMED)}
    for name, (form, words) in FORMS.items():
        if found[name] and not re.fullmatch(form, found[name]):
            raise ValueError(f"{name} is {found[name]!r}, not {words}")
    sequences, tokens = found["max_num_seqs"], found["max_num_batched_tokens"]
    requests, _, each = found["requests"].partition("*")
    times, _, unit = tokens.partition("*")
    return Limits(
        max_running=int(sequences) if sequences.isdecimal() else clients,
        requests=int(requests) * (clients if each else 1) if requests else 10 * clients,
        batched_tokens=int(times or usual_tokens) * (input_tokens if unit else 1),
        memory_share=float(found["memory_share"] or MEMORY_SHARE),
        kv_dtype=found["kv_dtype"],
        speculation=found["speculation"],
        shortest=float(found["shortest"] or SHORTEST),
        receive_every=int(found["receive_every"] or 1),
        least_batch=int(found["least_batch"] or 1),
        assumed=tuple(name for name in ASSUMED if not found[name]),
    )


def with_limits(
    table: LatencyTable, profile: Profile, own: Limits, *, engine: str = "vllm"
) -> LatencyTable:
    """Return a table with an engine's memory share, KV precision and least batch: capacity, and the
    time of a token of context, go with the bytes of a number of the KV."""
    gpu, shape = GPU_CLASSES.get(profile.gpu), shape_of(profile)
    known = shape.kv_element_bytes if shape is not None else 2
    ratio = KV_BYTES[own.kv_dtype] / known if own.kv_dtype else 1.0
    tokens = float(table.kv_capacity_tokens)
    if engine == "sglang":
        share = None if "memory_share" in own.assumed else own.memory_share
        tokens += table.dp * kv_gain_tokens(profile, profile.shape(table.tp), share)
    elif gpu is not None and profile.source.package != MEASURED:
        each = profile.kv_bytes_per_token / min(table.tp, profile.kv_heads or table.tp)
        tokens += table.dp * (own.memory_share - MEMORY_SHARE) * gpu.memory / each
    return replace(
        table,
        kv_capacity_tokens=max(0, int(tokens / ratio)),
        base_s=[table.base_s[n and max(n, own.least_batch)] for n in range(len(table.base_s))],
        per_context_s=[ratio * each for each in table.per_context_s],
    )
