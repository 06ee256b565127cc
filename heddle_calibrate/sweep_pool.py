"""Several sweeps of one kind of engine as one: for machines whose speed drifts within hours."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from heddle_calibrate.sweeps import TRIALS, Sweep, SweepError

_OF_THE_SWEEP = ("made", "command", "seed", "spoiled", "notes", *TRIALS)
"""What may differ; all else says what was measured, and how."""


def pooled(sweeps: Mapping[Path, Sweep]) -> Sweep:
    """All trials together, one sweep after the other; the first says when it was made.

    Raises:
        SweepError: they are of different engines, or none is given.
    """
    if not sweeps:
        raise SweepError("no sweep to fit; name one or more")
    (first_path, first), *others = sweeps.items()
    for path, other in others:
        for field in fields(Sweep):
            if field.name in _OF_THE_SWEEP:
                continue
            here, there = (_told(getattr(sweep, field.name)) for sweep in (other, first))
            if here != there:
                raise SweepError(
                    f"{path}: {field.name} is {here}, in {first_path} it is {there}; only sweeps "
                    f"of the same engine on the same machine are fitted together"
                )
    trials: dict[str, Any] = {name: _in_turn(list(sweeps.values()), name) for name in TRIALS}
    return replace(
        first,
        spoiled=sum(sweep.spoiled for sweep in sweeps.values()),
        notes=tuple(dict.fromkeys(note for sweep in sweeps.values() for note in sweep.notes)),
        **trials,
    )


def _told(value: Any) -> Any:
    """Versions without the state of the source: a commit in between changes no engine."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if key != "git_commit"}
    return value


def _in_turn(sweeps: list[Sweep], name: str) -> tuple[Any, ...]:
    """Trials with places that go on from one sweep to the next, so that drift can be seen."""
    trials: list[Any] = []
    begin = 0
    for sweep in sweeps:
        trials += [replace(t, order=t.order + begin) for t in getattr(sweep, name)]
        begin += 1 + max((t.order for n in TRIALS for t in getattr(sweep, n)), default=-1)
    return tuple(trials)
