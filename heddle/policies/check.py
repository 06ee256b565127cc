"""Checks of a policy: equal decisions for equal events, no clock and no files, time of its calls.

The policy runs twice on the same trace, each time made anew. Then another process, with other
hashes of text, feeds the recorded events to a third and compares its commands.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import numpy as np

from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.policies.errors import own_files
from heddle.policy_inputs import sees_the_future
from heddle.runs import Run, load_run
from heddle.setup import RunSetup, prepare
from heddle.simulation import check_starts_engines, simulate
from heddle_core.journal import Divergence
from heddle_core.parts.table import KINDS

USUAL_US: Final = 100.0
"""Mean microseconds of a call above which it is slow; most calls take about ten."""
ONCE: Final = frozenset({"plan", "assign", "consolidate"})
"""Methods that see a whole rollout, and so may take longer."""

_IMPURE: Final[tuple[tuple[ModuleType, tuple[str, ...]], ...]] = (
    (time, ("time", "monotonic", "perf_counter", "process_time", "sleep")),
    (time, ("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns")),
    (random, ("random", "randint", "randrange", "choice", "choices", "shuffle", "sample")),
    (random, ("uniform", "gauss", "expovariate", "betavariate", "normalvariate")),
    (np.random, ("random", "rand", "randn", "randint", "choice", "shuffle", "permutation")),
    (np.random, ("normal", "uniform", "exponential")),
    (os, ("urandom", "getenv")),
)
"""Functions whose result does not follow from the events, by module."""
_EVENTS: Final = frozenset(
    {"open", "os.listdir", "os.system", "socket.connect", "subprocess.Popen"}
)
"""Audit events of input and output."""
_CLOCK: Final[Callable[[], float]] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTime:
    """How long one method of a part takes."""

    method: str
    """Kind of part and method, as ``placement.place``."""
    calls: int
    mean_us: float
    worst_us: float

    @property
    def slow(self) -> bool:
        """Whether the mean is above the usual, in a method that is called at every step."""
        return self.mean_us > USUAL_US and self.method.partition(".")[2] not in ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """What was found of a policy."""

    policy: str
    trajectories: int
    decisions: int
    """Commands of the controller in one run."""
    impure: tuple[str, ...]
    """Reads of clocks, files and unseeded random numbers: file, line and what was called."""
    differs: str | None
    """The first difference of a second run in the same process; None if there is none."""
    diverges: str | None
    """The first difference in another process, with other hashes of text; None without one, or
    where another check had failed already."""
    times: tuple[CallTime, ...]

    @property
    def passed(self) -> bool:
        """Whether the policy is deterministic and pure. Times do not count."""
        return not self.impure and self.differs is None and self.diverges is None

    def plain(self) -> dict[str, Any]:
        return {
            "schema": "heddle.policy-check/1",
            **asdict(self),
            "passed": self.passed,
            "times": [asdict(each) | {"slow": each.slow} for each in self.times],
        }


def check_policy(name: str, config: RunConfig) -> PolicyCheck:
    """Run a policy on the trace and cluster of `config`, and check it.

    Raises:
        ConfigError: the policy sees the future, so equal events do not decide alone; or it starts
            no engines.
        PolicyError, PolicyNotFound: it cannot be used, or a part raised an error.
        ValueError: one of the packages' errors for bad input.
    """
    config = replace(config, policy=replace(config.policy, preset=name))
    with tempfile.TemporaryDirectory(prefix="heddle-check-") as folder, _watching() as watch:
        setup = prepare(config)
        if sees_the_future(setup.policy):
            raise ConfigError(
                f"{name}: reads the trace, so equal events do not decide alone; check it without "
                "an oracle"
            )
        check_starts_engines(setup)
        watch.files = tuple(own_files(setup.policy))
        spent: dict[str, list[float]] = {}
        one = simulate(_timed(setup, spent), out=Path(folder))
        two = simulate(prepare(config), out=Path(folder))
        watch.files = ()
        differs = _first_difference(load_run(one.path), load_run(two.path))
        return PolicyCheck(
            policy=name,
            trajectories=setup.workload.trajectories,
            decisions=sum(len(entry.commands) for entry in load_run(one.path).entries()),
            impure=tuple(watch.found),
            differs=differs,
            diverges=None if differs or watch.found else _replayed_elsewhere(one.path, name),
            times=tuple(
                CallTime(
                    method=method,
                    calls=len(seconds),
                    mean_us=1e6 * sum(seconds) / len(seconds),
                    worst_us=1e6 * max(seconds),
                )
                for method, seconds in spent.items()
                if seconds
            ),
        )


def _first_difference(one: Run, two: Run) -> str | None:
    entries = zip(one.entries(), two.entries(), strict=False)
    for index, (first, second) in enumerate(entries):
        if list(first.commands) != list(second.commands):
            return str(
                Divergence(
                    index=index,
                    event=first.event,
                    recorded=first.commands,
                    replayed=second.commands,
                )
            )
    return None


def _replayed_elsewhere(run: Path, name: str) -> str | None:
    """Replay a run in a new process, whose hashes of text differ from those of this one."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    path = os.pathsep.join([folder for folder in sys.path if folder])
    allowed = [word for part in name.split("+") if ":" in part for word in ("--allow-policy", part)]
    done = subprocess.run(
        [sys.executable, "-m", "heddle.cli", "replay", str(run.resolve()), *allowed],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    return (done.stdout.removeprefix("diverges: ") or done.stderr).strip()


class _TimedPart:
    """A part whose method calls are timed; all else is that of the part."""

    def __init__(self, part: object, kind: str, spent: dict[str, list[float]]) -> None:
        self._part, self._kind, self._spent = part, kind, spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found
        seconds = self._spent.setdefault(f"{self._kind}.{name}", [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = _CLOCK()
            try:
                return found(*args, **kwargs)
            finally:
                seconds.append(_CLOCK() - began_s)

        setattr(self, name, timed)
        return timed


def _timed(setup: RunSetup, spent: dict[str, list[float]]) -> RunSetup:
    """The same run with timed parts, which add their seconds to `spent` by kind and method."""
    parts: dict[str, Any] = {
        kind: _TimedPart(getattr(setup.policy, kind), kind, spent) for kind in KINDS
    }
    return replace(setup, policy=replace(setup.policy, **parts))


@dataclass(slots=True)
class _Watch:
    """Calls of impure functions out of some files."""

    files: tuple[str, ...] = ()
    found: dict[str, None] = field(default_factory=dict)

    def note(self, what: str, frame: FrameType | None) -> None:
        """Keep a call if one of the files is in its stack; imports are not input."""
        while frame is not None and self.files:
            name = frame.f_code.co_filename
            if name.startswith("<frozen importlib"):
                return
            if os.path.realpath(name) in self.files:
                place = f"{os.path.relpath(name)}:{frame.f_lineno}: in {frame.f_code.co_name}"
                self.found[f"{place}: {what}"] = None
                return
            frame = frame.f_back


_watch: _Watch | None = None
"""That of the check that is under way."""
_audited = False
"""Whether the audit hook is there; none can be removed."""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watch is not None and _watch.files and event in _EVENTS:
        _watch.note(f"{event} {args[0]!r}" if args else event, sys._getframe(1))


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Note impure calls. What a policy imports by name from a module must be imported within."""
    global _watch, _audited
    if not _audited:
        sys.addaudithook(_audit)
        _audited = True
    watch = _watch = _Watch()
    kept: list[tuple[ModuleType, str, Any]] = []
    try:
        for module, names in _IMPURE:
            for name in names:
                usual = getattr(module, name)
                kept.append((module, name, usual))
                setattr(module, name, _noted(f"{module.__name__}.{name}", usual, watch))
        yield watch
    finally:
        _watch = None
        for module, name, usual in kept:
            setattr(module, name, usual)


def _noted(what: str, usual: Callable[..., Any], watch: _Watch) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        watch.note(what, sys._getframe(1))
        return usual(*args, **kwargs)

    return noted
