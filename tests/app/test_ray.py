"""Runs as tasks of a Ray cluster: two nodes on this machine."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.comparison import compare
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.executor import Report, WorkerError
from heddle.ray_executor import RayTasks, _in_task
from tests.app.test_compare import without_wall

pytestmark = pytest.mark.xdist_group("ray")

LIMIT_S = 120.0
"""Far beyond anything that is waited for."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without cores and two nodes of one core each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'heddle[ray]'")
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
    with pytest.raises(ConfigError, match=r"pip install 'heddle\[ray\]'"):
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
