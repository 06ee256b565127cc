"""Policies that a search or a comparison tries: all shipped ones, or those of a pattern."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Final

from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle_core.presets import PRESETS

FIRST: Final = "verl"
"""Tried before all others; as it comes, it is what others are compared with."""
BY_GPU_TYPE: Final = ("rollart", "rollart-measured")
"""Policies that place by GPU type."""
OURS: Final = ("heddle", "heddle-paper")
"""Heddle's own policies, which are no baselines."""
_PATTERN = "*?["
_ALL = "all"


def shipped(config: RunConfig) -> list[str]:
    """Policies that a search tries where none is named."""
    several = len(config.cluster.classes) > 1
    rest = [name for name in PRESETS if several or name not in BY_GPU_TYPE]
    return [FIRST, *(name for name in rest if name != FIRST)]


def is_pattern(name: str) -> bool:
    """Whether a name stands for several policies."""
    return name == _ALL or any(c in name for c in _PATTERN)


def matching(names: Sequence[str], config: RunConfig) -> list[str]:
    """The policies that names and patterns such as ``verl*`` stand for, in their order.

    A policy that a pattern stands for is there once; a name that is there twice is kept twice.

    Raises:
        ConfigError: a pattern matches none.
    """
    return expanded(names, shipped(config), "policies")


def expanded(names: Sequence[str], known: Sequence[str], kind: str) -> list[str]:
    """Names, and the `known` ones that patterns match, likewise; `kind`, ``policies`` or such.

    Raises:
        ConfigError: a pattern matches none.
    """
    found: list[str] = []
    by_pattern: set[str] = set()
    for name in names:
        if not is_pattern(name):
            found += [] if name in by_pattern else [name]
            continue
        matched = [each for each in known if name == _ALL or fnmatchcase(each, name)]
        if not matched:
            plain = "".join(c for c in name if c not in "*?[]")
            near = get_close_matches(plain, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"--{kind} {name}: none of the shipped {kind} matches it; did you mean "
                f"{near[0]!r}? heddle {kind} list has all"
            )
        new = [each for each in matched if each not in found]
        found += new
        by_pattern |= set(new)
    return found


def is_ours(policy: str) -> bool:
    """Whether a policy is Heddle's own, or made of it."""
    return policy.partition("+")[0] in OURS


def is_other_system(policy: str) -> bool:
    """Whether a policy is of another system: no part of it comes from Heddle's own policies."""
    return not is_ours(policy)
