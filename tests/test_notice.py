"""Every trace, sample, profile and table that is shipped names its source and its licence."""

import json
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = {".py", ".pyc", ".pyi", ".so", ".md", ".js", ".css", ".html"}
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
FOLDERS = (
    *WHEEL["wheel"]["packages"],
    "traces",
    "tests/trace/fixtures",
    "tests/golden/answers/configs",
    "docs/tables",
)
ROWS = [
    tuple(cell.strip() for cell in line.split(" | "))
    for line in (ROOT / "NOTICE").read_text(encoding="utf-8").splitlines()
    if " | " in line
]


def shipped() -> list[str]:
    """Files with data, as paths from the root."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [*(ROOT / "experiments").glob("*/*.json")]
    return sorted(
        str(path.relative_to(ROOT))
        for path in files
        if path.suffix not in CODE and "__pycache__" not in path.parts
    )


def row_of(name: str) -> tuple[str, ...]:
    return next((row for row in ROWS if fnmatchcase(name, row[0])), ())


def test_every_shipped_file_of_data_has_a_source_and_a_licence():
    files = [name for name in shipped() if not name.startswith("heddle_compiled/build")]
    assert len(files) > 150
    assert [name for name in files if len(row_of(name)) != 3 or not all(row_of(name))] == []


def test_the_notice_names_files_that_exist():
    for pattern, _, _ in ROWS:
        if pattern != "heddle/reports/plotly.min.js":  # in a wheel only
            assert any(ROOT.glob(pattern)), pattern


@pytest.mark.parametrize("path", sorted((ROOT / "heddle_sim" / "profiles").glob("*.json")), ids=str)
def test_a_profile_says_what_the_notice_says(path: Path):
    source = json.loads(path.read_text(encoding="utf-8"))["source"]
    _, said, licence = row_of(str(path.relative_to(ROOT)))
    assert f"{source['package']} {source['version']}" in said
    assert source["licence"] == licence


@pytest.mark.parametrize("name", ["heddle/cost/prices.toml", "heddle_trace/typical_tools.toml"])
def test_every_entry_of_a_table_has_a_source(name: str):
    entries = tomllib.loads((ROOT / name).read_text(encoding="utf-8"))
    assert [kind for kind, entry in entries.items() if not entry.get("source")] == []


def test_priors_say_the_command_that_makes_them():
    for path in (ROOT / "heddle_trace" / "priors").glob("*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["command"]


def test_the_citation_and_the_wheel_name_the_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nlicense: {project['license']}\n" in citation
