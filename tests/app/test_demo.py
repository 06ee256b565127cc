"""The command for newcomers, and what an installation of the core alone lacks."""

import builtins
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scipy.special import stdtrit

import heddle.cli.demo as demo_module
from heddle.cli import main
from heddle.comparison.estimates import t_quantile
from tests.app.journals import ONE_RUN

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_compares_and_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The small trace in place of the shipped one: what is asked is that all of it runs.
    monkeypatch.setattr(demo_module, "shipped_trace", lambda: ROOT / "traces" / "tiny.jsonl")
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "demo")])
    assert done.exit_code == 0, done.output
    assert "It is the best of these 3 policies, under one seed." in done.output
    assert "best baseline: " in done.output
    *_, after = done.output.splitlines()
    assert shlex.split(after)[:3] == ["heddle", "compare", "TRACE"]
    assert "--policies" not in after  # without names, all shipped ones are compared
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "heddle" in page


def test_the_trace_of_the_demo_is_there() -> None:
    assert demo_module.shipped_trace().exists()


def test_a_command_whose_extra_is_not_installed_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return imported(name, *args, **kwargs)

    imported = builtins.__import__
    for name in [n for n in sys.modules if n.startswith(("matplotlib", "heddle.reports.fig"))]:
        monkeypatch.delitem(sys.modules, name)
    out = tmp_path / "runs"
    trace = str(ROOT / "traces" / "tiny.jsonl")
    assert CliRunner().invoke(main, [*ONE_RUN, trace, "--out", str(out)]).exit_code == 0
    monkeypatch.setattr(builtins, "__import__", without)
    done = CliRunner().invoke(main, ["report", *map(str, out.glob("*/*/"))])
    assert done.exit_code == 2
    assert "needs matplotlib" in done.output
    assert "pip install 'heddle-rl[figures]'" in done.output


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 10, 99, 400])
def test_the_quantile_of_t_is_that_of_scipy(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(float(stdtrit(degrees, 0.975)), rel=1e-12)
