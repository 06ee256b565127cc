"""The model that comes with the package; ``python -m heddle_predict.shipped`` makes it again.

Its training data are synthetic trajectories of every workload, under seeds that no shipped trace
and no experiment uses. So it has seen no trajectory that is replayed.
"""

from pathlib import Path
from typing import Final

from heddle_predict.artefact import write_artefact
from heddle_predict.corpus import Source, source_of
from heddle_predict.fit import fit
from heddle_trace.schema import Trace
from heddle_trace.synth import synth
from heddle_trace.workloads import WORKLOADS

COMMAND: Final = "python -m heddle_predict.shipped"
SEED: Final = 770_101
TRAJECTORIES: Final = 3_200

_PATH: Final = Path(__file__).parent / "shipped.heddle"


def shipped_model() -> Path:
    return _PATH


def sources() -> list[Source]:
    """Its training traces, as ``heddle trace synth`` writes them."""
    made = []
    for workload in WORKLOADS:
        records = synth(workload, TRAJECTORIES, SEED)
        trace = Trace(f"synth-{workload}-{TRAJECTORIES}-seed-{SEED}", records, GENERATED)
        made.append(source_of(trace, workload))
    return made


GENERATED: Final = "generated"
"""Stands where a trace that was read has its sha256."""


def make(path: Path = _PATH) -> str:
    """Fit the model and write it; return its sha256."""
    return write_artefact(path, fit(sources(), seed=SEED, command=COMMAND))


if __name__ == "__main__":
    make()
