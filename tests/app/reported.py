"""Runs for the tests of reports: made once per test process, from traces that are made here too."""

import base64
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heddle.cluster_config import ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.reports.page.html import page
from heddle.reports.run_bounds import run_bound
from heddle.runs import Run, RunFacts, load_run, open_run
from heddle.simulation import simulate
from heddle_core.journal import Entry
from heddle_trace import synth, write_trace

KINDS = {"u8": np.uint8, "u16": np.uint16, "u32": np.uint32}
NONE = 2**32 - 1

FACTS = RunFacts(driver="test", trace_name="small", trace_sha256="0" * 64, command_line=("x",))


@dataclass(frozen=True)
class Made:
    """Two runs of one trace, a page about both, and both as loaded."""

    path: Path
    runs: tuple[Run, ...]


def made(folder: Path, cluster: ClusterConfig, trajectories: int, policies: Sequence[str]) -> Made:
    trace = folder / "coding.jsonl.gz"
    write_trace(trace, synth("coding", trajectories, 11, 16))
    runs = []
    for policy in policies:
        config = RunConfig(trace=str(trace), cluster=cluster, policy=PolicyConfig(preset=policy))
        runs.append(load_run(simulate(config, out=folder / "runs").path))
    path = folder / "report.html"
    path.write_bytes(page(runs, run_bound))
    return Made(path, tuple(runs))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Engines that are short of slots, a policy that preempts and migrates, and a failure."""
    cluster = ClusterConfig(gpus=4, max_running=8, failures="e0@40", engine_start_s=20.0)
    return made(tmp_path_factory.mktemp("small"), cluster, 96, ("verl", "heddle-paper"))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A rollout of the size that the paper has."""
    cluster = ClusterConfig(gpus=64)
    return made(tmp_path_factory.mktemp("large"), cluster, 6400, ("verl",))


def by_hand(folder: Path, entries: Sequence[Entry], *, finish: bool = False) -> Run:
    """A run directory with these entries, finished or as if its process still ran."""
    config = RunConfig(trace="small.jsonl", cluster=ClusterConfig(gpus=2))
    run = open_run(folder / "runs", config, FACTS)
    for each in entries:
        run.record(each.event, each.commands)
    if finish:
        run.finish()
    else:
        run.flush()
        run._file._file.close()
    return load_run(run.path, unfinished=True)


def unpacked(html: bytes) -> tuple[dict[str, Any], list[dict[str, dict[str, Any]]]]:
    """The data of a page: its JSON, and for each run its tables of columns."""
    found = re.search(rb'<script id="data" type="application/octet-stream">([^<]*)<', html)
    assert found
    block = gzip.decompress(base64.b64decode(found.group(1)))
    size = int.from_bytes(block[:4], "little")
    head = json.loads(block[4 : 4 + size])
    tables = [
        {
            table: {
                name: np.frombuffer(block, KINDS[kind], length, 4 + size + at)
                for name, (kind, at, length) in columns.items()
            }
            for table, columns in run.items()
        }
        for run in head["columns"]
    ]
    return head, tables
