"""The settings that a comparison tried with the policy of a run, from the comparison's index."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heddle.runs import Run, RunError
from heddle.runs.comparison_folder import ComparisonIndex, IndexRow, read_index

RUNNING = 100
"""Running steps of an engine in the setting of the Heddle paper, arXiv 2603.28101."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedSettings:
    """The settings of one policy; makespans are means over the comparison's seeds."""

    row: str
    """The run's row in the comparison: policy and setting."""
    among: str
    """Whether the row is the best, and of which settings."""
    narrowest: str
    """The setting with the least TP degree; of several numbers of running steps, 100 if tried."""
    narrowest_s: float


def tried_settings(runs: Sequence[Run]) -> list[TriedSettings | None]:
    """Of each run, in order; None without an index, and where nothing was tried."""
    indexes: dict[Path, ComparisonIndex | None] = {}
    found = []
    for run in runs:
        folder = run.path.resolve().parent
        if folder not in indexes:
            try:
                indexes[folder] = read_index(folder)
            except RunError:
                indexes[folder] = None
        index = indexes[folder]
        found.append(None if index is None else _tried(run, index))
    return found


def _tried(run: Run, index: ComparisonIndex) -> TriedSettings | None:
    name = run.path.resolve().name
    rows = {row.policy: row for row in index.policies}
    own = next((rows.get(each.policy) for each in index.runs if Path(each.run).name == name), None)
    if own is None or own.preset is None:
        return None
    swept = [row for row in index.policies if row.preset == own.preset and row.roles == own.roles]
    if len(swept) < 2:
        return None
    narrowest = min(swept, key=lambda row: (row.tp, row.max_running != RUNNING))
    tps = list(dict.fromkeys(_tp(row) for row in swept))
    slots = len({row.max_running for row in swept})
    drafts = len({row.speculation for row in swept})
    among = [f"TP {', '.join(tps)}"] if any(tps) else []
    among += [f"{slots} numbers of running steps"] if slots > 1 else []
    among += [f"{drafts} settings of speculative decoding"] if drafts > 1 else []
    least = [f"TP {_tp(narrowest)}"] if _tp(narrowest) else []
    least += [f"{narrowest.max_running} running"] if slots > 1 else []
    least += [f"speculation {narrowest.speculation}"] if drafts > 1 else []
    return TriedSettings(
        row=own.policy,
        among=f"{'best' if own.best else 'one'} of {' with '.join(among)}",
        narrowest=", ".join(least),
        narrowest_s=narrowest.makespan_s.mean,
    )


def _tp(row: IndexRow) -> str:
    """The TP degrees of its engines, as its name has them: 4, or 4@h800+2@h20. Empty where its
    policy plans them."""
    setting = row.policy.removeprefix(f"{row.preset}@")
    return setting[2:].partition("/")[0] if setting.startswith("tp") else ""
