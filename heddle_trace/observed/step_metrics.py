"""Metrics of whole steps as SkyRL and slime print them: no trajectories, durations alone.

Source: NovaSky-AI/SkyRL, `skyrl/train/utils/tracking.py` (its console prints `Step N:` and a dict),
`skyrl/train/trainer.py` (timers), pull requests #1900 and #1925 (times of trajectories, as means
over these); THUDM/slime, `slime/utils/train_metric_utils.py` and `slime/ray/rollout.py` (`perf N:`
and a dict, of the trainer and of the rollout; `train_wait` is all between two trainings).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias

import msgspec

from heddle_trace.importers.heads import Head
from heddle_trace.importers.notes import DamagedError, Notes
from heddle_trace.importers.sources import SourceFile, decoded
from heddle_trace.limits import MAX_RL_STEP
from heddle_trace.observed.core import (
    Observations,
    ObservedFormat,
    ParsedObservation,
    StepClock,
    number_in,
)
from heddle_trace.observed.schema import PhaseName

Metrics: TypeAlias = dict[str, float]
_PAIR: Final = re.compile(rb"'([\w/]+)': (?:np\.float\d+\()?'?([-+]?\d[-+\w.]*)")
_COLOUR: Final = re.compile(rb"\x1b\[[\d;]*m")
_ROW: Final = msgspec.json.Decoder(dict[str, Any])
_NUMBER: Final = ("trainer/global_step", "rollout/step", "_step", "step")


class StepMetrics(ObservedFormat):
    """Dicts in a text, or rows of JSON as a tracker exports them."""

    one_file = True
    begins: ClassVar[re.Pattern[bytes]]
    """What is before the dict of a step, with the number of the step."""
    total: ClassVar[str]
    """The time of a step."""

    def parts(self, seen: Metrics) -> Mapping[PhaseName, float]:
        """Seconds of a step by what passed."""
        raise NotImplementedError

    def recognises(self, head: Head) -> bool:
        """Rows with the time of a step, or a dict that has it."""
        shown = f"'{self.total}'".encode() in head.start and self.begins.search(head.start)
        return head.any_row(self.total) or bool(head.readable and shown)

    def observations(self, sources: Sequence[SourceFile], notes: Notes) -> Observations:
        """The phases of each step."""
        clock = StepClock()
        for label, (where, seen) in sorted(self._steps(sources[0], notes).items()):
            with notes.guard(where):
                if self.total not in seen:
                    notes.drop("steps without their time")
                    continue
                for phase in clock.phases(label, seen[self.total], self.parts(seen)):
                    yield ParsedObservation(where, phase)

    def _steps(self, source: SourceFile, notes: Notes) -> dict[int, tuple[str, Metrics]]:
        """Times of each step by its number, with the place of the first."""
        found: dict[int, tuple[str, Metrics]] = {}
        label: int | None = None
        for where, coloured in source.lines(notes):
            with notes.guard(where):
                line = _COLOUR.sub(b"", coloured)
                if line.startswith(b'{"'):
                    row = decoded(line, _ROW)
                    label = next((_label(row[key]) for key in _NUMBER if key in row), None)
                    now = {k: float(v) for k, v in row.items() if type(v) in (int, float)}
                elif (begun := self.begins.search(line)) or label is not None:
                    label = _label(int(begun[1][:9])) if begun else label
                    pairs = _PAIR.findall(line[begun.end() :] if begun else line)
                    now = {key.decode(): number_in(value.decode()) for key, value in pairs}
                if label is None:
                    continue
                _, seen = found.setdefault(label, (where, {}))
                if self.total in seen and self.total in now:
                    raise DamagedError(
                        f"step {label} is logged again: two runs, or one that was resumed, are in "
                        "one log; keep the lines of one"
                    )
                seen |= {key: value for key, value in now.items() if "tim" in key}
                if line.rstrip().endswith(b"}"):
                    label = None
        if label is not None:
            notes.damage(str(source.path), f"the metrics of step {label} are cut off")
        return found


def _label(value: object) -> int:
    if type(value) in (int, float) and 0 <= value <= MAX_RL_STEP:  # type: ignore[operator]
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise DamagedError(f"{str(value)[:40]!r} is no number of a step")
