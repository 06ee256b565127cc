"""The notebooks: what they show is what running them shows; and what they call."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import RunConfig, RuntimeConfig
from heddle.runs import load_run
from notebooks import tables as notebook
from notebooks.execute import VARIES, differences, notebooks
from tests.app.conftest import ROOT

MOST_BYTES = 600_000
NAMES = [path.stem for path in notebooks()]

installed = pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None,
    reason="nbclient is not installed: make notebooks installs it",
)

LONG = ("01_compare_policies", "06_training_regimes", "07_speculation")
"""They take a minute and more, most of it in commands whose answers are golden too: `make soak`."""


class Bag(dict[str, Any]):
    """A node of a notebook, as nbformat makes it: keys are attributes too."""

    __getattr__ = dict.__getitem__


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"), object_hook=Bag)


def cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


@pytest.mark.slow
@installed
@pytest.mark.xdist_group("notebooks")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak) if n in LONG else n for n in NAMES]
)
def test_a_notebook_shows_what_it_shows_when_it_is_run(name: str):
    done = subprocess.run(
        [sys.executable, "-m", "notebooks.execute", name, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_a_notebook_reads_well_without_running(path: Path):
    code = cells(path)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [o.output_type for cell in code for o in cell.outputs]
    assert kinds
    assert "error" not in kinds
    shown = json.dumps([cell.outputs for cell in code])
    assert str(ROOT) not in shown
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("path", notebooks(), ids=lambda p: p.stem)
def test_cells_call_and_do_not_compute(path: Path):
    lines = [line for cell in cells(path) for line in "".join(cell.source).splitlines()]
    assert not [line for line in lines if line.lstrip().startswith(("for ", "while ", "try:"))]
    definitions = [line for line in lines if line.lstrip().startswith(("def ", "class "))]
    assert not definitions or path.stem == "04_write_a_policy"


def test_the_table_names_every_notebook():
    page = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"[{name}]({name}.ipynb)" not in page] == []


def made(*outputs: Bag, tags: tuple[str, ...] = ()) -> Bag:
    cell = Bag(cell_type="code", metadata=Bag(tags=tags), outputs=list(outputs))
    return Bag(cells=[Bag(cell_type="markdown"), cell])


def test_the_check_sees_words_and_tables_but_neither_pictures_nor_measured_times():
    def said(text: str) -> Bag:
        return Bag(output_type="stream", text=text)

    def table(html: str) -> Bag:
        return Bag(output_type="execute_result", data=Bag({"text/plain": "", "text/html": html}))

    def image(png: str) -> Bag:
        return Bag(output_type="display_data", data=Bag({"image/png": png, "text/plain": png}))

    assert len(differences(made(said("1 s")), made(said("2 s")))) == 1
    assert differences(made(table("<td> 1")), made(table("<td>  1\n"))) == []
    assert len(differences(made(table("<td>1")), made(table("<td>2")))) == 1
    assert len(differences(made(table("<td>1")), made())) == 1
    assert differences(made(image("a")), made(image("b"))) == []
    assert differences(made(said("1"), tags=(VARIES,)), made(said("2"), tags=(VARIES,))) == []


def test_tables_have_the_numbers_of_the_json(config: RunConfig, tmp_path: Path):
    result = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "runs")
    table = notebook.policies_table(result)
    plain = {row["policy"]: row for row in result.plain()["policies"]}
    for policy in ("verl", "slime"):
        assert table.loc[policy, "makespan_s"] == pytest.approx(
            plain[policy]["makespan_s"]["mean"], rel=1e-3
        )
        assert "ci95_s" in table
    runs = [load_run(run.path) for run in result.runs]
    shown = notebook.runs_table(runs, ["makespan_s", "migrations"])
    assert list(shown.index) == ["verl s0", "verl s1", "slime s0", "slime s1"]
    assert shown.loc["slime s1", "migrations"] == runs[3].summary["migrations"]
    assert list(notebook.runs_table({"mine": runs[0]}).index) == ["mine"]


def test_figures_are_pictures_by_name(config: RunConfig, tmp_path: Path):
    result = compare(config, ["verl"], out=tmp_path / "runs")
    drawn = notebook.figures([load_run(run.path) for run in result.runs])
    assert sorted(drawn) == ["active", "completion", "queueing", "timeline-verl-s0"]
    png, size = drawn["active"]._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert size == {"width": notebook.SHOWN_PX}
    assert notebook.trace_figure(config.trace).png.startswith(b"\x89PNG")


def test_a_fake_engine_is_measured_and_gives_its_profile_back(trace: Path, tmp_path: Path):
    config = RunConfig(
        trace=str(trace), cluster=ClusterConfig(gpus=1), runtime=RuntimeConfig(engine="fake")
    )
    sweep = notebook.measure(config, tmp_path / "sweep.json", max_running=8, max_context=2048)
    profile = notebook.fit(sweep, tmp_path / "mine.json")
    assert (tmp_path / "sweep.json").exists()
    errors = notebook.fit_table(profile)
    assert errors.loc["decode_unseen", "worst_pct"] < 1.0
    used = RunConfig(
        trace=str(trace), cluster=ClusterConfig(model=str(tmp_path / "mine.json"), gpus=1)
    )
    assert (
        compare(used, ["verl"], out=tmp_path / "runs").plain()["cluster"]["profile"]
        == "qwen3-14b.h100"
    )
