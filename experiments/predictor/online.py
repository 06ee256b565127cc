"""How well predictors rank what is left, online: `python experiments/predictor/online.py`.

All trajectories of a rollout run side by side (or a share `--slots` of them, in order of arrival),
each at `--tokens-per-s`; tools take their recorded time. A predictor sees what a controller shows
it, in order of time, and estimates whenever a step is queued or a tool starts. Nothing here depends
on a cluster: this measures estimates, not what a scheduler makes of them.

Rows: Spearman's rank correlation of estimate and true remaining output tokens, then the recall of
the 20 % with most left. Columns: after 0, 1, 2, 4 and 8 steps, over the trajectories that have
another step, each asked at its own time; when 25, 50 and 75 % have ended, over all that run,
by the estimate *held* since each was last asked, and asked *anew*. A predictor without a rank of
its own (all ties) has correlation 0 and, ties broken by lot, recall 0.2.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from scipy.stats import rankdata

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import TrajectoryId
from heddle_core.parts.predictor import (
    GroupPredictor,
    HistoryPredictor,
    NoPrediction,
    ProgressivePredictor,
)
from heddle_core.policy import Predictor, TrajectoryView
from heddle_predict.play import Moment, Pace, play, total_tokens
from heddle_trace import MissingRules, TrajectoryScript, complete, read_trace
from heddle_trace.oracle import Oracle
from heddle_trace.schema import Trace
from heddle_trace.synth import synth
from heddle_trace.workloads import WORKLOADS

STEPS = (0, 1, 2, 4, 8)
ENDED = (0.25, 0.50, 0.75)
SHARED = Path("../shared/traces")
TOP = 0.2
FEWEST = 20  # a rank correlation of fewer than these says little

Pairs = list[tuple[float, float]]


@dataclass(slots=True)
class Ranks:
    """(estimate, true remaining) pairs of one replay, and the mean time of a call."""

    after: dict[int, Pairs] = field(default_factory=lambda: {k: [] for k in STEPS})
    held: dict[float, Pairs] = field(default_factory=lambda: {s: [] for s in ENDED})
    anew: dict[float, Pairs] = field(default_factory=lambda: {s: [] for s in ENDED})
    asked: int = 0
    asked_s: float = 0.0
    shown: int = 0
    shown_s: float = 0.0


class Asking:
    """A watcher of one played rollout: shows it to a predictor, and keeps what is estimated."""

    def __init__(self, scripts: Sequence[TrajectoryScript], predictor: Predictor) -> None:
        self.ranks = Ranks()
        self._predictor = predictor
        self._total = [total_tokens(script) for script in scripts]
        self._marks = [(math.ceil(share * len(scripts)), share) for share in ENDED]
        self._live: dict[TrajectoryId, tuple[TrajectoryView, int, float]] = {}
        """Trajectories that have arrived and not ended: view, number and last estimate."""
        self._ended = 0

    def on_question(self, t: TrajectoryView, index: int, moment: Moment) -> None:
        """Estimate what is left."""
        begun_s = perf_counter()
        estimate = self._predictor.remaining_tokens(t)
        self.ranks.asked_s += perf_counter() - begun_s
        self.ranks.asked += 1
        self._live[t.id] = (t, index, estimate)
        if moment == "queued" and t.step in self.ranks.after:
            self.ranks.after[t.step].append((estimate, self._total[index] - t.output_tokens))

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self._show(lambda: self._predictor.observe_step(t, event))

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._show(lambda: self._predictor.observe_tool(t, event))

    def observe_finish(self, t: TrajectoryView) -> None:
        """Show it; when 25, 50 and 75 % have ended, estimate all that run."""
        self._show(lambda: self._predictor.observe_finish(t))
        del self._live[t.id]
        self._ended += 1
        while self._marks and self._ended >= self._marks[0][0]:
            _, share = self._marks.pop(0)
            for other, index, estimate in self._live.values():
                true = float(self._total[index] - other.output_tokens)
                self.ranks.held[share].append((estimate, true))
                self.ranks.anew[share].append((self._predictor.remaining_tokens(other), true))

    def _show(self, observe: Callable[[], None]) -> None:
        begun_s = perf_counter()
        observe()
        self.ranks.shown_s += perf_counter() - begun_s
        self.ranks.shown += 1


def spearman(pairs: Pairs) -> float:
    """Rank correlation; 0 when one side does not vary, NaN for too few pairs."""
    if len(pairs) < FEWEST:
        return math.nan
    ranks = [rankdata(side) for side in zip(*pairs, strict=True)]
    if min(r.std() for r in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def recall(pairs: Pairs, rng: np.random.Generator) -> float:
    """Share of the truly longest `TOP` found in the `TOP` with the largest estimates."""
    if len(pairs) < FEWEST:
        return math.nan
    estimate, true = (np.array(side) for side in zip(*pairs, strict=True))
    size = round(TOP * len(pairs))
    lots = [rng.random(len(pairs)) for _ in range(2)]
    by_estimate = np.lexsort((lots[0], -estimate))[:size]
    by_truth = np.lexsort((lots[1], -true))[:size]
    return len(np.intersect1d(by_estimate, by_truth)) / size


def load(name: str, trajectories: int, seed: int) -> tuple[TrajectoryScript, ...] | None:
    """Scripts of a synthetic workload or of a shared trace; None where that trace is absent."""
    if name in WORKLOADS:
        trace = Trace(name, synth(name, trajectories, seed), "")
    elif (SHARED / f"{name}.jsonl.gz").is_file():
        trace = read_trace(SHARED / f"{name}.jsonl.gz")
    else:
        return None
    rules = MissingRules(
        tool_s="zero",
        tool_tokens="zero",
        prompt_tokens="zero",
        output_tokens="sample",
        cap_tool_s=600.0,
    )
    return complete(trace, rules=rules, seed=seed)[0]


def predictors(
    scripts: Sequence[TrajectoryScript],
) -> dict[str, Callable[[], Predictor]]:
    """What is compared; *mean known* is told the mean, as an earlier rollout would show it."""
    mean = sum(map(total_tokens, scripts)) / len(scripts)
    return {
        "none": NoPrediction,
        "group": GroupPredictor,
        "history, none given": lambda: HistoryPredictor({}),
        "progressive": ProgressivePredictor,
        "  mean known": lambda: ProgressivePredictor(typical_tokens=mean, typical_weight=100.0),
        "oracle": lambda: Oracle(scripts),
    }


def row(ranks: Ranks, seed: int) -> list[float]:
    """All figures of one replay, in the order of the columns."""
    rng = np.random.default_rng(seed)
    sets = [*ranks.after.values(), *ranks.held.values(), *ranks.anew.values()]
    times = [1e6 * ranks.asked_s / ranks.asked, 1e6 * ranks.shown_s / ranks.shown]
    return [*(spearman(p) for p in sets), *(recall(p, rng) for p in sets), *times]


def show(name: str, rows: dict[str, list[list[float]]]) -> None:
    """Print means over the repeats, and the time of a prediction and of an observation."""
    means = {predictor: np.mean(repeats, axis=0) for predictor, repeats in rows.items()}
    half = len(STEPS) + 2 * len(ENDED)
    head = [f"{k} steps" for k in STEPS]
    head += [f"{kind} {s:.0%}" for kind in ("held", "anew") for s in ENDED]
    print(f"\n{name}")
    for title, part in (("Spearman", slice(half)), ("recall, longest 20 %", slice(half, -2))):
        print(f"  {title:22}" + "".join(f"{h:>9}" for h in head))
        for predictor, mean in means.items():
            cells = ["        -" if math.isnan(v) else f"{v:9.2f}" for v in mean[part]]
            print(f"  {predictor:22}" + "".join(cells))
    for predictor, mean in means.items():
        print(f"  {predictor:22} asked {mean[-2]:.1f} us, shown {mean[-1]:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shared = ["tbench_mini", "tau2_retail", "tau_airline", "hotpotqa_react", "mint"]
    parser.add_argument("names", nargs="*", default=[*WORKLOADS, *shared])
    parser.add_argument("--trajectories", type=int, default=1600, help="of a synthetic workload")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=101)
    parser.add_argument("--slots", type=float, default=1.0, help="share that runs at once")
    parser.add_argument("--tokens-per-s", type=float, default=50.0)
    args = parser.parse_args()
    for name in args.names:
        rows: dict[str, list[list[float]]] = {}
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            scripts = load(name, args.trajectories, seed)
            if scripts is None:
                print(f"\n{name}: skipped, {SHARED / f'{name}.jsonl.gz'} is not there")
                break
            for predictor, make in predictors(scripts).items():
                asking = Asking(scripts, make())
                play(
                    scripts,
                    Pace(slots=args.slots, tokens_per_s=args.tokens_per_s),
                    asking,
                    asking.on_question,
                )
                rows.setdefault(predictor, []).append(row(asking.ranks, seed))
            if name not in WORKLOADS:
                break
        if rows:
            repeats = len(rows["none"])
            show(f"{name}: {len(scripts or ())} trajectories, {repeats} seed(s)", rows)


if __name__ == "__main__":
    main()
