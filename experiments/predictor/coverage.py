"""Are quantiles right in mid-rollout? `python experiments/predictor/coverage.py`.

Rollouts are simulated under `heddle` (Qwen3-14B, 16 H100, 256 slots, engines start in 5 s). At
fixed times, and whenever a tool starts, every unfinished trajectory is put to each model of what is
left: does the total lie at or below the quantile? The share for which it does is the coverage, and
should be the quantile's level.

- `learned`: the trained model's quantiles, relative to the tokens made up to the last step's end,
  from a row made at the time of the question. On synthetic workloads it is the shipped model, on
  recorded traces trees fitted on the first half of the groups.
- `posterior`: `PosteriorPredictor.remaining_quantiles`. It estimates the tokens of running steps.

Both observe the run; neither decides anything. Synthetic workloads have 1,600 trajectories and the
shipped prior as history. Of a recorded trace, half of the groups is history, and the other half
(at most 1,600 trajectories) is played, for each seed another half.

Where many lengths are equal, as at an output limit, a quantile that is one of them covers more than
its level. *below* is the share of totals at least a token below the last quantile of `posterior`:
its level lies between that and the coverage.

Figures go into `coverage.json` beside this file, then into `COVERAGE.md`.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from value import HERE, MISSING, SHARED, halves

from heddle.cluster.config import ClusterConfig
from heddle.config import MissingConfig, PolicyConfig, RunConfig
from heddle.setup import RunSetup, Workspace, prepare
from heddle_core.controller import Controller
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.ids import TrajectoryId
from heddle_core.parts.predictor import PosteriorPredictor
from heddle_core.policy import Predictor, TrajectoryView
from heddle_predict.corpus import source_of
from heddle_predict.fit import fit
from heddle_predict.models import TreesModel, model_from
from heddle_predict.observations import Observations
from heddle_rollout.driver import ROLLOUT
from heddle_rollout.scripted_agent import ScriptedAgent
from heddle_sim.rollout import Simulation
from heddle_trace.files import read_trace, write_trace
from heddle_trace.schema import TrajectoryRecord
from heddle_trace.synth import synth
from heddle_trace.workloads import WORKLOADS

LEVELS = (0.5, 0.75, 0.9, 0.95)
MODELS = ("learned", "posterior")
TRAJECTORIES = 1_600
SYNTHETIC_SEEDS, RECORDED_SEEDS = (977, 978), (501, 502, 503, 504, 505)
EVERY_S = {"coding": 50.0, "search": 25.0, "math": 50.0}
"""Seconds between the questions on synthetic workloads."""
RECORDED_S = {
    "tbench_mini": 10.0,
    "tau2_retail": 20.0,
    "tau_airline": 2.0,
    "hotpotqa_react": 1.0,
    "mint": 3.0,
    "mooncake_conversation": 20.0,
    "cc_weka": 2_000.0,
}
FEWEST = 20
"""Fewer trajectories give no coverage."""
ENDED = ("0-20 %", "20-40 %", "40-60 %", "60-80 %", "80-100 %")
STEP_END = "step end"


@dataclass(slots=True)
class Questions:
    """By moment and model, one row a question: whether the total lay at or below each quantile, and
    whether it lay a token or more below the last one."""

    hits: dict[tuple[str, str], list[list[bool]]] = field(default_factory=lambda: defaultdict(list))

    def coverage(self, moment: str, model: str) -> dict[str, Any] | None:
        """Share of hits at each level; None for fewer than `FEWEST`."""
        rows = self.hits.get((moment, model), ())
        if len(rows) < FEWEST:
            return None
        *shares, below = np.mean(rows, axis=0).round(4).tolist()
        return {"questions": len(rows), "coverage": shares, "below": below}


def hits(truth: float, quantiles: Sequence[float]) -> list[bool]:
    """One row of `Questions`."""
    return [*(truth <= quantile for quantile in quantiles), truth <= quantiles[-1] - 1.0]


class Shadows:
    """The policy's predictor, and the models that only observe."""

    served = False

    def __init__(self, setup: RunSetup, model: TreesModel, questions: Questions) -> None:
        self._acting: Predictor = setup.policy.predictor
        self._posterior = PosteriorPredictor(setup.context.history)
        levels = setup.context.history.tasks if setup.context.history else {}
        tasks = {task: levels.get(task, old) for task, old in model.vocabulary.tasks.items()}
        self._observations = Observations(replace(model.vocabulary, tasks=tasks))
        self._model, self._at = model, [model.levels.index(level) for level in LEVELS]
        scripts = setup.workload.scripts
        self._totals = {
            TrajectoryId(s.id): sum(step.output_tokens for step in s.steps) for s in scripts
        }
        self._questions = questions
        self.ended = 0
        """Trajectories."""

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self._acting.observe_step(t, event)
        self._posterior.observe_step(t, event)
        self._observations.observe_step(t, event)
        if event.reason == "tool_call":
            self.question(STEP_END, [t])

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._acting.observe_tool(t, event)
        self._posterior.observe_tool(t, event)
        self._observations.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        self.ended += 1
        self._acting.observe_finish(t)
        self._posterior.observe_finish(t)
        self._observations.observe_finish(t)

    def remaining_tokens(self, t: TrajectoryView) -> float:
        """Return the estimate of the policy's own predictor."""
        return self._acting.remaining_tokens(t)

    def question(self, moment: str, ts: Sequence[TrajectoryView]) -> None:
        """Compare the totals of `ts` with the quantiles of each model."""
        rest = np.array([self._totals[t.id] - t.output_tokens for t in ts], float)
        observed = [self._observations.of(t) for t in ts]
        survival = [
            self._observations.log_survival(o, t) for o, t in zip(observed, ts, strict=True)
        ]
        rows = [
            self._observations.row(o, t, log)
            for o, t, log in zip(observed, ts, survival, strict=True)
        ]
        found = self._model.quantiles(np.array(rows))[:, self._at]
        learned = np.maximum(np.exp(found + np.array(survival)[:, None]), 1.0)
        self._questions.hits[moment, "learned"] += [
            hits(truth, quantiles)
            for truth, quantiles in zip(rest.tolist(), learned.tolist(), strict=True)
        ]
        for t, truth in zip(ts, rest.tolist(), strict=True):
            running = self._posterior.running_tokens(t)
            found_now = self._posterior.remaining_quantiles(t, LEVELS)
            row = hits(truth, [running + quantile for quantile in found_now])
            self._questions.hits[moment, "posterior"].append(row)


