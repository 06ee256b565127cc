"""`--sweep`: several values of a key, each of which is tried."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import rich_click as click

from heddle.cli.engine_options import positive_numbers
from heddle.config_error import ConfigError
from heddle_rollout.speculation import MAX_DRAFTS

if TYPE_CHECKING:
    from heddle.cli.options import Verb

BEST: Final[Literal["best"]] = "best"
"""All values that make sense, as the documentation of each key says."""

Values: TypeAlias = Any
"""`BEST`, or the values to try."""

WATERFALL: Final = "waterfall"
"""Parts of `heddle`, each added to those before it."""

KINDS: Final[Mapping[str, str]] = {
    "cluster.tp": "numbers",
    "cluster.max_running": "numbers",
    "cluster.gpus": "listed numbers",
    "cluster.gpu": "listed names",
    "cluster.roles": BEST,
    "loop.train_gpus": "numbers",
    "policy.parts": WATERFALL,
}
"""What can be tried of a key: numbers or `BEST`; listed ones, without `BEST`; or one word alone."""


def sweep_option(*keys: str) -> "Verb":
    """Return the decorator that adds `--sweep` for these keys to a verb."""
    return click.option(
        "--sweep",
        "sweeps",
        multiple=True,
        metavar="KEY=A,B|best",
        help=f"Values of a key to try; may be repeated. Keys: {', '.join(keys)}",
    )


def read_sweeps(
    texts: Sequence[str], keys: Sequence[str], *, tp: str | None = None
) -> dict[str, Values]:
    """Read every `--sweep`, and `--tp best`, the short form of its own.

    Raises:
        ConfigError: a key cannot be swept here, is named twice, or its values do not fit it.
    """
    found: dict[str, Values] = {}
    for text in [*texts, *(["cluster.tp=best"] if tp == BEST else [])]:
        key, equals, listed = (part.strip() for part in text.partition("="))
        if not equals or key not in keys:
            raise ConfigError(
                f"--sweep {text}: write KEY=A,B or KEY=best, with one of the keys {', '.join(keys)}"
            )
        if key in found:
            raise ConfigError(f"--sweep {text}: {key} is swept twice; write all values in one")
        found[key] = _values(text, KINDS[key], listed)
    return found


def best_speculation(text: str | None) -> tuple[str | None, str | None]:
    """Divide `--speculation`: a setting of the cluster, or what asks for the best one.

    An acceptance that is a file of `/metrics` becomes the one that it counts.

    Raises:
        ConfigError: the file has no counters of drafts.
    """
    method, drafts, file = (text or "").split(":", 2) if (text or "").count(":") > 1 else ("",) * 3
    if file and Path(file).is_file():
        from heddle.cluster.drafters import counted_acceptance

        most = int(drafts) if drafts.isdecimal() else MAX_DRAFTS
        text = f"{method}:{drafts}:" + "/".join(map(str, counted_acceptance(Path(file))[:most]))
    if text is not None and BEST in text.split(":")[:2]:
        return None, text
    return text, None


def _values(text: str, kind: str, listed: str) -> Values:
    if kind in (BEST, WATERFALL):
        if listed != kind:
            raise ConfigError(f"--sweep {text}: only {kind} can be tried; set one value by --set")
        return listed
    if listed == BEST and not kind.startswith("listed"):
        return BEST
    names = [name.strip() for name in listed.split(",")]
    if kind.endswith("names"):
        if not all(names):
            raise ConfigError(f"--sweep {text}: write names with commas between, as h100,h200")
        return names
    numbers = positive_numbers(listed)
    if not numbers:
        also = "" if kind.startswith("listed") else f", or {BEST}"
        raise ConfigError(f"--sweep {text}: write whole numbers from 1, as 1,2,4{also}")
    return numbers
