"""Experiments as a notebook shows them: claims as a table, figures as they were drawn last."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.harness.experiment import (
    EXPERIMENTS,
    FIGURES,
    Context,
    Experiment,
    experiments,
    judged_all,
)
from experiments.harness.jobs import REDUCED
from experiments.harness.running import run_missing
from experiments.harness.store import Store
from experiments.harness.values import Results
from experiments.harness.verdicts import Judged
from notebooks.tables import Picture, picture


def verdicts(*figures: str) -> pd.DataFrame:
    """Every claim beside what was measured last; of some figures (`F12`, `T1`), or of all."""
    rows = [
        _row(outcome.expected.figure, judged)
        for outcome in (experiment.outcome() for experiment in experiments())
        if not figures or outcome.expected.figure in figures
        for judged in outcome.judged
    ]
    return _table(rows)


def counts() -> pd.Series:
    """How many claims agree, agree in direction only, or disagree."""
    return verdicts()["verdict"].value_counts().rename("claims")


def drawn(name: str) -> Picture:
    """The figure of an experiment, named as its folder.

    Raises:
        OSError: there is none; `python -m experiments NAME` draws it.
    """
    return picture(FIGURES / f"{name}.png")


def rerun(name: str) -> tuple[pd.DataFrame, Picture]:
    """Run an experiment again at the reduced size, and keep nothing of it.

    Raises:
        Skipped: something that it needs is not there.
    """
    experiment = Experiment(EXPERIMENTS / name)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        runs = experiment.planned_runs(REDUCED)
        run_missing(
            [*(a.job for a in runs), *experiment.computations(REDUCED)],
            store,
            processes=os.cpu_count() or 1,
            on_progress=lambda done, total: None,
        )
        results = Results([(a.axes, store.get(a.job.key)) for a in runs])
        measured = experiment.script.measure(Context(results, REDUCED, store, experiment.config))
        file = Path(folder) / "figure.png"
        experiment.script.draw(measured.data, file)
        judged = judged_all(experiment.expected, measured.values)
        figure = experiment.expected.figure
        return _table([_row(figure, each) for each in judged]), picture(file)


def _row(figure: str, judged: Judged) -> dict[str, str]:
    claim = judged.claim
    unit = f" ({claim.unit})" if claim.unit not in ("x", "") else ""
    return {
        "figure": figure,
        "what": claim.what + unit,
        "claimed": claim.text(),
        "here": judged.value.text(),
        "verdict": judged.verdict,
    }


def _table(rows: Sequence[dict[str, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows).set_index("figure")
