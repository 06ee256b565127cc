"""F13: recall of the longest fifth and Pearson's correlation, by what a predictor has seen."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.drawing import COLOURS, bars, page, save
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.store import code_key
from experiments.harness.values import Value, across, exactly
from heddle_predict.corpus import Source, source_of
from heddle_predict.evaluate import judge_model, untrained
from heddle_predict.fit import fit
from heddle_predict.measures import Figures, correlation, recall
from heddle_predict.models import model_from
from heddle_predict.play import Pace, total_tokens
from heddle_trace.schema import Trace
from heddle_trace.synth import synth

SHOWN = ("prompt model", "history", "after step 1", "after step 2")


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """For each workload, a fit and its figures."""
    settings = config["predictor"]
    count = settings["trajectories"]["full" if size.full else "reduced"]
    return {
        workload: Computation(
            question={
                "f13": workload,
                "count": count,
                **settings,
                "code": code_key(),
                "version": 1,
            },
            make=partial(_judged, workload, count, settings),
        )
        for workload in settings["workloads"]
    }


def measure(context: Context) -> Measured:
    """Trained trees after 0, 1 and 2 steps; the mean of a prompt's earlier samples."""
    made = computations(context.size, context.config)
    data = {workload: context.store.get(each.key) for workload, each in made.items()}
    values = {
        "recall_after_2": across([exactly(data[w]["after step 2"]["recall"]) for w in data]),
        "pearson_after_2": across([exactly(data[w]["after step 2"]["pearson"]) for w in data]),
        "step_2_over_prompt": _over(data, "prompt model"),
        "step_2_over_history": _over(data, "history"),
    }
    return Measured(values=values, data=data)


def _judged(workload: str, count: int, settings: Any) -> dict[str, Any]:
    learned = [_source(workload, count, seed) for seed in settings["fit_seeds"]]
    judged_on = _source(workload, count, settings["judge_seed"])
    artefact = fit(learned, seed=0, command="experiments f13")
    trees = judge_model(model_from(artefact, "trees"), judged_on, Pace())
    progressive = untrained(judged_on, Pace())["progressive"]
    return {
        "prompt model": _plain(trees[0]),
        "history": _history(judged_on, settings["judge_seed"]),
        "after step 1": _plain(trees[1]),
        "after step 2": _plain(trees[2]),
        "progressive after step 2": _plain(progressive[2]),
    }


def _source(workload: str, count: int, seed: int) -> Source:
    records = synth(workload, count, seed)
    return source_of(Trace(workload, records, f"{workload}-{count}-{seed}"), workload)


def _history(source: Source, seed: int) -> dict[str, float]:
    """The mean of a prompt's other samples, half of them, as an earlier epoch would show it."""
    groups: dict[str, list[int]] = {}
    for script in source.scripts:
        groups.setdefault(script.group, []).append(total_tokens(script))
    estimates, truths = [], []
    for totals in groups.values():
        half = len(totals) // 2
        estimates += [float(np.mean(totals[:half]))] * (len(totals) - half)
        truths += totals[half:]
    found, true = np.array(estimates), np.array(truths, float)
    return {"recall": recall(found, true), "pearson": correlation(found, true)}


def _plain(figures: Figures | None) -> dict[str, float]:
    assert figures is not None, "every workload has hundreds of trajectories with two steps"
    return {"recall": figures.recall, "pearson": figures.pearson}


def _over(data: Any, other: str) -> Value:
    cells = [row["after step 2"]["recall"] / row[other]["recall"] for row in data.values()]
    return across([exactly(ratio) for ratio in cells])


def draw(data: Any, path: Path) -> None:
    """Left recall, right Pearson."""
    figure, axes = page(2, width=8.0)
    for ax, key, name in zip(
        axes, ("recall", "pearson"), ("Recall of the longest 20 %", "Pearson"), strict=True
    ):
        series = [
            (shown, [_bar(data[w][shown][key]) for w in data], COLOURS[index])
            for index, shown in enumerate(SHOWN)
        ]
        bars(ax, list(data), series, numbers=True)
        ax.set(title=name, ylim=(0, 1.02))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, path)


def _bar(value: float) -> dict[str, float]:
    return {"mean": value, "low": value, "high": value}