def play(setup: RunSetup, model: TreesModel, questions: Questions, every_s: float, by: str) -> None:
    """Simulate one rollout; the moments are seconds, or shares that have ended."""
    shadows = Shadows(setup, model, questions)
    controller = Controller(replace(setup.policy, predictor=shadows))
    simulation = Simulation(controller, setup.simulation)
    clock, scripts = simulation.clock, setup.workload.scripts
    asked = 0

    def question() -> None:
        nonlocal asked
        if shadows.ended == len(scripts):
            return
        share = ENDED[int(shadows.ended / len(scripts) * len(ENDED))]
        arrived = list(controller.ledger.trajectories.values())
        if arrived:
            shadows.question(f"{asked * every_s:.0f} s" if by == "seconds" else share, arrived)
        asked += 1
        clock.call_after(every_s, question)

    simulation.driver.open_rollout(ROLLOUT, trajectories=len(scripts))
    first_s = min(script.arrival_s for script in scripts)
    for script in scripts:
        simulation.driver.admit(ScriptedAgent(script, clock, first_arrival_s=first_s))
    clock.call_after(0.0, question)
    simulation.run()


def of_whole_groups(records: Sequence[TrajectoryRecord]) -> list[TrajectoryRecord]:
    """Return the records of the first groups, at most `TRAJECTORIES` in all."""
    groups: dict[str, list[TrajectoryRecord]] = defaultdict(list)
    for record in records:
        groups[record.group_id].append(record)
    kept: list[TrajectoryRecord] = []
    for group in groups.values():
        if len(kept) + len(group) > TRAJECTORIES:
            break
        kept += group
    return kept


