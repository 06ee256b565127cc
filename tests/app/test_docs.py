"""What the pages say about figures, keys and files is what the code does."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

import pyarrow as pa
import pytest

from docs import reference
from heddle.cluster.config import ClusterConfig
from heddle.command_config import Config
from heddle.comparison.compare import compare
from heddle.config import RunConfig
from heddle.config_files import ConfigSource, resolve
from heddle.cost.prices import prices_of
from heddle.search.result import search
from heddle.search.verdict import plain
from heddle.setup import Workspace
from heddle.simulation import RUN_KEYS
from heddle_trace import synth, write_trace
from tests.app.journals import measured, steps_of
from tests.app.test_metrics import story

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN_DIRECTORY = (DOCS / "run-directory.md").read_text()
CLI = (DOCS / "cli.md").read_text()
JSON = (DOCS / "json.md").read_text()


def named(text: str) -> set[str]:
    """Words in code font, with `x_{a,b}_s` and `filled_*` spelt out or cut to their stem."""
    words = set()
    for word in re.findall(r"`([^`\s]+)`", text):
        stem, brace, rest = word.partition("{")
        options, _, end = rest.partition("}")
        words |= {stem + o + end for o in options.split(",")} if brace else {word}
    return words


def test_every_figure_and_column_is_defined():
    found, words = measured(story()), named(RUN_DIRECTORY)
    columns = {*steps_of(story()).column_names, *found.trajectories.column_names}
    plain = {"trajectory", "step", "reason", "group", "task", "arrived_s", "finished_s", "outcome"}
    assert found.summary.keys() <= words
    assert columns - plain <= words


def test_every_key_of_the_json_is_listed(config: RunConfig, tmp_path: Path):
    plain, words = compare(config, ["verl"], out=tmp_path / "runs").plain(), named(JSON)
    for part in (plain, *(plain[k] for k in ("trace", "cluster", "bound"))):
        assert {k for k in part if not k.startswith("filled_")} <= words
    assert plain["runs"][0].keys() | plain["policies"][0].keys() | set(RUN_KEYS) <= words


def test_every_key_of_a_plan_is_listed(tmp_path: Path):
    path = tmp_path / "coding.jsonl"
    write_trace(path, synth("coding", 64, seed=5, samples_per_group=8))
    config = RunConfig(trace=str(path), cluster=ClusterConfig(gpus=2))
    found = search(config, policies=["verl"], prices=prices_of({}, ["h100"]), budget_s=0.0)
    made, words = plain(found, []), named(JSON)
    for part in (made, made["trace"], made["cluster"], made["recommended"], made["searched"]):
        assert {k for k in part if not k.startswith("filled_")} <= words


def test_pages_of_reference_are_those_of_the_code():
    """To mend it: `python docs/reference.py`."""
    assert reference.CLI.read_text(encoding="utf-8") == reference.cli_page()
    assert reference.CONFIG.read_text(encoding="utf-8") == reference.config_page()


def test_what_is_written_by_hand_of_commands_is_short():
    assert len(CLI.partition(reference.MARK)[0].split()) <= 600


def test_the_late_predictions_are_those_of_tools_that_are_faster():
    page = (DOCS / "policies.md").read_text()
    rows = re.findall(r"^\| `(\w+-512)` \| ([\d.]+) \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    assert len(rows) == 3
    for name, prediction_s, predictions, late in rows:
        trace = str(DOCS.parent / "traces" / f"{name}.jsonl.gz")
        scripts, *_ = Workspace().completed(RunConfig(trace=trace))
        tools = [step.tool_s for script in scripts for step in script.steps[:-1]]
        assert int(predictions.replace(",", "")) == len(tools)
        assert int(late.replace(",", "")) == sum(s < float(prediction_s) for s in tools)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_every_configuration_in_the_pages_loads(path: Path):
    for block in re.findall(r"```toml\n(.*?)```", path.read_text(), re.DOTALL):
        resolve([ConfigSource(path.name, tomllib.loads(block))])


def keys(config: type, prefix: str = "") -> set[str]:
    """Names of all keys of a configuration, with the tables that they are in."""
    found = set()
    for name, kind in get_type_hints(config).items():
        found.add(prefix + name)
        for each in (kind, *get_args(kind)):
            if is_dataclass(each):
                found |= keys(each, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda p: p.stem)
def test_every_key_that_a_page_names_is_a_key(path: Path):
    text = path.read_text()
    tables = "cluster|loop|serve|runtime|policy|missing|plan|report|logs|synth|profile"
    named = re.findall(rf"(?:`|--set '?|--sweep )((?:{tables})\.\w+)", text)
    others = {"cluster.pools", "policy.parts", "report.html", "report.md"}
    assert {name for name in named if not name.endswith("_")} - others <= keys(Config)


def test_tables_read_back_with_the_types_they_were_written_with():
    steps = steps_of(story())
    assert steps.schema.field("tool_s").type == pa.float64()
    assert steps.schema.field("finished").type == pa.bool_()
    assert measured(story()).trajectories.schema.field("output_tokens").type == pa.int64()


EXAMPLES = sorted((DOCS / "examples").glob("*.out"))


@pytest.mark.parametrize("out", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_prints_what_its_page_shows(out: Path):
    done = subprocess.run(
        [sys.executable, str(out.with_suffix(".py"))],
        cwd=DOCS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs")
def test_the_site_is_searchable_from_disk_and_loads_nothing_from_a_network(tmp_path: Path):
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site],
        cwd=DOCS.parent,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = {")
    assert "makespan" in index
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link rel="stylesheet")[^>]*(?:src|href)="([^"]+)"', html)
        assert not [address for address in loaded if "//" in address], page
        shim = [address for address in loaded if address.endswith("iframe-worker.js")]
        assert shim, page
        assert page.name == "404.html" or (page.parent / shim[0]).is_file()


def test_every_page_of_the_site_is_there_and_every_page_is_on_it():
    text = (DOCS.parent / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w/.-]+\.md)$", text, re.MULTILINE)
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    decisions = {p for p in pages if p.startswith("decisions/")}
    assert set(listed) == pages - decisions
    index = (DOCS / "decisions" / "index.md").read_text()
    named = {f"decisions/{name}" for name in re.findall(r"\(([\w.-]+\.md)\)", index)}
    assert named == decisions - {"decisions/index.md"}


@pytest.mark.parametrize("path", sorted(DOCS.glob("decisions/00*.md")), ids=lambda p: p.stem)
def test_a_decision_has_150_words_at_most(path: Path):
    assert len(path.read_text().split()) <= 150


def test_the_pages_have_45_000_words_at_most():
    written = {*DOCS.glob("*.md")} - {DOCS / "cli.md", DOCS / "policy-attributes.md"}
    assert sum(len(path.read_text().split()) for path in written) <= 45_000
