"""Runs as tasks of a Ray cluster: two nodes on this machine."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.comparison.compare import compare
from heddle.config import PolicyConfig, RunConfig, RuntimeConfig
from heddle.config_error import ConfigError
from heddle.executor import Report, WorkerError
from heddle.ray.cluster import _free_shares, shares
from heddle.ray.executor import RayTasks, _in_task, _Reporter
from heddle.running import run
from heddle.runs import load_run
from heddle_core.events import (
    EngineFailed,
    EngineReady,
    StepFinished,
    StepPreempted,
    TrajectoryFinished,
)
from tests.app.journals import Heddle
from tests.app.test_compare import without_wall

pytestmark = pytest.mark.xdist_group("ray")

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


def test_engines_are_placed_widest_first_on_few_nodes():
    assert shares([1, 4, 2, 1], [4, 4, 4], "GPU") == [[4], [2, 1, 1]]
    with pytest.raises(ConfigError, match=r"TP 3,3 need 6 GPUs.*have free: 4, 2"):
        shares([3, 3], [4, 2], "GPU")


def test_what_ended_tasks_had_is_free_a_little_later(monkeypatch):
    counted = iter([[0, 0], [1, 0], [1, 1]])
    monkeypatch.setattr("heddle.ray.cluster._free", lambda ray, resource: next(counted))
    monkeypatch.setattr("heddle.ray.cluster.AGAIN_S", 0.0)
    assert _free_shares(None, [1, 1], "CPU") == [[1], [1]]
    monkeypatch.setattr("heddle.ray.cluster.FREED_S", 0.0)
    monkeypatch.setattr("heddle.ray.cluster._free", lambda ray, resource: [0])
    with pytest.raises(ConfigError, match="have free: 0"):
        _free_shares(None, [1], "CPU")


def test_the_death_of_a_node_loses_no_trajectory_and_makes_no_token_twice(
    cluster: Any, config: RunConfig, trace: Path, tmp_path: Path
):
    """All processes of a node are killed once a trajectory has ended; a new node comes later."""
    killed: list[int] = []

    def kill_a_node(done: int, total: int) -> None:
        if not killed:
            killed.append(done)
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            cluster.add_node(num_cpus=1)

    over_nodes = replace(
        config,
        cluster=replace(config.cluster, gpus=2, engine_start_s=0.1),
        runtime=RuntimeConfig(launcher="ray", time_scale=0.5),
    )
    path = run(over_nodes, out=tmp_path / "runs", on_progress=kill_a_node).path
    events = [entry.event for entry in load_run(path).entries()]
    failed = [e for e in events if isinstance(e, EngineFailed)]
    assert len(failed) == 1
    assert "died, or its connection broke" in failed[0].reason
    ends = [e.outcome for e in events if isinstance(e, TrajectoryFinished)]
    recorded = [json.loads(line) for line in trace.read_text().splitlines()]
    assert ends == ["completed"] * len(recorded)
    made = sum(e.output_tokens for e in events if isinstance(e, StepFinished | StepPreempted))
    made += sum(tokens for e in failed for _, tokens in e.salvaged)
    assert made == sum(s["output_tokens"] for t in recorded for s in t["steps"])


@pytest.mark.usefixtures("cluster")
def test_more_engines_than_the_cluster_has_cores_for_are_one_message(refused, trace, tmp_path):
    args = ("--engine", "fake", "--engines", 9, "--launcher", "ray", "--out", tmp_path / "runs")
    said = refused("run", trace, *args)
    assert "need 9 CPUs" in said
    assert "have free: 1, 1" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("cluster")
def test_a_gateway_serves_from_engines_on_two_nodes(heddle: Heddle, tmp_path: Path):
    pytest.importorskip("aiohttp", reason="the gateway needs aiohttp")
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
        cluster=ClusterConfig(gpus=2, engine_start_s=0.1),
        runtime=RuntimeConfig(engine="fake", launcher="ray", time_scale=0.01),
        policy=PolicyConfig(preset="verl"),
    )
    gateway = GatewayConfig(port=0, front=FrontSettings(max_open=64))
    result = serve(config, gateway, out=tmp_path / "runs", on_listening=listening)
    drivers[0].join()
    assert len(lengths) == 12
    run_directory = load_run(result.path)
    assert run_directory.manifest["status"] == "finished"
    assert len({node["name"] for node in run_directory.manifest["world"]["nodes"]}) == 2
    events = [entry.event for entry in run_directory.entries()]
    assert {e.engine for e in events if isinstance(e, EngineReady)} == {"e0", "e1"}
    steps = [e for e in events if isinstance(e, StepFinished)]
    assert {e.engine for e in steps} == {"e0", "e1"}
    assert sorted(e.output_tokens for e in steps) == sorted(lengths)
    assert "the same" in heddle("replay", result.path).stdout
