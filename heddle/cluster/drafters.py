"""What makes the drafts of a model, and how many are accepted: the data of `drafters.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from heddle.config_error import ConfigError
from heddle_rollout.speculation import GROUPED, Speculation
from heddle_sim.drafted_tables import Drafter
from heddle_sim.model_names import short_model_name
from heddle_sim.profile_files import Profile
from heddle_sim.profile_parts import DraftHead

DATA = Path(__file__).with_name("drafters.toml")
LOOKED_UP = ("ngram", GROUPED)
"""Methods without weights."""
PRECISIONS = ("-fp8", "-nvfp4")
"""Ends of the names of profiles; a head is of the model, whatever its precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The chance that the first 1, 2, ... drafts are all accepted."""

    accepted: tuple[float, ...]
    source: str
    assumed: bool
    """Whether it is of another family of models, or of another text."""
    by_samples: tuple[tuple[float, ...], ...] = ()
    """Of drafts from other samples: after 0, 1, ... of them; the last is `accepted`."""


@cache
def data() -> Mapping[str, Any]:
    """Read `drafters.toml`."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def methods_of(profile: Profile) -> dict[str, str]:
    """Return the methods of a model, each with the Hugging Face id of its head, where it has one.

    Drafts that are looked up need nothing.
    """
    name = _base(profile.model)
    found = dict.fromkeys(LOOKED_UP, "")
    found |= {method: head.repository for method, head in profile.heads.items()}
    for heads in data()["heads"]:
        if name in heads["models"]:
            found.setdefault(heads["method"], heads["models"][name])
    return found


def drafter_of(profile: Profile, speculation: Speculation) -> Drafter:
    """What makes the drafts of a profile's model.

    Raises:
        ConfigError: the model has no head of this method.
    """
    method, costs = speculation.method, data()["costs"]
    if method in LOOKED_UP:
        return Drafter(
            iteration_s=costs["ngram"]["iteration_s"],
            sequence_s=costs["ngram"]["sequence_s"],
            reject_s_per_token=costs["reject_s_per_token"],
        )
    known = methods_of(profile)
    if method not in known:
        raise ConfigError(
            f"speculation: {profile.model} has no head for {method}: take {' or '.join(known)}, a "
            "model that has one, or a profile of `heddle profile from-config` with profile.head"
        )
    head = _head(profile, method)
    return Drafter(
        pass_s=costs["pass_s"],
        reject_s_per_token=costs["reject_s_per_token"],
        read_bytes=head.read_bytes,
        weight_bytes=head.weight_bytes,
        kv_bytes_per_token=head.kv_bytes_per_token,
    )


def acceptance_of(model: str, method: str) -> Acceptance:
    """Return the published acceptance of a model's family, or of the first other of the method.

    Raises:
        ConfigError: none is published.
    """
    name = _base(model)
    rows = [row for row in data()["acceptance"] if row["method"] == method]
    own = [row for row in rows if row["family"] and name.startswith(row["family"])]
    if not rows:
        raise ConfigError(
            f"speculation: what {method} accepts depends on the text, and no figure is published "
            f"for {model}: state it, as {method}:3:0.5/0.3/0.2, from the engine's counters "
            "(vllm:spec_decode_num_accepted_tokens_per_pos_total over ..._num_drafts_total)"
        )
    row = (own or rows)[0]
    by_samples = tuple(tuple(each) for each in row.get("by_samples", ()))
    return Acceptance(
        accepted=by_samples[-1] if by_samples else _accepted(row),
        source=row["source"],
        assumed=not own,
        by_samples=by_samples,
    )


def counted_acceptance(file: Path) -> tuple[float, ...]:
    """The acceptance that engines count in a file of their `/metrics`, to four digits.

    Raises:
        ConfigError: it cannot be read, or has no counters of drafts.
    """
    from heddle_runtime.vllm_http.metrics import read_acceptance

    try:
        found = read_acceptance(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"speculation: cannot read {file}: {error}") from None
    if not found:
        raise ConfigError(
            f"speculation: {file} counts no drafts (vllm:spec_decode_num_drafts_total): save "
            "/metrics of an engine that has speculated, as by curl"
        )
    return tuple(round(each, 4) for each in found)


def _accepted(row: Mapping[str, Any]) -> tuple[float, ...]:
    """Acceptance by position; of a mean length, with one ratio from each draft to the next."""
    if "accepted" in row:
        return tuple(row["accepted"])
    drafts, wanted = int(row["drafts"]), row["tokens"] - 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        ratio = (low + high) / 2.0
        total = sum(ratio**position for position in range(1, drafts + 1))
        low, high = (ratio, high) if total < wanted else (low, ratio)
    return tuple(round(low**position, 4) for position in range(1, drafts + 1))


def _base(model: str) -> str:
    """Name of a model without its precision."""
    name = short_model_name(model, ())
    for end in PRECISIONS:
        name = name.removesuffix(end)
    return name


def _head(profile: Profile, method: str) -> DraftHead:
    """What a head reads in a pass, has in memory, and keeps of a token."""
    # Only here, because it takes a tenth of a second to import.
    from heddle_calibrate.roofline.draft_heads import eagle3_head, mtp_head
    from heddle_sim.known_models import known_config
    from heddle_sim.model_config import model_shape

    name = _base(profile.model)
    if method in profile.heads:
        return profile.heads[method]
    sizes = data()["sizes"].get(name)
    if sizes is not None:
        return DraftHead(
            read_bytes=sizes["read_bytes"],
            weight_bytes=sizes["read_bytes"],
            kv_bytes_per_token=profile.kv_bytes_per_token / sizes["layers"],
        )
    shape = model_shape(known_config(name), place=name, name=name)
    return mtp_head(shape) if method == "mtp" else eagle3_head(shape)