def prepared(name: str, seed: int, folder: Path) -> tuple[RunSetup, TreesModel]:
    """Set up one rollout, and the model whose quantiles are compared."""
    coming, past = folder / f"{name}.jsonl.gz", folder / "past.jsonl.gz"
    config = RunConfig(
        trace=str(coming),
        seed=seed,
        cluster=ClusterConfig(
            model="qwen3-14b",
            gpu="h100",
            gpus=16,
            max_running=256,
            engine_start_s=5.0,
            over_capacity="drop",
        ),
        policy=PolicyConfig(preset="heddle"),
        missing=MissingConfig() if name in WORKLOADS else MISSING,
    )
    if name in WORKLOADS:
        write_trace(coming, synth(name, TRAJECTORIES, seed))
        setup = prepare(config, workspace=Workspace())
        return setup, setup.model.model
    before, after = halves(read_trace(SHARED / f"{name}.jsonl.gz"), seed)
    write_trace(past, of_whole_groups(before))
    write_trace(coming, of_whole_groups(after))
    fitted = fit([source_of(read_trace(past), name)], kind="trees", seed=seed, command="coverage")
    return prepare(replace(config, history=str(past)), workspace=Workspace()), model_from(
        fitted, name
    )


def measure(name: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Coverage of each model at each moment, over the rollouts of all seeds."""
    questions = Questions()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            setup, model = prepared(name, seed, Path(folder))
        by, every_s = ("seconds", EVERY_S[name]) if name in WORKLOADS else ("", RECORDED_S[name])
        play(setup, model, questions, every_s, by)
    moments = dict.fromkeys(moment for moment, _ in questions.hits)
    return {
        moment: {model: questions.coverage(moment, model) for model in MODELS}
        for moment in moments
        if questions.coverage(moment, MODELS[0]) is not None
    }


def table(title: str, found: dict[str, Any]) -> list[str]:
    """One table: moments in rows, levels of each model in columns."""
    shown = [f"{model} {level:g}" for model in MODELS for level in LEVELS]
    shown.append(f"below {LEVELS[-1]:g}")
    lines = [f"| {title} | questions | " + " | ".join(shown) + " |"]
    lines.append("|---|---|" + "---|" * len(shown))
    for moment, cells in sorted(found.items(), key=lambda item: order(item[0])):
        shares = [share for model in MODELS for share in cells[model]["coverage"]]
        shares.append(cells["posterior"]["below"])
        count = f"{cells['posterior']['questions']:,}"
        lines.append(f"| {moment} | {count} | " + " | ".join(f"{s:.2f}" for s in shares) + " |")
    return lines


def order(moment: str) -> float:
    """Moments of a table by time, step ends last."""
    return float("inf") if moment == STEP_END else float(moment.split("-")[0].split(" ")[0])


def main() -> None:
    """Measure what is missing in `coverage.json`, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[*WORKLOADS, *RECORDED_S])
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    args = parser.parse_args()
    path = HERE / "coverage.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.names:
        if name not in WORKLOADS and not (SHARED / f"{name}.jsonl.gz").is_file():
            print(f"{name}: skipped, {SHARED / f'{name}.jsonl.gz'} is not there")
            continue
        if args.again or name not in kept:
            seeds = SYNTHETIC_SEEDS if name in WORKLOADS else RECORDED_SEEDS
            kept[name] = {"seeds": seeds, "moments": measure(name, seeds)}
            path.write_text(json.dumps(kept, indent=1) + "\n")
        print("\n".join(table(name, kept[name]["moments"])), flush=True)
    lines = ["<!-- written by coverage.py -->"]
    for name in [*WORKLOADS, *RECORDED_S]:
        if name in kept:
            lines += ["", *table(name, kept[name]["moments"])]
    (HERE / "COVERAGE.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
