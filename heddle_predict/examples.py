"""Questions with their answers: rows of features as in a rollout, and the truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from heddle_core.policy import TrajectoryView
from heddle_predict.corpus import Source
from heddle_predict.model import Floats, Vocabulary
from heddle_predict.models import TreesModel
from heddle_predict.observations import Observations
from heddle_predict.play import Moment, Pace, play, total_tokens
from heddle_trace.complete import regrouped
from heddle_trace.schema import TrajectoryScript

Ints: TypeAlias = NDArray[np.int64]

_LEAST_PLAYS: Final = 3
_MOST_PLAYS: Final = 6
_MOST_ROWS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Examples:
    """Questions in order of time, one a line."""

    rows: Floats
    remaining: Floats
    """The truth, in tokens."""
    survival: Floats
    """Logarithm of the estimate of `ProgressivePredictor`: targets are relative to it."""
    step: Ints
    """Tool calls before it."""
    queued: NDArray[np.bool_]
    """True when a step is queued, False when a tool starts."""
    run: Ints
    """Number of the trajectory within one play: its questions belong together, in order."""
    group: Ints
    script: Ints
    """Number of the script that `run` plays, among all sources."""

    def __len__(self) -> int:
        return len(self.remaining)

    @property
    def targets(self) -> Floats:
        """Logarithm of the remaining tokens, relative to survival."""
        return np.asarray(np.log(self.remaining) - self.survival)

    @property
    def weights(self) -> Floats:
        """1 over the root of a trajectory's questions: long ones weigh more, below proportion."""
        return np.asarray(1.0 / np.sqrt(np.bincount(self.run)[self.run]))

    def where(self, chosen: NDArray[Any]) -> "Examples":
        return Examples(*(getattr(self, f.name)[chosen] for f in fields(self)))

    @staticmethod
    def joined(parts: "Sequence[Examples]") -> "Examples":
        """Put several one after another; runs, groups and scripts of each stay apart."""
        columns: dict[str, list[NDArray[Any]]] = {f.name: [] for f in fields(Examples)}
        after = dict.fromkeys(("run", "group", "script"), 0)
        for part in parts:
            for name, found in columns.items():
                found.append(getattr(part, name) + after.get(name, 0))
            for name in after:
                numbers = getattr(part, name)
                after[name] += int(numbers.max(initial=-1)) + 1
        return Examples(*(np.concatenate(found) for found in columns.values()))


def examples(scripts: Sequence[TrajectoryScript], vocabulary: Vocabulary, pace: Pace) -> Examples:
    """Play `scripts` as one rollout and collect every question."""
    observations, totals = Observations(vocabulary), [total_tokens(s) for s in scripts]
    rows: list[list[float]] = []
    labels: list[tuple[float, float, int, bool, int]] = []

    def on_question(t: TrajectoryView, index: int, moment: Moment) -> None:
        observed = observations.of(t)
        survival = observations.log_survival(observed, t)
        rows.append(observations.row(observed, t, survival))
        left = totals[index] - t.output_tokens
        labels.append((left, survival, t.step, moment == "queued", index))

    play(scripts, pace, observations, on_question)
    left, survival, step, queued, index = (np.array(c) for c in zip(*labels, strict=True))
    names = {name: i for i, name in enumerate(dict.fromkeys(s.group for s in scripts))}
    groups = np.array([names[s.group] for s in scripts])
    run = index.astype(np.int64)
    return Examples(
        rows=np.array(rows),
        remaining=left.astype(np.float64),
        survival=survival.astype(np.float64),
        step=step.astype(np.int64),
        queued=queued.astype(np.bool_),
        run=run,
        group=groups[run],
        script=run,
    )


def training_examples(
    sources: Sequence[Source],
    vocabulary: Callable[[Source], Vocabulary],
    seed: int,
    *,
    enough_rows: int,
) -> Examples:
    """Play each source several times, in its own and in other orders of groups, at other paces.

    A model thus learns from siblings that have ended, that run and that have not begun, with
    similar prompts around a trajectory (as sources list them) and with any. Small sources are
    played more often, until there are `enough_rows`. Of large ones only the questions of some
    trajectories are kept.
    """
    parts = [_played_often(source, vocabulary(source), seed, enough_rows) for source in sources]
    found = Examples.joined(parts)
    if len(found) <= _MOST_ROWS:
        return found
    rng = np.random.default_rng([seed, crc32(b"kept")])
    runs = int(found.run.max()) + 1
    kept = rng.random(runs) < _MOST_ROWS / len(found)
    return found.where(kept[found.run])


def _played_often(source: Source, vocabulary: Vocabulary, seed: int, enough_rows: int) -> Examples:
    rng = np.random.default_rng([seed, crc32(source.name.encode())])
    plays: list[Examples] = []
    rows = 0
    number = {script.id: i for i, script in enumerate(source.scripts)}
    groups = {name: i for i, name in enumerate(source.groups())}
    while len(plays) < _LEAST_PLAYS or (rows < enough_rows and len(plays) < _MOST_PLAYS):
        own_order = len(plays) % _LEAST_PLAYS != 1
        scripts = source.scripts if own_order else regrouped(source.scripts, rng)
        slots = 1.0 if len(plays) % _LEAST_PLAYS == 0 else float(rng.uniform(0.1, 0.6))
        pace = Pace(slots=slots, tokens_per_s=float(50.0 * np.exp(0.5 * rng.standard_normal())))
        played = examples(scripts, vocabulary, pace)
        order = np.array([number[s.id] for s in scripts])
        of_group = np.array([groups[s.group] for s in scripts])
        run = played.run + len(plays) * len(scripts)
        plays.append(replace(played, run=run, group=of_group[played.run], script=order[played.run]))
        rows += len(played)
    return Examples(
        *(np.concatenate([getattr(p, f.name) for p in plays]) for f in fields(Examples))
    )


def answers(model: TreesModel, questions: Examples) -> Floats:
    """Quantiles of the remaining tokens by a model, (questions, levels)."""
    found = model.quantiles(questions.rows)
    return np.asarray(
        np.maximum(np.exp(np.clip(found + questions.survival[:, None], -50, 50)), 1.0)
    )
