"""The campaign `mutants`: one planted fault, and the tests that cover it, a case."""

import ast
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from campaigns.campaign import Failure, Outcome
from campaigns.mutants.judge import Verdict, verdict
from campaigns.mutants.mutations import mutated, mutations

ROOT: Final = Path(__file__).resolve().parents[2]
PRELOADED: Final = (
    "numpy",
    "pandas",
    "pyarrow",
    "scipy",
    "hypothesis",
    "pytest",
    "simpy",
    "msgspec",
)
SMALL_ROLLOUTS: Final = "tests/golden/test_decisions.py::test_a_small_rollout_is_decided_as_before"
SCHEDULES: Final = "tests/campaigns/test_schedules.py::test_schedules_of_faults_hold"
COVERED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "heddle_core": (SCHEDULES, SMALL_ROLLOUTS, "tests/loop/test_controller.py", "tests/core"),
    "heddle_rollout": (SCHEDULES, SMALL_ROLLOUTS, "tests/rollout", "tests/gateway"),
    "heddle_sim": (SCHEDULES, SMALL_ROLLOUTS, "tests/sim"),
    "heddle_runtime": (),
    "heddle_gateway": ("tests/gateway",),
    "heddle_trace": (
        "tests/trace",
        "tests/app/test_observed_formats.py",
        "tests/app/test_observed_round_trips.py",
    ),
    "heddle_calibrate": ("tests/calibrate", "tests/app/test_calibrate_serving.py"),
    "heddle_predict": ("tests/predict",),
    "heddle": tuple(
        f"tests/app/test_{name}.py"
        for name in ("compare", "plan_search", "plan_clusters", "loop", "cli")
    ),
}
"""Tests of a package, one after the other, after those that import the module.

Those of all of `heddle_runtime` wait for processes, so its modules are judged by the tests that
import them, or that are in a folder of the same name.
"""
NEAR: Final[Mapping[str, tuple[str, ...]]] = {
    "heddle_core": ("core",),
    "heddle_rollout": ("rollout", "core"),
    "heddle_sim": ("sim", "rollout", "loop"),
    "heddle_runtime": ("runtime",),
    "heddle_gateway": ("gateway",),
    "heddle_trace": ("trace",),
    "heddle_calibrate": ("calibrate", "tools"),
    "heddle_predict": ("predict",),
    "heddle": ("app", "loop"),
}
"""Folders of tests in which those that import a module of a package take seconds, not minutes."""
WITH_ENGINES: Final = (
    "heddle_runtime/vllm/",
    "heddle_runtime/vllm_http/render_process",
    "heddle_runtime/tiny_model",
)
"""What only tests of real engines cover."""


class MutantCase(msgspec.Struct, frozen=True, kw_only=True):
    """A planted fault."""

    file: str
    number: int
    """Of the changes of the file."""


class Mutants:
    """Faults drawn evenly over the packages, then over what can be changed in them."""

    name = "mutants"
    unit = "planted faults"
    case_type = MutantCase
    tolerated = 0.1
    saves = False
    most_wall_s = 3600.0

    def begin(self, folder: str) -> None:
        """Import what others wrote, and copy the tree."""
        tempfile.tempdir = folder
        for name in PRELOADED:
            import_module(name)

    def case(self, rng: Random) -> MutantCase:
        files = changeable(rng.choice(list(COVERED_BY)))
        (file,) = rng.choices(list(files), weights=list(files.values()))
        return MutantCase(file=file, number=rng.randrange(files[file]))

    def run(self, case: MutantCase) -> Outcome:
        """Run the tests on a copy of the sources that has the fault."""
        mutation, source = mutated((ROOT / case.file).read_text(), case.number)
        package = case.file.partition("/")[0]
        found = _judged(case.file, source, tests_of(case.file))
        if found.passed:
            failure = Failure(f"{case.file}:{mutation.line}", mutation.what)
            return Outcome(failure, {f"survived, {package}": 1, "survived": 1})
        if found.test and not _pass_unchanged(found.test):
            return Outcome(Failure(f"{found.test} fails unchanged", f"{case}"))
        killed = f"{case.file}:{mutation.line}: {mutation.what}: killed by {found.test}"
        return Outcome(counts={f"killed, {package}": 1, "killed": 1}, note=killed)

    def smaller(self, case: MutantCase) -> Iterator[MutantCase]:
        """One fault is the smallest number of faults."""
        yield from ()


@lru_cache
def changeable(package: str) -> Mapping[str, int]:
    """Return the files of a package, with the number of changes that each has."""
    counted = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith(WITH_ENGINES) and tests_of(name):
            counted[name] = len(mutations(ast.parse(path.read_text())))
    return {name: number for name, number in counted.items() if number}


def tests_of(file: str) -> list[tuple[str, ...]]:
    """Return groups of tests of a module, in the order in which they run."""
    package, folder = file.split("/")[:2]
    same = f"tests/{package.removeprefix('heddle_')}/{folder}"
    near = [(same,)] if (ROOT / same).is_dir() else []
    groups = [importing(file), *near, *((tests,) for tests in COVERED_BY[package])]
    return [group for group in groups if group]


@lru_cache
def importing(file: str) -> tuple[str, ...]:
    """Return the files of tests that import a module; first those that import little else."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    found = [
        path
        for folder in NEAR[file.partition("/")[0]]
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
        if module in _imports(path)
    ]
    found.sort(key=lambda path: len(_imports(path)))
    return tuple(str(path.relative_to(ROOT)) for path in found)


@cache
def _imports(path: Path) -> frozenset[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return frozenset(names)


def _judged(file: str, source: str, groups: Sequence[Sequence[str]]) -> Verdict:
    """Run groups of tests on a tree where a file has another content, then restore it."""
    changed = _copy() / file
    whole = changed.read_text()
    found = Verdict(passed=True, test="")
    try:
        _write(changed, source)
        for tests in groups:
            if found.passed:
                found = verdict(_copy(), tests)
        return found
    finally:
        _write(changed, whole)


def _write(path: Path, source: str) -> None:
    """Write a source; what Python kept of the one before is as old and can be as long."""
    for kept in path.parent.glob(f"__pycache__/{path.stem}.*"):
        kept.unlink()
    path.write_text(source)


@lru_cache
def _copy() -> Path:
    """Copy sources and tests without a compiled build, once in each process; link the rest."""
    tree = Path(tempfile.mkdtemp(prefix="heddle-mutants-"))
    skipped = shutil.ignore_patterns("*.so", "build.json", "__pycache__", ".hypothesis")
    for path in ROOT.iterdir():
        if path.name in (*COVERED_BY, "heddle_compiled", "tests"):
            shutil.copytree(path, tree / path.name, ignore=skipped)
        elif not path.name.startswith("."):
            (tree / path.name).symlink_to(path)
    return tree


@cache
def _pass_unchanged(test: str) -> bool:
    return verdict(_copy(), [test]).passed
