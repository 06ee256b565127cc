"""One folder under experiments/: read, measured, judged."""

import importlib
import json
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.harness.jobs import Computation, PlannedRun, Size, planned_runs
from experiments.harness.running import Skipped, executor
from experiments.harness.store import ROOT, Store
from experiments.harness.values import Results, Value
from experiments.harness.verdicts import Expected, Judged, judge, read_expected
from heddle.executor import Report

EXPERIMENTS = ROOT / "experiments"
MEASURED = "measured.json"
FIGURES = ROOT / "docs" / "images" / "results"
"""Folder of figures, beside the pages that show them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where numbers and figures are written."""

    numbers: Path
    """A folder with one folder for each experiment."""
    figures: Path
    committed: bool


COMMITTED = Place(EXPERIMENTS, FIGURES, committed=True)
"""Results at the paper's size, which are part of the source."""
LOCAL = Place(EXPERIMENTS / "reduced", EXPERIMENTS / "reduced" / "figures", committed=False)
"""Results at any other size; git ignores them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Result of an experiment: a value for every claim, and the numbers of its figure."""

    values: Mapping[str, Value]
    data: Mapping[str, Any] = field(default_factory=dict)
    """JSON; `draw` sees nothing else, so that a figure can be drawn again without a run."""


@dataclass(frozen=True, slots=True)
class Context:
    """Arguments of `measure`."""

    results: Results
    size: Size
    store: Store
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An experiment with its verdicts, or the reason why it was skipped."""

    name: str
    expected: Expected
    judged: tuple[Judged, ...] = ()
    skipped: str = ""
    size: Size | None = None
    """None: it has but one."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A folder with ``config.toml``, ``run.py`` and ``expected.json``."""

    folder: Path
    place: Place = COMMITTED

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def config(self) -> Mapping[str, Any]:
        """Its ``config.toml``."""
        return tomllib.loads((self.folder / "config.toml").read_text(encoding="utf-8"))

    @property
    def expected(self) -> Expected:
        """Its ``expected.json``."""
        return read_expected(self.folder / "expected.json")

    @property
    def script(self) -> ModuleType:
        """Its ``run.py``."""
        return importlib.import_module(f"experiments.{self.name}.run")

    @property
    def has_size(self) -> bool:
        """Whether a size changes it; small worked examples are what they are."""
        return "runs" in self.config or hasattr(self.script, "computations")

    @property
    def measures_time(self) -> bool:
        """Whether `measure` times code, which other processes would disturb."""
        return bool(self.config.get("measures_time", False))

    @property
    def measured(self) -> bool:
        """Whether it was ever run."""
        return self.numbers.exists()

    @property
    def numbers(self) -> Path:
        """Its ``measured.json``."""
        return self.place.numbers / self.name / MEASURED

    @property
    def figure(self) -> Path:
        return self.place.figures / f"{self.name}.png"

    def planned_runs(self, size: Size) -> list[PlannedRun]:
        """Runs that it needs.

        Raises:
            Skipped: it replays a recorded trace that is not there.
        """
        runs = planned_runs(self.config, size)
        for run in runs:
            path = run.job.rollout.path
            if path and not (ROOT / path).exists():
                raise Skipped(f"{path} is not there; recorded traces are no part of the source")
        return runs

    def computations(self, size: Size) -> Sequence[Computation]:
        """Results that it needs and that are no runs."""
        needed = getattr(self.script, "computations", None)
        return [] if needed is None else list(needed(size, self.config).values())

    def finish(self, size: Size, store: Store) -> None:
        """Measure and draw; every run and every computation that it needs has finished.

        Raises:
            Skipped: something that it needs is not there.
            ValueError: it measures a value that nothing claims, or leaves a claim unmeasured.
        """
        runs = self.planned_runs(size)
        results = Results([(a.axes, store.get(a.job.key)) for a in runs])
        measured = self.script.measure(Context(results, size, store, self.config))
        judged_all(self.expected, measured.values)
        kept = {
            "size": {"gpus": size.gpus, "seeds": size.seeds},
            "values": {name: value.plain() for name, value in measured.values.items()},
            "data": measured.data,
        }
        text = json.dumps(_rounded(kept), indent=1) + "\n"
        self.numbers.parent.mkdir(parents=True, exist_ok=True)
        self.numbers.write_text(text, encoding="utf-8")
        self.draw()

    def draw(self) -> None:
        """Draw the figure from ``measured.json``."""
        self.figure.parent.mkdir(parents=True, exist_ok=True)
        self.script.draw(self._kept()["data"], self.figure)

    def outcome(self) -> Outcome:
        """Judge what was measured last; without a measurement it counts as skipped."""
        expected = self.expected
        if not self.measured:
            return Outcome(name=self.name, expected=expected, skipped="not run yet")
        kept = self._kept()
        values = {name: Value(**plain) for name, plain in kept["values"].items()}
        size = kept["size"]
        # Computations run once, whatever the number of rollouts of a cell.
        seeds = 1 if hasattr(self.script, "computations") else size["seeds"]
        return Outcome(
            name=self.name,
            expected=expected,
            judged=judged_all(expected, values),
            size=Size(name="", gpus=size["gpus"], seeds=seeds) if self.has_size else None,
        )

    def _kept(self) -> dict[str, Any]:
        kept: dict[str, Any] = json.loads(self.numbers.read_text(encoding="utf-8"))
        return kept


def finish_all(
    chosen: Sequence[Experiment],
    size: Size,
    store: Store,
    *,
    processes: int,
    on_progress: Callable[[int, int], None],
) -> list[tuple[Experiment, float]]:
    """Measure and draw all; returns those that were not skipped with their seconds, in order.

    Those that measure time come last and alone.
    """
    beside = [e for e in chosen if not e.measures_time]
    took_s: dict[str, float | None] = {}
    finish = partial(_finish, store)
    for index, seconds in executor(processes, size).map(finish, beside):
        took_s[beside[index].name] = seconds
        on_progress(len(took_s), len(chosen))
    for experiment in chosen:
        if experiment.measures_time:
            took_s[experiment.name] = finish(size, experiment, None)
            on_progress(len(took_s), len(chosen))
    return [(e, seconds) for e in chosen if (seconds := took_s[e.name]) is not None]


def _finish(store: Store, size: Size, experiment: Experiment, _: Report | None) -> float | None:
    """Seconds that it took; None if it is skipped."""
    began_s = time.perf_counter()
    try:
        experiment.finish(size, store)
    except Skipped:
        return None
    return time.perf_counter() - began_s


def judged_all(expected: Expected, values: Mapping[str, Value]) -> tuple[Judged, ...]:
    """Judge each claim by the value of its name.

    Raises:
        ValueError: names differ.
    """
    claimed = [claim.id for claim in expected.claims]
    if sorted(claimed) != sorted(values):
        apart = sorted({*claimed} ^ {*values})
        raise ValueError(f"{expected.figure}: claimed or measured, but not both: {apart}")
    return tuple(judge(claim, values[claim.id]) for claim in expected.claims)


def experiments(place: Place = COMMITTED) -> list[Experiment]:
    """All experiments, figures first; their results are in `place`."""
    found = [Experiment(p.parent, place) for p in EXPERIMENTS.glob("*/expected.json")]
    return sorted(found, key=lambda e: (_kind(e.name), e.name))


def _kind(name: str) -> int:
    """Figures, then tables, then what is beyond the paper."""
    return 0 if name[0] == "f" and name[1].isdigit() else 1 if name[1].isdigit() else 2


def _rounded(value: Any) -> Any:
    """Numbers with six digits: more would only make files differ."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
        case _:
            return value
