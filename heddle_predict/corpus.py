"""Traces made ready to learn from: complete trajectories, split by group."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from heddle_predict.errors import PredictError
from heddle_predict.model import Vocabulary
from heddle_trace.complete import MissingRules, complete
from heddle_trace.files import read_trace
from heddle_trace.history import levels_of
from heddle_trace.schema import Trace, TrajectoryScript

LEAST_GROUPS: Final = 8
"""Fewer cannot be split into groups to learn from and groups to check on."""

_MOST_TOOLS: Final = 8
_LEAST_TOOL_SHARE: Final = 0.01  # of all calls: a rarer tool has too few examples
_MOST_TASKS: Final = 12

# Missing values carry no information: 0 seconds and 0 tokens, the same in every trajectory.
_GAPS: Final = MissingRules(
    tool_s="zero", tool_tokens="zero", prompt_tokens="zero", output_tokens="error"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One trace: its trajectories are played as one rollout."""

    name: str
    sha256: str
    scripts: tuple[TrajectoryScript, ...]
    dropped: int = 0
    """Trajectories left out because the length of one of their steps is not known."""

    def groups(self) -> list[str]:
        """Names of its groups, in order of appearance."""
        return list(dict.fromkeys(script.group for script in self.scripts))


def read_source(path: Path) -> Source:
    """Read a trace to learn from or to evaluate on.

    Raises:
        TraceError: it cannot be read.
        PredictError: it has no output lengths.
    """
    return source_of(read_trace(path), str(path))


def source_of(trace: Trace, label: str) -> Source:
    """Leave out trajectories of unknown length and complete the rest.

    Raises:
        PredictError: none is left.
    """
    known = tuple(r for r in trace.records if all(s.output_tokens is not None for s in r.steps))
    if not known:
        raise PredictError(
            f"{label}: no trajectory has the output_tokens of all its steps, so there is nothing "
            "to learn from or to compare with; use a trace that records them"
        )
    scripts, _ = complete(replace(trace, records=known), rules=_GAPS, seed=0)
    return Source(
        name=trace.name,
        sha256=trace.sha256,
        # They are read very often: as objects, not on demand.
        scripts=tuple(replace(script, steps=tuple(script.steps)) for script in scripts),
        dropped=len(trace.records) - len(known),
    )


def check_groups(sources: Sequence[Source]) -> None:
    """Refuse too few groups to leave some out. Raises PredictError."""
    groups = sum(len(source.groups()) for source in sources)
    if groups < LEAST_GROUPS:
        raise PredictError(
            f"{', '.join(s.name for s in sources)}: too few groups to split ({groups}); a model is "
            f"checked on groups that it has not seen, so give {LEAST_GROUPS} groups or more"
        )


def split(source: Source, *, share: float, seed: int) -> tuple[Source, Source]:
    """Return the source without, and with only, a random `share` of its groups.

    Raises:
        PredictError: it has too few groups.
    """
    check_groups([source])
    groups = source.groups()
    order = np.random.default_rng(seed).permutation(len(groups))
    apart = dict.fromkeys(groups[i] for i in order[: max(1, round(share * len(groups)))])
    kept = tuple(s for s in source.scripts if s.group not in apart)
    held = tuple(s for s in source.scripts if s.group in apart)
    return replace(source, scripts=kept), replace(source, scripts=held)


def vocabulary_of(sources: Sequence[Source]) -> Vocabulary:
    """Name the tasks with their levels, and the tools that are called often."""
    scripts = [script for source in sources for script in source.scripts]
    by_task: dict[str, list[TrajectoryScript]] = {}
    for script in scripts:
        by_task.setdefault(script.task, []).append(script)
    often = sorted(by_task, key=lambda task: (-len(by_task[task]), task))[:_MOST_TASKS]
    calls = Counter(
        name
        for script in scripts
        for step in script.steps[:-1]
        if step.tool is not None
        for name in step.tool.split("+")
    )
    least = _LEAST_TOOL_SHARE * calls.total()
    tools = sorted(calls, key=lambda tool: (-calls[tool], tool))
    return Vocabulary(
        tasks={task: levels_of(by_task[task]) for task in sorted(often)},
        anywhere=levels_of(scripts),
        tools=tuple(tool for tool in tools[:_MOST_TOOLS] if calls[tool] >= least),
    )
