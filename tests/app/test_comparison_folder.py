"""A comparison has one folder with its runs, index and page; `heddle runs` lists folders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.config import RunConfig
from heddle.runs import load_run
from heddle.runs.comparison_folder import runs_in, shown_runs
from heddle.search.policies import shipped
from tests.app.journals import Heddle
from tests.app.reported import unpacked

CLUSTER = ("--gpus", "2", "--max-running", "2")
FEW = "6 trajectories for 2 engines, fewer than 8 each"


def test_compare_needs_only_a_trace(heddle: Heddle, trace: Path):
    done = heddle("compare", trace, "--gpus", 2)
    assert done.exit_code == 0, done.output
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-small-compare")
    index = json.loads((folder / "index.json").read_text())
    assert index["schema"] == "heddle.compare/2"
    presets = [row["policy"].partition("@")[0] for row in index["policies"]]
    assert presets == shipped(RunConfig(trace="-"))
    assert presets[0] == "verl"
    assert {Path(run["run"]) for run in index["runs"]} == {
        p for p in folder.iterdir() if p.is_dir()
    }
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "heddle s0" in page
    assert f"next: open {folder / 'report.html'} in a browser" in done.stdout
    assert "fewer than 8 each" in done.stderr


def test_the_page_says_what_the_terminal_says_over_all_seeds(heddle: Heddle, trace: Path):
    on = ("--gpus", 2, "--policies", "verl*,heddle", "--seeds", 4)
    done = heddle("compare", trace, *on)
    (folder,) = Path("runs").iterdir()
    index = json.loads((folder / "index.json").read_text())
    head, _ = unpacked((folder / "report.html").read_bytes())
    found = head["compared"]
    assert found["verdict"] == index["verdict"] == done.stdout.splitlines()[0]
    # More runs than a page shows: it has those of the first seed, and says so.
    assert (found["seeds"], found["shown"]) == (4, 1)
    assert [row["policy"] for row in found["rows"]] == index["ranking"]
    assert all(row["low"] <= row["mean"] <= row["high"] for row in found["rows"])
    (alone,) = [run for run in folder.iterdir() if "heddle" in run.name and "s0" in run.name]
    shutil.move(alone, "elsewhere")
    assert heddle("report", "elsewhere", "-o", "alone.html").exit_code == 0
    assert unpacked(Path("alone.html").read_bytes())[0]["compared"] is None


def test_json_brings_an_index_and_a_page_only_on_request(heddle: Heddle, trace: Path):
    options = ("compare", trace, "--policies", "verl", *CLUSTER, "--json")
    done = heddle(*options)
    (folder,) = Path("runs").iterdir()
    assert json.loads(done.stdout) == json.loads((folder / "index.json").read_text())
    assert not (folder / "report.html").exists()
    shutil.rmtree("runs")
    heddle(*options, "--set", "report.page=true")
    assert len(list(Path("runs").glob("*/report.html"))) == 1


def test_no_report_names_the_command_that_makes_one(heddle: Heddle, trace: Path):
    done = heddle("compare", trace, "--policies", "verl", *CLUSTER, "--set", "report.page=false")
    (folder,) = Path("runs").iterdir()
    assert f"next: heddle report {folder} -o report.html" in done.stdout
    assert heddle("report", folder, "-o", "report.html").exit_code == 0
    assert Path("report.html").is_file()
    assert heddle("report", *folder.iterdir(), "-o", "again.html").exit_code == 0


def test_enough_trajectories_bring_no_warning(heddle: Heddle, trace: Path):
    once = twice = trace.read_text()
    for group in range(3):
        twice = twice.replace(f'"g{group}', f'"h{group}')
    trace.write_text(once + twice)
    done = heddle("compare", trace, "--policies", "verl", "--gpus", 1, "--set", "report.page=false")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""


def test_bad_input_leaves_no_folder(refused: Callable[..., str], trace: Path):
    assert "Did you mean 'slime'" in refused("compare", trace, "--policies", "slim", *CLUSTER)
    assert not Path("runs").exists()


def test_runs_lists_filters_and_names_pages(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl,slime", *CLUSTER)
    heddle("run", trace, "--policy", "heddle", "--set", "runtime.time_scale=0.001")
    compared, single = sorted(Path("runs").iterdir())
    shown = heddle("runs").stdout
    assert compared.name in shown
    assert single.name in shown
    listed = json.loads(heddle("runs", "--json").stdout)["runs"]
    assert [(run["kind"], run["status"], run["runs"]) for run in listed] == [
        ("comparison", "finished", 2),
        ("run", "finished", 1),
    ]
    assert listed[1]["makespan_s"] == load_run(single).summary["makespan_s"]
    assert sorted(listed[0]["policies"]) == ["slime", "verl"]
    for filters in (("heddle",), ("heddle-s0",), ("--last", 1)):
        (only,) = json.loads(heddle("runs", *filters, "--json").stdout)["runs"]
        assert only["path"] == str(single)
    assert heddle("runs", "compare", "--page").stdout.strip() == str(compared / "report.html")
    assert not (single / "report.html").exists()
    assert heddle("runs", "--page").stdout.strip() == str(single / "report.html")
    assert (single / "report.html").is_file()


def test_runs_opens_a_page_in_a_browser(
    heddle: Heddle, trace: Path, monkeypatch: pytest.MonkeyPatch
):
    heddle("compare", trace, "--policies", "verl", *CLUSTER)
    opened: list[str] = []
    monkeypatch.setattr("rich_click.launch", lambda url: opened.append(url) or 0)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)
    page = heddle("runs", "--page").stdout.strip()
    assert opened == [page]
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert heddle("runs", "--page").stdout.strip() == page
    assert opened == [page]


def test_runs_shows_what_did_not_finish_or_is_damaged(heddle: Heddle, trace: Path):
    heddle("compare", trace, "--policies", "verl", *CLUSTER, "--set", "report.page=false")
    (folder,) = Path("runs").iterdir()
    shutil.copytree(folder, "runs/a")
    Path("runs/a/index.json").unlink()
    (folder / "index.json").write_text("{}")
    Path("runs/b").mkdir()
    Path("runs/b/manifest.json").write_text("nothing")
    listed = json.loads(heddle("runs", "--json").stdout)["runs"]
    assert [run["status"] for run in listed] == ["damaged", "unfinished", "damaged"]
    (only,) = json.loads(heddle("runs", "unfinished", "--json").stdout)["runs"]
    assert only["policies"] == ["verl"]


@pytest.mark.parametrize("rows", [[], [{"policy": "verl", "makespan_s": {"mean": "long"}}]])
def test_an_index_that_does_not_add_up_is_damaged_and_has_no_page(
    heddle: Heddle, refused: Callable[..., str], rows: list[object]
):
    folder = Path("runs/a")
    folder.mkdir(parents=True)
    index = {"schema": "heddle.compare/1", "ranking": ["verl"], "policies": rows}
    (folder / "index.json").write_text(json.dumps({**index, "trace": {"name": "small"}}))
    (listed,) = json.loads(heddle("runs", "--json").stdout)["runs"]
    assert listed["status"] == "damaged"
    assert "runs/a: has no runs to draw; compare again" in refused("runs", "--page")


def test_a_page_has_each_policy_at_its_best_and_of_many_runs_the_first_seed(
    heddle: Heddle, trace: Path
):
    options = (
        "--policies",
        "verl,slime",
        "--gpus",
        2,
        "--sweep",
        "cluster.tp=1,2",
        "--set",
        "report.page=false",
        "--json",
    )
    index = json.loads(heddle("compare", trace, *options).stdout)
    (folder,) = Path("runs").iterdir()
    best = [row["policy"] for row in index["policies"] if row["best"]]
    assert len(runs_in(folder)) == 4
    shown = {run["policy"]: Path(run["run"]) for run in index["runs"]}
    assert shown_runs(folder) == [shown[name] for name in best]
    many = [{**run, "seed": seed} for seed in range(7) for run in index["runs"]]
    (folder / "index.json").write_text(json.dumps({**index, "runs": many}))
    assert shown_runs(folder) == [shown[name] for name in best]
    (folder / "index.json").unlink()
    assert shown_runs(folder) == runs_in(folder)


def test_the_page_shows_the_best_setting_and_the_narrowest_beside_it(heddle: Heddle, trace: Path):
    options = (
        "--policies",
        "verl,heddle",
        "--gpus",
        2,
        "--sweep",
        "cluster.tp=1,2",
        "--sweep",
        "cluster.max_running=50,100",
    )
    heddle("compare", trace, *options)
    (folder,) = Path("runs").iterdir()
    index = json.loads((folder / "index.json").read_text())
    mean_s = {row["policy"]: row["makespan_s"]["mean"] for row in index["policies"]}
    (best,) = (row["policy"] for row in index["policies"] if row.get("preset") and row["best"])
    head, _ = unpacked((folder / "report.html").read_bytes())
    assert [run["label"] for run in head["runs"]] == [f"{best} s0", "heddle s0"]
    assert [row["label"] for row in head["why"]["rows"]] == [f"{best} s0", "heddle s0"]
    assert [run["tried"] for run in head["runs"]] == [
        {
            "row": best,
            "among": "best of TP 1, 2 with 2 numbers of running steps",
            "narrowest": "TP 1, 100 running",
            "narrowest_s": mean_s["verl@tp1/100"],
        },
        None,
    ]
    table = heddle("report", *map(str, shown_runs(folder)), "-o", "figures").stdout
    assert f"{best} s0" in table
    (folder / "index.json").unlink()
    heddle("report", folder, "-o", "report.html")
    assert [run["tried"] for run in unpacked(Path("report.html").read_bytes())[0]["runs"]] == [
        None for _ in mean_s
    ]


def test_runs_without_runs_is_one_message(refused: Callable[..., str]):
    assert "runs: no such folder" in refused("runs")
    Path("runs").mkdir()
    assert "runs: has no runs" in refused("runs")
