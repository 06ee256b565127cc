"""How well predictors rank what is left, online: `python experiments/predictor/online.py`.

All trajectories of a rollout run side by side (or a share `--slots` of them, in order of arrival),
each at `--tokens-per-s`; tools take their recorded time. A predictor sees what the controller would
show it, in order of time, and predicts whenever a step is queued or a tool starts. Nothing here
depends on a cluster: this measures estimates, not what a scheduler makes of them.

Rows: Spearman's rank correlation of estimate and true remaining output tokens, then the recall of
the 20 % with most left. Columns: after 0, 1, 2, 4 and 8 steps, over the trajectories that have
another step, each at its own time; when 25, 50 and 75 % have ended, over all that have not,
by the estimate *held* since its last prediction, and by a *new* one. A predictor with equal values
for all has correlation 0 and, with random ties, recall 0.2.
"""

import argparse
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
from scipy.stats import rankdata

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import EngineId, GroupId, RolloutId, TrajectoryId
from heddle_core.policy import Predictor
from heddle_core.predict.group import GroupPredictor
from heddle_core.predict.history import HistoryPredictor
from heddle_core.predict.none import NoPrediction
from heddle_core.predict.progressive import ProgressivePredictor
from heddle_core.trajectory import Trajectory
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
    predictions: int = 0
    predict_s: float = 0.0
    observations: int = 0
    observe_s: float = 0.0


@dataclass(slots=True)
class Replay:
    """One rollout, in order of time."""

    scripts: Sequence[TrajectoryScript]
    predictor: Predictor
    tokens_per_s: float
    slots: int
    ranks: Ranks = field(default_factory=Ranks)

    def run(self) -> Ranks:
        """Play the rollout; return the estimates and the true values."""
        scripts, total = self.scripts, [_total(s) for s in self.scripts]
        ts = [_arrival(s) for s in scripts]
        last = [self._predict(t) for t in ts]
        live = dict.fromkeys(range(len(ts)))
        marks = [(math.ceil(share * len(ts)), share) for share in ENDED]
        waiting = iter(range(len(ts)))
        queue: list[tuple[float, int]] = []

        def start(index: int, now_s: float) -> None:
            """Record an estimate made as step `ts[index].step` is queued; let the step run."""
            t = ts[index]
            last[index] = self._predict(t)
            if t.step in self.ranks.after:
                self.ranks.after[t.step].append((last[index], total[index] - t.output_tokens))
            step_s = scripts[index].steps[t.step].output_tokens / self.tokens_per_s
            heapq.heappush(queue, (now_s + step_s, index))

        for index, _ in zip(waiting, range(self.slots), strict=False):
            start(index, 0.0)
        while queue:
            now_s, index = heapq.heappop(queue)
            t, script = ts[index], scripts[index]
            step = script.steps[t.step]
            if t.phase == "tool":
                self._return(t, script)
                start(index, now_s)
                continue
            t.phase = "tool"
            t.output_tokens += step.output_tokens
            ends = t.step + 1 == len(script.steps)
            self._observe_step(t, step.output_tokens, now_s, ends=ends)
            if not ends:
                last[index] = self._predict(t)
                heapq.heappush(queue, (now_s + step.tool_s, index))
                continue
            self._observe_finish(t)
            del live[index]
            while marks and len(ts) - len(live) >= marks[0][0]:
                _, share = marks.pop(0)
                left = {i: float(total[i] - ts[i].output_tokens) for i in live}
                self.ranks.held[share] = [(last[i], true) for i, true in left.items()]
                self.ranks.anew[share] = [
                    (self.predictor.remaining_tokens(ts[i]), true) for i, true in left.items()
                ]
            following = next(waiting, None)
            if following is not None:
                start(following, now_s)
        return self.ranks

    def _predict(self, t: Trajectory) -> float:
        begun_s = perf_counter()
        estimate = self.predictor.remaining_tokens(t)
        self.ranks.predict_s += perf_counter() - begun_s
        self.ranks.predictions += 1
        return estimate

    def _observe_step(self, t: Trajectory, output_tokens: int, now_s: float, *, ends: bool) -> None:
        event = StepFinished(
            time_s=now_s,
            trajectory=t.id,
            step=t.step,
            engine=EngineId("e0"),
            output_tokens=output_tokens,
            reason="answer" if ends else "tool_call",
        )
        begun_s = perf_counter()
        self.predictor.observe_step(t, event)
        self.ranks.observe_s += perf_counter() - begun_s
        self.ranks.observations += 1

    def _observe_finish(self, t: Trajectory) -> None:
        t.phase = "finished"
        begun_s = perf_counter()
        self.predictor.observe_finish(t)
        self.ranks.observe_s += perf_counter() - begun_s
        self.ranks.observations += 1

    def _return(self, t: Trajectory, script: TrajectoryScript) -> None:
        step = script.steps[t.step]
        t.step += 1
        t.phase = "queued"
        t.tool_s += step.tool_s
        t.context_tokens = script.steps[t.step].prompt_tokens
        event = ToolReturned(
            time_s=0.0,
            trajectory=t.id,
            step=t.step - 1,
            tool=step.tool or "",
            ok=step.tool_ok,
            observation_tokens=step.tool_tokens,
            context_tokens=t.context_tokens,
        )
        begun_s = perf_counter()
        self.predictor.observe_tool(t, event)
        self.ranks.observe_s += perf_counter() - begun_s
        self.ranks.observations += 1


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


def _total(script: TrajectoryScript) -> int:
    return sum(step.output_tokens for step in script.steps)


def _arrival(script: TrajectoryScript) -> Trajectory:
    prompt = script.steps[0].prompt_tokens
    return Trajectory(
        id=TrajectoryId(script.id),
        rollout=RolloutId("rollout"),
        group=GroupId(script.group),
        task=script.task,
        weights_version=0,
        prompt_tokens=prompt,
        arrived_s=0.0,
        context_tokens=prompt,
        runnable_s=0.0,
    )


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
    """What is compared; *mean known* has the mean of an earlier rollout."""
    mean = sum(map(_total, scripts)) / len(scripts)
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
    times = [1e6 * ranks.predict_s / ranks.predictions, 1e6 * ranks.observe_s / ranks.observations]
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
        print(f"  {predictor:22} predicted in {mean[-2]:.1f} us, observed in {mean[-1]:.1f} us")


def main() -> None:
    """Print the table."""
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
                slots = max(1, round(args.slots * len(scripts)))
                replay = Replay(scripts, make(), args.tokens_per_s, slots)
                rows.setdefault(predictor, []).append(row(replay.run(), seed))
            if name not in WORKLOADS:
                break
        if rows:
            repeats = len(rows["none"])
            show(f"{name}: {len(scripts or ())} trajectories, {repeats} seed(s)", rows)


if __name__ == "__main__":
    main()
