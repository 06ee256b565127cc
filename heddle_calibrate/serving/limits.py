"""Limits that an engine was started with: of a row, else of its published recipe, else assumed."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from heddle_calibrate.roofline.config_fields import ModelConfigError
from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.locate import find_model
from heddle_calibrate.roofline.memory import MAX_BATCHED_TOKENS, MEMORY_SHARE, release
from heddle_sim.latency import LatencyTable
from heddle_sim.profile_files import Profile

RECIPES = Path(__file__).with_name("recipes.csv")
"""First row that fits a run counts; empty cells fit all, `since` and `until` its date."""
ASYNC_SINCE = (0, 14)
"""vLLM schedules asynchronously by default from here."""
ASSUMED = {
    "max_num_seqs": "as many as clients",
    "requests": "10 for each client",
    "max_num_batched_tokens": str(MAX_BATCHED_TOKENS),
    "memory_share": str(MEMORY_SHARE),
    "kv_dtype": "the profile's",
    "async_scheduling": "since vLLM 0.14",
    "speculation": "none",
}
"""Optional columns of a row, and columns of a recipe; what is assumed where neither has one."""
KV_BYTES = {"fp8": 1, "bf16": 2}
CELLS = {
    "max_num_seqs": "a whole number, or 'clients'",
    "requests": "a whole number",
    "max_num_batched_tokens": "a whole number, or as '2*input'",
    "memory_share": "a number from 0.1 to 1",
    "kv_dtype": f"one of {', '.join(KV_BYTES)}",
    "async_scheduling": "0 or 1",
    "speculation": "the method's name",
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
    asynchronous: bool
    """Whether the host prepares a step while the GPU works on the one before."""
    speculation: str
    assumed: tuple[str, ...]
    """Names of `ASSUMED` that neither the row nor a recipe states."""


@cache
def recipes() -> tuple[Mapping[str, str], ...]:
    """Read the published recipes that are shipped, in their order."""
    with RECIPES.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def recipe_of(known: Mapping[str, str]) -> Mapping[str, str]:
    """Return the recipe of a run with these cells, or an empty one.

    `known` has the columns of a recipe before its limits, `inputs` as "1024/8192" and `date`.
    """

    def fits(recipe: Mapping[str, str]) -> bool:
        names = ("backend", "model", "gpu", "precision", "tp", "inputs", "clients", "versions")
        alike = all(recipe[name] in ("", known[name]) for name in names)
        date = known["date"]
        until, since = recipe["until"] or "9", recipe["since"]
        return alike and (not (recipe["until"] or since) or (since <= date <= until and date != ""))

    return next(filter(fits, recipes()), {})


def limits(cells: Mapping[str, str], *, clients: int, input_tokens: int, version: str) -> Limits:
    """Read the limits of a row from its cells and its recipe's.

    Raises:
        ValueError: a cell is not of its form; the message names column and form.
    """
    found = {name: cells.get(name, "") for name in ASSUMED}
    for name, text in found.items():
        if text and not _of_form(name, text):
            raise ValueError(f"{name} is {text!r}, not {CELLS[name]}")
    sequences, tokens = found["max_num_seqs"], found["max_num_batched_tokens"]
    times, _, unit = tokens.partition("*")
    budget = int(times) * (input_tokens if unit else 1) if tokens else MAX_BATCHED_TOKENS
    asynchronous = found["async_scheduling"]
    return Limits(
        max_running=int(sequences) if sequences.isdecimal() else clients,
        requests=int(found["requests"] or 10 * clients),
        batched_tokens=budget,
        memory_share=float(found["memory_share"] or MEMORY_SHARE),
        kv_dtype=found["kv_dtype"],
        asynchronous=asynchronous == "1" if asynchronous else release(version) >= ASYNC_SINCE,
        speculation=found["speculation"],
        assumed=tuple(name for name in ASSUMED if not found[name]),
    )


def _of_form(name: str, text: str) -> bool:
    match name:
        case "max_num_seqs" | "requests":
            return (text.isdecimal() and int(text) > 0) or (text, name) == (
                "clients",
                "max_num_seqs",
            )
        case "max_num_batched_tokens":
            times, _, unit = text.partition("*")
            return times.isdecimal() and int(times) > 0 and unit in ("", "input")
        case "memory_share":
            return text.replace(".", "", 1).isdecimal() and 0.1 <= float(text) <= 1
        case "kv_dtype":
            return text in KV_BYTES
        case "async_scheduling":
            return text in ("0", "1")
    return True


# -- a table of another memory share or KV precision -----------------------------------------------


def kv_element_bytes(profile: Profile) -> int:
    """Return bytes of a number of the KV that a profile is of; 2 where its shape is not known."""
    try:
        shape, _ = find_model(profile.model)
    except ModelConfigError:
        return 2
    one = replace(shape, kv_element_bytes=1).kv_bytes_per_token()
    return 1 if profile.kv_bytes_per_token < 1.5 * one else 2


def with_limits(table: LatencyTable, profile: Profile, own: Limits) -> LatencyTable:
    """Return a table with the KV of an engine's memory share and KV precision.

    Tokens per byte, and the time of a token of context, go with the bytes of a number of the KV.
    """
    gpu = GPU_CLASSES.get(profile.gpu)
    ratio = KV_BYTES[own.kv_dtype] / kv_element_bytes(profile) if own.kv_dtype else 1.0
    tokens = float(table.kv_capacity_tokens)
    if gpu is not None:
        each = profile.kv_bytes_per_token / min(table.tp, profile.kv_heads or table.tp)
        tokens += table.dp * (own.memory_share - MEMORY_SHARE) * gpu.memory / each
    return replace(
        table,
        kv_capacity_tokens=max(0, int(tokens / ratio)),
        per_context_s=[ratio * each for each in table.per_context_s],
    )
