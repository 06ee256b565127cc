"""How well lengths are predicted, step by step: `python experiments/predictor/run.py`.

For each trace and seed the groups are split, 70 % to learn from and 30 % to be judged on; no group
is on both sides. The second part is played as a rollout to every predictor, once with all of its
trajectories at the same time and once with 30 % of them at a time, in order of arrival. Synthetic
workloads are made anew for each seed.

Figures go into `results.json` beside this file as they are found (an interrupted run goes on where
it was), then into `RESULTS.md` and `sharpening.png`. Traces that are not there are skipped.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from heddle_core.parts.predictor import (
    GroupPredictor,
    HistoryPredictor,
    NoPrediction,
    PrefixTreePredictor,
    ProgressivePredictor,
)
from heddle_core.policy import Predictor
from heddle_predict.artefact import read_artefact
from heddle_predict.corpus import Source, read_source, source_of, split
from heddle_predict.evaluate import ByStep, judge, judge_quantiles
from heddle_predict.examples import Examples, answers, examples
from heddle_predict.fit import prepared
from heddle_predict.model import Floats
from heddle_predict.models import model_from
from heddle_predict.play import Pace, play, total_tokens
from heddle_predict.quantiles import LEVELS
from heddle_predict.shipped import shipped_model
from heddle_predict.trees import RISING, Booster, fit_trees, flat
from heddle_trace.schema import Trace, TrajectoryScript
from heddle_trace.synth import synth
from heddle_trace.workloads import WORKLOADS

HERE = Path(__file__).parent
SHARED = Path("../shared/traces")
RECORDED = ("tbench_mini", "tau2_retail", "tau_airline", "mint", "hotpotqa_react", "cc_weka")
SYNTHETIC = tuple(WORKLOADS)
SEEDS = 5
FIRST_SEED = 401
SYNTHETIC_TRAJECTORIES = 2_400
MOST_TRAJECTORIES = 8_000
"""To learn from: more of `mint` changed nothing and took long."""
HELD = 0.3
PACES = {"at once": Pace(), "30 % at a time": Pace(slots=0.3)}


def load(name: str, seed: int) -> Source | None:
    """A synthetic workload of this seed, a recorded trace, or None where it is absent."""
    if name in WORKLOADS:
        return source_of(Trace(name, synth(name, SYNTHETIC_TRAJECTORIES, seed), ""), name)
    path = SHARED / f"{name}.jsonl.gz"
    return read_source(path) if path.is_file() else None


def untrained(seen: Source) -> dict[str, Callable[[], Predictor]]:
    """Predictors that are not fitted; `seen` is their history, where they can use it."""
    totals: dict[str, list[int]] = {}
    for script in seen.scripts:
        totals.setdefault(script.task, []).append(total_tokens(script))
    everything = [total for made in totals.values() for total in made]
    mean = sum(everything) / len(everything)

    def prefix_tree() -> Predictor:
        predictor = PrefixTreePredictor()
        play(seen.scripts, Pace(), predictor)
        return predictor

    return {
        "none": NoPrediction,
        "group": GroupPredictor,
        "history": lambda: HistoryPredictor({}, task_totals=totals),
        "prefix tree": prefix_tree,
        "progressive": lambda: ProgressivePredictor(typical_tokens=mean, typical_weight=100.0),
    }


def hindsight(scripts: Sequence[TrajectoryScript]) -> Floats:
    """Mean and maximum of the log totals of each script's other samples: (scripts, 2)."""
    groups: dict[str, list[float]] = {}
    for script in scripts:
        groups.setdefault(script.group, []).append(math.log(total_tokens(script)))
    found = []
    for script in scripts:
        others = list(groups[script.group])
        others.remove(math.log(total_tokens(script)))
        found.append((np.mean(others), max(others)) if others else (0.0, 0.0))
    return np.array(found)


def ceiling(
    seen: Examples,
    augmented: Examples,
    scripts: Sequence[TrajectoryScript],
    rising: list[int],
    rounds: int,
    seed: int,
) -> Callable[[Examples, Sequence[TrajectoryScript]], Floats]:
    """Trees that also know the lengths of the prompt's other samples.

    With the trajectory's own features this is all the information of repeated samples, so no
    predictor without the future should do better. A low estimate where a prompt has few samples.
    """

    def with_siblings(questions: Examples, of: Sequence[TrajectoryScript]) -> Examples:
        relative = hindsight(of)[questions.script] - questions.survival[:, None]
        return replace(questions, rows=np.concatenate((questions.rows, relative), axis=1))

    blind = replace(
        augmented, rows=np.concatenate((augmented.rows, np.zeros((len(augmented), 2))), axis=1)
    )
    booster = Booster(seed, [*rising, 1, 1], len(seen))
    forest = flat(booster.location(with_siblings(seen, scripts), blind, rounds), len(rising) + 2)

    def answer(questions: Examples, of: Sequence[TrajectoryScript]) -> Floats:
        return np.exp(forest.sums(with_siblings(questions, of).rows) + questions.survival)

    return answer


