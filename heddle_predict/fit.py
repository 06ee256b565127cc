"""From traces to a model file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from heddle_compiled import installed_version
from heddle_predict.artefact import SCHEMA, VERSION, Artefact, Header, TrainedOn
from heddle_predict.corpus import Source, check_groups, source_of, vocabulary_of
from heddle_predict.examples import Examples, training_examples
from heddle_predict.model import Vocabulary
from heddle_predict.models import arrays_of
from heddle_predict.quantiles import LEVELS
from heddle_trace.history import levels_of
from heddle_trace.schema import Trace
from heddle_trace.synth import synth
from heddle_trace.workloads import WORKLOADS

AUGMENT_SEED: Final = 880_001
"""Seed of the synthetic trajectories of other workloads; no experiment or shipped trace uses it."""
AUGMENT_TRAJECTORIES = 160
ENOUGH_ROWS = 30_000
"""Questions up to which a small source is played again in another order."""


def fit(sources: Sequence[Source], *, seed: int, command: str) -> Artefact:
    """Learn to predict from traces.

    Synthetic examples of other workloads are added, with the weight of a hundred trajectories.
    General relations (samples of a group are similar, failed calls are repeated) then need not be
    learned from a few groups.

    Raises:
        PredictError: the traces have too few groups.
    """
    from heddle_predict.trees import fit_trees

    vocabulary, seen, augmented = prepared(sources, seed)
    found = fit_trees(seen, augmented, vocabulary, seed)
    header = Header(
        schema=f"{SCHEMA}/{VERSION}",
        kind="trees",
        heddle=installed_version(),
        command=command,
        seed=seed,
        trained_on=tuple(
            TrainedOn(
                name=source.name,
                sha256=source.sha256,
                trajectories=len(source.scripts),
                groups=len(source.groups()),
                dropped=source.dropped,
            )
            for source in sources
        ),
        examples=len(seen),
        error=round(found.error, 6),
        settings={"trees": str(found.rounds)},
        levels=LEVELS,
        features=vocabulary.names(),
        tasks=dict(vocabulary.tasks),
        anywhere=vocabulary.anywhere,
        tools=vocabulary.tools,
    )
    return Artefact(header=header, arrays=arrays_of(found.model))


def prepared(sources: Sequence[Source], seed: int) -> tuple[Vocabulary, Examples, Examples]:
    """The vocabulary of the sources, their examples, and those of other workloads.

    Raises:
        PredictError: there are too few groups to leave some out.
    """
    check_groups(sources)
    vocabulary = vocabulary_of(sources)
    seen = training_examples(sources, lambda _: vocabulary, seed, enough_rows=ENOUGH_ROWS)
    augmented = training_examples(
        augmentation_sources(),
        lambda s: replace(vocabulary, anywhere=levels_of(s.scripts)),
        seed,
        enough_rows=0,
    )
    return vocabulary, seen, augmented


def augmentation_sources() -> list[Source]:
    """Synthetic trajectories without a task name."""
    sources = []
    for workload in WORKLOADS:
        records = synth(workload, AUGMENT_TRAJECTORIES, AUGMENT_SEED)
        source = source_of(Trace(workload, records, ""), workload)
        strangers = tuple(replace(script, task="") for script in source.scripts)
        sources.append(replace(source, scripts=strangers))
    return sources
