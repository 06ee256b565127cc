"""Time of a prediction: `python benchmarks/bench_predict.py [MODEL.heddle ...]`.

The shipped model, and others that are named, on the questions of a rollout of 1,600 coding
trajectories: amortised over batches of rows, one row at a time, and one question to the predictor,
which watches the rollout and makes the row itself. Best of some repeats, in microseconds of the
processor. The aim is at most 50 for a prediction amortised over a batch.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np

from heddle.cli.errors import exit_with_user_errors
from heddle_core.events import StepFinished, ToolReturned
from heddle_core.parts.predictor import ProgressivePredictor
from heddle_core.policy import Predictor, TrajectoryView
from heddle_predict.artefact import read_artefact
from heddle_predict.corpus import source_of
from heddle_predict.examples import examples
from heddle_predict.learned import LearnedPredictor
from heddle_predict.models import TreesModel, model_from
from heddle_predict.play import Moment, Pace, play
from heddle_predict.shipped import shipped_model
from heddle_trace.schema import Trace
from heddle_trace.synth import synth

TRAJECTORIES = 1_600
BATCHES = (1, 16, 128, 1_024)
REPEATS = 7
AIM_US = 50.0


class Timed:
    """A watcher that times a predictor, its predictions and its observations."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.predict_s = self.observe_s = 0.0
        self.questions = self.observations = 0

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        self._observe(lambda: self._predictor.observe_step(t, event))

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        self._observe(lambda: self._predictor.observe_tool(t, event))

    def observe_finish(self, t: TrajectoryView) -> None:
        self._observe(lambda: self._predictor.observe_finish(t))

    def on_question(self, t: TrajectoryView, index: int, moment: Moment) -> None:
        """Predict, timed."""
        begun_s = process_time()
        self._predictor.remaining_tokens(t)
        self.predict_s += process_time() - begun_s
        self.questions += 1

    def _observe(self, call: Callable[[], None]) -> None:
        begun_s = process_time()
        call()
        self.observe_s += process_time() - begun_s
        self.observations += 1


def best_us(work: Callable[[], object], count: int) -> float:
    """The quickest of some repeats, in microseconds for each of `count`."""
    work()
    times = []
    for _ in range(REPEATS):
        begun_s = process_time()
        work()
        times.append(process_time() - begun_s)
    return 1e6 * min(times) / count


def in_batches(model: TreesModel, rows: np.ndarray, batch: int) -> float:
    """Microseconds for a row when rows come in batches of this size."""
    count = min(len(rows), 200 if batch == 1 else 4 * max(batch, 512))
    rows = rows[:count]

    def work() -> None:
        for i in range(0, count, batch):
            model.quantiles(rows[i : i + batch])

    return best_us(work, count)


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", type=Path, nargs="*")
    paths = [shipped_model(), *parser.parse_args().models]
    trace = Trace("coding", synth("coding", TRAJECTORIES, 7), "")
    scripts = source_of(trace, "coding").scripts
    print(f"{'microseconds a prediction':34}" + "".join(f"{f'batch {b}':>12}" for b in BATCHES))
    for path in paths:
        artefact = read_artefact(path)
        model = model_from(artefact, path)
        questions = examples(scripts, model.vocabulary, Pace())
        times = [in_batches(model, questions.rows, batch) for batch in BATCHES]
        verdict = "within" if min(times) <= AIM_US else "MORE THAN"
        cells = "".join(f"{t:12.1f}" for t in times)
        label = f"{path.name} ({artefact.header.kind})"
        print(f"{label:34}{cells}  {verdict} the aim of {AIM_US:g}")
    print(f"\n{'in a rollout, one at a time':34}{'a question':>12}{'a call':>12}")
    predictors: dict[str, Predictor] = {"progressive": ProgressivePredictor()}
    predictors |= {
        path.name: LearnedPredictor(model_from(read_artefact(path), path)) for path in paths
    }
    for name, predictor in predictors.items():
        timed = Timed(predictor)
        play(scripts, Pace(), timed, timed.on_question)
        predict_us, observe_us = (
            timed.predict_s / timed.questions,
            timed.observe_s / timed.observations,
        )
        print(f"{name:34}{1e6 * predict_us:12.1f}{1e6 * observe_us:12.1f}")


if __name__ == "__main__":
    with exit_with_user_errors():
        main()
