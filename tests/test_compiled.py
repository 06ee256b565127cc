"""The compiled build: which modules it has, and when it is used."""

import ast
import json
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import heddle_compiled
from heddle_compiled import ROOT, record, source, why_not
from heddle_compiled import build as compiled
from heddle_compiled.modules import MODULES


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a record of a build may lie, apart from one that is really there."""
    path = tmp_path / "build.json"
    monkeypatch.setattr(heddle_compiled, "RECORD", path)
    monkeypatch.delenv("HEDDLE_PURE", raising=False)
    monkeypatch.setattr(heddle_compiled, "why_not", why_not.__wrapped__)
    return path


def test_every_listed_module_is_a_source_file() -> None:
    assert [name for name in MODULES if not source(name).is_file()] == []
    assert list(MODULES) == sorted(set(MODULES))


@pytest.mark.parametrize("package", sorted({name.partition(".")[0] for name in MODULES}))
def test_a_package_with_compiled_modules_selects_the_build_before_it_imports_anything(
    package: str,
) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    assert isinstance(first, ast.Import)
    assert [alias.name for alias in first.names] == ["heddle_compiled"]


def test_classes_that_interpreted_ones_inherit_from_allow_it() -> None:
    closed = {
        cls.name
        for name in MODULES
        for cls in _classes(source(name))
        if not any("allow_interpreted_subclasses" in ast.unparse(d) for d in cls.decorator_list)
        and "Protocol" not in _bases(cls)
    }
    packages = sorted(path for path in ROOT.glob("heddle*") if path.is_dir())
    interpreted = {
        path: [cls for cls in _classes(path) if closed.intersection(_bases(cls))]
        for package in packages
        for path in package.rglob("*.py")
        if ".".join(path.relative_to(ROOT).with_suffix("").parts) not in MODULES
    }
    assert closed
    assert {str(path): [cls.name for cls in of] for path, of in interpreted.items() if of} == {}


def _classes(path: Path) -> list[ast.ClassDef]:
    return [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)
    ]


def _bases(cls: ast.ClassDef) -> set[str]:
    """Names of its base classes, without their module and type parameters."""
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in cls.bases}


def test_without_a_build_sources_run(build: Path) -> None:
    assert heddle_compiled.why_not() == "there is no compiled build"


def test_a_build_of_the_present_sources_is_used(build: Path) -> None:
    build.write_text(json.dumps(record()))
    assert heddle_compiled.why_not() == ""


def test_a_build_of_other_sources_that_is_cut_off_or_for_another_python_is_not_used(
    build: Path,
) -> None:
    sizes = {"heddle__mypyc.so": 1}  # more or less is here
    for changed in (
        {"suffix": ".cpython-27.so"},
        {"sources": {MODULES[0]: "0"}},
        {"extensions": sizes},
    ):
        build.write_text(json.dumps(record() | changed))
        assert "have changed" in heddle_compiled.why_not()


def test_a_damaged_record_is_not_used(build: Path) -> None:
    build.write_text("{")
    assert "have changed" in heddle_compiled.why_not()


def test_only_extensions_beside_sources_of_our_packages_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = EXTENSION_SUFFIXES[0]
    ours = [f"heddle_trace/listed_no_more{suffix}", f"heddle_sim/parts/engine{suffix}"]
    others = [f"heddle-env/lib/numpy/core{suffix}", f"heddle_sim/without_source{suffix}"]
    for name in (*ours, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    for name in (*ours, others[0]):
        (tmp_path / name.replace(suffix, ".py")).write_text("")
    for package in ("heddle_trace", "heddle_sim"):
        (tmp_path / package / "__init__.py").write_text("")
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in compiled.built()} == set(ours)


def test_extensions_without_a_record_are_not_used(tmp_path: Path) -> None:
    """As after a build that was interrupted: sources that were edited since must run."""
    shutil.copytree(ROOT / "heddle_compiled", tmp_path / "heddle_compiled")
    (tmp_path / "heddle_compiled" / "build.json").unlink(missing_ok=True)
    (tmp_path / "heddle_core").mkdir()
    (tmp_path / "heddle_core" / "__init__.py").write_text("import heddle_compiled\n")
    (tmp_path / "heddle_core" / "fleet.py").write_text("edited = True\n")
    (tmp_path / "heddle_core" / f"fleet{EXTENSION_SUFFIXES[0]}").write_bytes(b"no extension")
    done = subprocess.run(
        [sys.executable, "-c", "from heddle_core.fleet import edited"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_variable_switches_it_off(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.write_text(json.dumps(record()))
    monkeypatch.setenv("HEDDLE_PURE", "1")
    assert heddle_compiled.why_not() == "HEDDLE_PURE is 1"


def test_compiled_wheels_are_configured_for_each_python_and_system() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels = settings["tool"]["cibuildwheel"]
    assert settings["project"]["requires-python"] == ">=3.11"
    assert wheels["build"] == ["cp311-*", "cp312-*", "cp313-*"]
    assert wheels["linux"]["archs"] == ["x86_64", "aarch64"]
    assert wheels["macos"]["archs"] == ["x86_64", "arm64"]
    # What builds them is what builds the extensions here.
    assert wheels["before-build"][-1] == "python -m heddle_compiled.build"
