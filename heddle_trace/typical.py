"""Typical seconds of tools by kind, and the kind of a tool by its name."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from heddle_trace.columns import Floats

TABLE: Final = Path(__file__).with_name("typical_tools.toml")
LEVELS: Final = [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99]
"""Quantiles of the measured kinds; below the first and above the last a draw is theirs."""

OTHER: Final = "other"
"""The kind of a tool whose name shows no other."""

_KINDS: Final = (
    ("judge", "judge|grader?|reward|critic|rubric|verifier|evaluat(e|or)"),
    ("tests", "tests?|pytest|unittest|tox"),
    ("browser", "browser?|browse|browsing|webpage|page|click|navigate|goto|screenshot|playwright"),
    ("search", "search|google|bing|lookup|retriev(e|al|er)|wikipedia|fetch|crawl|rag"),
    (
        "python",
        "python3?|ipython|jupyter|code|interpreter|calculator|calculate|solver|notebook|repl",
    ),
    ("shell", "bash|shell|sh|terminal|command|cmd|exec|execute|run|sandbox|powershell"),
    (
        "edit",
        "edit|editor|write|read|open|create|insert|patch|file|view|replace|grep|glob|ls|cat|str|todo",
    ),
)
"""Kinds in order of precedence, with the words of a name that show them."""

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+")
_WHOLE: Final = (
    ("user", "((ask|message|simulated)_?)?(user|human)"),
    ("edit", "find_file|search_(file|dir)|file_?search"),
    ("shell", "unspecified"),
    (OTHER, "toolsearch"),
)
"""Whole names: their words would show another kind, or none. Most unnamed tools of recorded agents
are shells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalSeconds:
    """Seconds of one kind of tool: `seconds` at the quantiles `levels`, both ascending."""

    levels: Sequence[float]
    seconds: Sequence[float]
    source: str

    def drawn(self, draws: Floats) -> Floats:
        """Seconds of each of several numbers from 0 to 1, between quantiles on a log scale."""
        logs = np.log(np.maximum(self.seconds, 1e-6))
        return np.minimum(np.exp(np.interp(draws, self.levels, logs)), self.seconds[-1])


@cache
def typical_seconds() -> Mapping[str, TypicalSeconds]:
    """The shipped table, by kind."""
    found = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            kind: TypicalSeconds(
                levels=tuple(row["levels"]), seconds=tuple(row["seconds"]), source=row["source"]
            )
            for kind, row in found.items()
        }
    )


@cache
def kind_of(tool: str) -> str:
    """The kind of a tool by the words of its name; `OTHER` where they show none.

    The prefix of a server is left out, as in ``mcp__github__get_file``.
    """
    own = tool.rpartition("__")[2] or tool
    for kind, pattern in _WHOLE:
        if re.fullmatch(pattern, own, re.IGNORECASE):
            return kind
    words = [word.lower() for word in _WORDS.findall(own)]
    for kind, pattern in _KINDS:
        if any(re.fullmatch(pattern, word) for word in words):
            return kind
    return OTHER