def some_groups(source: Source, most: int) -> Source:
    """Every n-th group of a source, so that about `most` trajectories at most are left."""
    stride = -(-len(source.scripts) // most)
    kept = dict.fromkeys(source.groups()[::stride])
    return replace(source, scripts=tuple(s for s in source.scripts if s.group in kept))


def measure(name: str, seed: int, *, sequence: bool) -> dict[str, Any]:
    """All figures of one trace and one seed."""
    source = load(name, seed)
    assert source is not None
    seen, held = split(source, share=HELD, seed=seed)
    seen = some_groups(seen, MOST_TRAJECTORIES)
    vocabulary, questions, augmented = prepared([seen], seed)
    trees = fit_trees(questions, augmented, vocabulary, seed)
    shipped = model_from(read_artefact(shipped_model()), "shipped")
    models: dict[str, Callable[[Examples], Floats]] = {
        "shipped": partial(answers, shipped),
        "trees": partial(answers, trees.model),
    }
    if sequence:
        from experiments.predictor.sequence import fit_sequence  # needs torch

        fitted = fit_sequence(questions, augmented, vocabulary, seed)
        models["sequence"] = fitted.model.answers
    rising = [int(column in RISING) for column in vocabulary.names()]
    repeated = len(source.scripts) > 1.5 * len(source.groups())
    top = (
        ceiling(questions, augmented, seen.scripts, rising, max(trees.rounds, 60), seed)
        if repeated
        else None
    )
    found: dict[str, dict[str, Any]] = {}
    for pace_name, pace in PACES.items():
        judged: dict[str, ByStep] = {
            predictor: judge(make(), held.scripts, pace)
            for predictor, make in untrained(seen).items()
        }
        for kind, asked in models.items():
            own = shipped.vocabulary if kind == "shipped" else vocabulary
            test = examples(held.scripts, own, pace)
            judged[kind] = judge_quantiles(test, asked(test), LEVELS)
        if top is not None:
            test = examples(held.scripts, vocabulary, pace)
            best = np.repeat(top(test, held.scripts)[:, None], len(LEVELS), axis=1)
            judged["ceiling"] = judge_quantiles(test, best, LEVELS)
        found[pace_name] = {
            kind: {str(k): asdict(f) if f else None for k, f in by_step.items()}
            for kind, by_step in judged.items()
        }
    return {
        "trajectories": [len(seen.scripts), len(held.scripts)],
        "groups": [len(seen.groups()), len(held.groups())],
        "icc": between_share(source.scripts) if repeated else None,
        "rounds": trees.rounds,
        "paces": found,
    }


def between_share(scripts: Sequence[TrajectoryScript]) -> float:
    """Share of the variance of totals that lies between groups (one-way random effects)."""
    groups: dict[str, list[int]] = {}
    for script in scripts:
        groups.setdefault(script.group, []).append(total_tokens(script))
    sizes = np.array([len(made) for made in groups.values()])
    means = np.array([np.mean(made) for made in groups.values()])
    every = np.concatenate([np.array(made) for made in groups.values()])
    inside = sum(((np.array(m) - np.mean(m)) ** 2).sum() for m in groups.values())
    inside /= max(sizes.sum() - len(sizes), 1)
    between = (sizes * (means - every.mean()) ** 2).sum() / (len(sizes) - 1)
    typical = (sizes.sum() - (sizes**2).sum() / sizes.sum()) / (len(sizes) - 1)
    variance = max((between - inside) / typical, 0.0)
    return float(variance / (variance + inside))


def collected(names: Sequence[str], seeds: int, path: Path, *, sequence: bool) -> dict[str, Any]:
    """Measure what `path` does not hold yet; return everything."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name in names:
            key = f"{name}/{seed}"
            if key in results:
                continue
            if load(name, seed) is None:
                print(f"{name}: skipped, {SHARED / f'{name}.jsonl.gz'} is not there")
                continue
            results[key] = measure(name, seed, sequence=sequence)
            path.write_text(json.dumps(results, sort_keys=True) + "\n")
            print(f"{key}: done", flush=True)
    return results


def main() -> None:
    """Measure, then write tables and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[*RECORDED, *SYNTHETIC])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--no-sequence", action="store_true", help="leave out the network (torch)")
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    results = collected(args.names, args.seeds, args.results, sequence=not args.no_sequence)

    from tables import figure, tables  # beside this file

    (HERE / "RESULTS.md").write_text(tables(results))
    figure(results, HERE / "sharpening.png")


if __name__ == "__main__":
    main()
