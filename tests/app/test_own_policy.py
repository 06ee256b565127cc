"""The page on writing a policy: its file is the file, and its command prints what it shows."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from heddle_core.hooks import Backlog, CarriesKv, Chunks, KeepsKvFor, Observer
from heddle_core.parts.table import KINDS
from heddle_core.policy import Policy
from tests.app.conftest import ROOT

PAGE = (ROOT / "docs" / "write-a-policy.md").read_text()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the checkout, so that runs are written elsewhere."""
    for name in ("traces", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def shell(command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_includes_the_file():
    assert re.findall(r'^--8<-- "(.*)"$', PAGE, re.MULTILINE) == ["docs/examples/own_policy.py"]
    assert (ROOT / "docs" / "examples" / "own_policy.py").is_file()


def test_the_command_on_the_page_prints_what_the_page_shows(checkout: Path):
    console = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert len(console) == 1
    command, shown = console[0]
    said = shell(command, checkout).partition("\nnext ")[0]
    assert [line.rstrip() for line in said.rstrip().splitlines()] == shown.rstrip().splitlines()
    run = next((checkout / "runs").glob("*/*-own_policy_policy-s0"))
    again = shell(
        f"PYTHONPATH=docs/examples heddle replay {run} --allow-policy own_policy:policy", checkout
    )
    assert again.endswith(": the same\n")


def test_the_table_names_every_part_with_its_method():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)\(", PAGE, re.MULTILINE)
    protocols = get_type_hints(Policy)
    assert [kind for kind, _ in rows] == list(KINDS)
    assert all(hasattr(protocols[kind], method) for kind, method in rows)


def test_the_table_names_every_further_method_of_parts():
    table = PAGE.partition("| method | of part |")[2].partition("\n\n")[0]
    protocols = (Observer, Backlog, CarriesKv, KeepsKvFor, Chunks)
    further = [name for p in protocols for name in vars(p) if not name.startswith("_")]
    assert all(re.search(rf"`{name}\b", table) for name in further)
    assert len(further) == 8
