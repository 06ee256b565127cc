"""Small sources and models that the tests of learned prediction share."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from heddle_core.events import StepFinished, ToolReturned
from heddle_core.policy import Predictor, TrajectoryView
from heddle_predict.corpus import Source, source_of, vocabulary_of
from heddle_predict.examples import Examples, training_examples
from heddle_predict.fit import fit
from heddle_predict.learned import LearnedPredictor
from heddle_predict.models import TreesModel, model_from
from heddle_predict.play import Moment
from heddle_trace.schema import StepScript, Trace, TrajectoryScript
from heddle_trace.synth import synth


@lru_cache
def synthetic(workload: str = "coding", trajectories: int = 96, seed: int = 5) -> Source:
    records = synth(workload, trajectories, seed, samples_per_group=4)
    return source_of(Trace(workload, records, f"{workload}-{seed}"), workload)


@lru_cache
def questions() -> Examples:
    source = synthetic()
    vocabulary = vocabulary_of([source])
    return training_examples([source], lambda _: vocabulary, 0, enough_rows=0)


@lru_cache
def fitted() -> TreesModel:
    model = model_from(artefact(), "made in a test")
    assert isinstance(model, TreesModel)
    return model


@lru_cache
def artefact():
    return fit([synthetic()], seed=3, command="made in a test")


def script(name: str, steps: Sequence[tuple[int, int, bool]], task: str = "coding"):
    """A trajectory of the group before the slash; a step is (output, payload, ok)."""
    made, done = [], 100
    for number, (output, payload, ok) in enumerate(steps):
        last = number + 1 == len(steps)
        made.append(
            StepScript(
                prompt_tokens=done,
                shared_tokens=0,
                output_tokens=output,
                tool=None if last else "sandbox",
                tool_s=0.0 if last else 0.5 + 0.25 * number,
                tool_ok=None if last else ok,
                tool_tokens=0 if last else payload,
            )
        )
        done += output + payload
    return TrajectoryScript(
        id=name,
        group=name.partition("/")[0],
        task=task,
        arrival_s=0.0,
        steps=tuple(made),
        truncated=False,
    )


def with_future(old: TrajectoryScript, step: int, steps: Sequence[StepScript]) -> TrajectoryScript:
    """The same trajectory up to and with `step`, then another life."""
    return replace(old, steps=(*old.steps[: step + 1], *steps))


def all_quantiles(model: TreesModel) -> "Asked":
    """A predictor for each quantile of a model."""
    return Asked(*(LearnedPredictor(model, quantile=q, least_share=0.0) for q in model.levels))


class Asked:
    """Asks predictors at every moment and keeps the answers."""

    def __init__(self, *predictors: Predictor) -> None:
        self.predictors: tuple[Any, ...] = predictors
        self.found: Any = []
        self.questions: list[tuple[Moment, str, int]] = []

    def observe_step(self, t: TrajectoryView, event: StepFinished) -> None:
        for predictor in self.predictors:
            predictor.observe_step(t, event)

    def observe_tool(self, t: TrajectoryView, event: ToolReturned) -> None:
        for predictor in self.predictors:
            predictor.observe_tool(t, event)

    def observe_finish(self, t: TrajectoryView) -> None:
        for predictor in self.predictors:
            predictor.observe_finish(t)

    def on_question(self, t: TrajectoryView, index: int, moment: Moment) -> None:
        self.found.append([predictor.remaining_tokens(t) for predictor in self.predictors])
        self.questions.append((moment, t.id, t.step))
