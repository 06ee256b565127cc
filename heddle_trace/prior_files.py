"""Shipped histories of the synthetic workloads, for rollouts without an earlier one.

Each is a summary of 6,400 synthetic trajectories under a seed that no shipped trace and no
experiment uses: the distribution of a workload, nothing about any trajectory that is replayed.
``python -m heddle_trace.prior_files`` writes the files again.
"""

from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from heddle_core.estimate.history import History
from heddle_core.json_faults import NO_JSON
from heddle_trace.complete import MissingRules, complete
from heddle_trace.errors import TraceError
from heddle_trace.history import history_of
from heddle_trace.schema import Trace
from heddle_trace.synth import synth
from heddle_trace.table import Scripts
from heddle_trace.workloads import WORKLOADS

FOLDER: Final = Path(__file__).parent / "priors"
SCHEMA: Final = "heddle.prior/1"
COMMAND: Final = "python -m heddle_trace.prior_files"
SEED: Final = 770_001
TRAJECTORIES: Final = 6_400
LONGEST_OF: Final = 8
"""Rollouts, of `SEED` and the next ones, whose longest trajectories are averaged: that of one is
chance, from 9,579 to 20,071 tokens on search."""

_FIGURES: Final = 6
"""Significant figures: more than 6,400 trajectories determine, fewer than floats have."""


class Prior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file: what it was made from, and the `History` in it."""

    schema: str
    command: str
    workload: str
    trajectories: int
    seed: int
    appended_per_output: float
    tool_s_per_output: float
    step_output_tokens: float
    longest_output_tokens: float
    output_quantiles: tuple[float, ...]

    def history(self) -> History:
        """As a policy gets it. Prompts of a synthetic rollout never recur, so none is known."""
        return msgspec.convert(self, History, from_attributes=True)


def known_priors() -> tuple[str, ...]:
    """Workloads that have one, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def read_prior(workload: str) -> tuple[History, str]:
    """Return a workload's prior and the sha256 of its file.

    Raises:
        TraceError: there is none, or its file is damaged.
    """
    path = FOLDER / f"{workload}.json"
    if workload not in known_priors():
        raise TraceError(
            f"no prior history is shipped for workload {workload!r}; there is one for "
            f"{', '.join(known_priors())}"
        )
    data = path.read_bytes()
    try:
        prior = msgspec.json.decode(data, type=Prior)
    except NO_JSON as error:
        raise TraceError(f"{path}: damaged: {error}; make it again with {COMMAND}") from None
    return prior.history(), sha256(data).hexdigest()


def make_prior(workload: str) -> Prior:
    """Summarise the workload's synthetic trajectories of `SEED`, and the longest of several."""
    histories = [history_of(_synthetic(workload, SEED + i)) for i in range(LONGEST_OF)]
    history = histories[0]
    return Prior(
        schema=SCHEMA,
        command=COMMAND,
        workload=workload,
        trajectories=TRAJECTORIES,
        seed=SEED,
        appended_per_output=_rounded(history.appended_per_output),
        tool_s_per_output=_rounded(history.tool_s_per_output),
        step_output_tokens=_rounded(history.step_output_tokens),
        longest_output_tokens=_rounded(fmean(h.longest_output_tokens for h in histories)),
        output_quantiles=tuple(_rounded(q) for q in history.output_quantiles),
    )


def _synthetic(workload: str, seed: int) -> Scripts:
    trace = Trace(workload, synth(workload, TRAJECTORIES, seed), "")
    return complete(trace, rules=MissingRules(), seed=seed)[0]


def write_priors(folder: Path = FOLDER) -> None:
    """Write the file of every synthetic workload."""
    folder.mkdir(exist_ok=True)
    for workload in WORKLOADS:
        data = msgspec.json.format(msgspec.json.encode(make_prior(workload)), indent=1)
        (folder / f"{workload}.json").write_bytes(data + b"\n")


def _rounded(value: float) -> float:
    return float(f"{value:.{_FIGURES}g}")


if __name__ == "__main__":
    write_priors()
