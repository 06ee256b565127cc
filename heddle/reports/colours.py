"""One colour for each policy, whatever draws it: PNG figures, the page, the experiments.

A policy keeps its colour in every figure. Lines of one figure that share a colour, such as two
seeds of a policy, differ in their dashes.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32


class Shade(NamedTuple):
    """A colour on a light and on a dark background."""

    light: str
    dark: str


# After Okabe and Ito: the first eight stay distinct under all common kinds of colour blindness.
SHADES: Final = (
    Shade("#0072b2", "#4fa9e8"),
    Shade("#d55e00", "#ff8b4a"),
    Shade("#00845f", "#3cc79b"),
    Shade("#b85c98", "#e39bcb"),
    Shade("#96710a", "#e2bf52"),
    Shade("#3a96cf", "#94d4ff"),
    Shade("#7a4fc4", "#b494f2"),
    Shade("#4d5563", "#b4bdca"),
    Shade("#8c564b", "#d29c8f"),
    Shade("#6b7d00", "#b5c93c"),
    Shade("#007c91", "#4cc3d9"),
    Shade("#b3003c", "#ff7a9c"),
    Shade("#3d4a9e", "#8f9ff5"),
    Shade("#2f6f3a", "#86c68d"),
    Shade("#a0522d", "#dba27f"),
    Shade("#5b3fa0", "#a68ce6"),
    Shade("#9b6fd1", "#cdb0f5"),
    Shade("#00695c", "#66bfb0"),
    Shade("#c2185b", "#f48fb1"),
    Shade("#37658c", "#8ab6da"),
    Shade("#7f7f00", "#cccc4d"),
    Shade("#845ec2", "#c6a8f0"),
    Shade("#b0651d", "#e9ab6d"),
    Shade("#1f6f8b", "#7fc4dc"),
    Shade("#9c4668", "#df9ab6"),
    Shade("#4f7942", "#a3cc94"),
    Shade("#6a5acd", "#b3a8f2"),
    Shade("#a33b20", "#f09a80"),
    Shade("#8a3ffc", "#be95ff"),
)
_OWN: Final = (
    "heddle",
    "verl",
    "heddle+oracle",
    "verl-star",
    "slime",
    "heddle-paper",
    "heddle+never",
    "heddle+sticky+never",
    "heddle+fixed+keep_engines",
    "heddle+fcfs",
    "heddle+keep_engines",
    "verl-2026",
    "slime-2026",
    "sticky_least_loaded",
    "prime-rl",
    "verl-affinity",
    "libra-cmlfq",
    "libra-cmlfq-release",
    "continuum",
    "thunderagent",
    "seer",
    "program-scheduling",
    "rollart",
    "rollart-measured",
    "progress-ttl",
    "uniboost",
    "llm-d",
    "dynamo",
    "fireworks-aimd",
)
"""Policies with a shade of their own, in the order of `SHADES`; others share these by their name.
"""
_SHARED: Final = 12
"""The number of shades that others share; fixed, so that a shade more changes no colour."""
DASHES: Final = ("-", "--", ":", "-.")


def policy_shade(policy: str) -> int:
    """The index in `SHADES` of a policy's colour; the same for a name in every figure."""
    return _OWN.index(policy) if policy in _OWN else crc32(policy.encode()) % _SHARED


def policy_colour(policy: str) -> str:
    """The colour of a policy on a light background."""
    return SHADES[policy_shade(policy)].light


def policy_dashes(policies: Sequence[str]) -> list[int]:
    """For each line of a figure an index in `DASHES`: how many before it have its colour."""
    shades = [policy_shade(policy) for policy in policies]
    return [shades[:at].count(shade) % len(DASHES) for at, shade in enumerate(shades)]


def style_sheet() -> str:
    """CSS variables `--run-0` and so on: `SHADES` in either colour scheme."""
    light, dark = (
        " ".join(f"--run-{index}: {shade[scheme]};" for index, shade in enumerate(SHADES))
        for scheme in (0, 1)
    )
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
