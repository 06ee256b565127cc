"""Runs tests on a tree that has a planted fault, until the first one fails."""

import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

MOST_CPU_S: Final = 60.0
"""Of one test: a fault that makes it endless is found."""
MOST_WALL_S: Final = 240.0
"""Of one test, or of the import of all of them."""
EXAMPLES: Final = 20
"""Of a property at most."""
PASSED: Final = (0, 5)
"""Statuses of pytest: all passed, or there were none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How tests ended."""

    passed: bool
    test: str
    """The last test that began; empty: none did."""


def verdict(tree: Path, tests: Sequence[str]) -> Verdict:
    """Run tests in a process that this one forks, in their order."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run_tests(tree, tests, write)
    os.close(write)
    begun, passed = b"", True
    while select.select([read], [], [], MOST_WALL_S)[0]:
        chunk = os.read(read, 1 << 16)
        if not chunk:
            break
        begun = (begun + chunk)[-4096:]
    else:
        passed = False
    os.close(read)
    passed = _ended(pid, at_once=not passed) in PASSED and passed
    last = begun.decode(errors="replace").rstrip("\n").rpartition("\n")[2]
    return Verdict(passed, last)


def _ended(pid: int, *, at_once: bool) -> int:
    """Return the status of a process, which is killed when it does not end by itself."""
    until_s = time.monotonic() + (0.0 if at_once else MOST_WALL_S)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until_s:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.01)


class Begun:
    """Plugin of pytest: writes the id of every test that begins, and limits its CPU time."""

    def __init__(self, out: int) -> None:
        self._out = out

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        os.write(self._out, f"{nodeid}\n".encode())
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)


def _run_tests(tree: Path, tests: Sequence[str], out: int) -> NoReturn:
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    os.setsid()
    os.chdir(tree)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(HEDDLE_PURE="1", PYTHONPATH=str(tree))
    sys.path.insert(0, str(tree))
    _forget_build()
    _limit_examples()
    settings.register_profile(
        "mutants",
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow],
    )
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    options += ["--hypothesis-profile=mutants", "--tb=no"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    chosen = ["-m", "not real_engines and not gpu and not soak", *tests]
    status = pytest.main([*options, *chosen], plugins=[Begun(out)])
    os._exit(int(status))


def _forget_build() -> None:
    """Drop the compiled build of this process: the tree has a fault in its sources, and none."""
    build = "heddle_compiled"
    for name in [name for name in sys.modules if name.partition(".")[0] == build]:
        del sys.modules[name]
    sys.meta_path[:] = [each for each in sys.meta_path if getattr(each, "__module__", "") != build]


def _limit_examples() -> None:
    """Make tests that name a larger number of examples run fewer."""
    from hypothesis import settings

    given = settings.__init__

    def limited(self: settings, *parents: Any, **options: Any) -> None:
        if isinstance(options.get("max_examples"), int):
            options["max_examples"] = min(options["max_examples"], EXAMPLES)
        given(self, *parents, **options)

    settings.__init__ = limited  # type: ignore[method-assign]
