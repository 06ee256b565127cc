"""verl's agent loop manager under Heddle's: identity of trajectories, their ends, rollouts."""

import time

import pytest

from heddle_core.events import RolloutClosed, RolloutStarted, TrajectoryArrived, TrajectoryFinished
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("ray_cluster")]


def batch(samples, *, step):
    """Samples of prompts, as a trainer hands them over; `samples` are (uid, prompt, lengths)."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl.protocol import DataProto

    def column(values):
        made = np.empty(len(values), dtype=object)
        made[:] = values
        return made

    return DataProto(
        batch=TensorDict({"dummy": torch.zeros(len(samples), 1)}, batch_size=len(samples)),
        non_tensor_batch={
            "raw_prompt": column([(prompt, lengths) for _, prompt, lengths in samples]),
            "uid": column([uid for uid, _, _ in samples]),
            "data_source": column(["coding"] * len(samples)),
            "index": np.arange(len(samples)),
        },
        meta_info={"global_steps": step, "validate": False},
    )


@pytest.mark.parametrize("proxy", ["true", "false"])
def test_a_batch_is_a_rollout_of_its_groups_and_trajectories_end_with_their_loops(
    verl_config, yaml_file, tmp_path, proxy
):
    import ray
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from heddle.runs import load_run
    from heddle_verl.agent_loops import Manager
    from tests.verl.fakes import continuation, engines

    servers = engines(2, slots=4)
    settings = yaml_file(proxy=proxy, out=tmp_path / "runs")
    router = get_router_handle(servers, router_config_path=settings)
    manager = Manager.create(verl_config, LLMServerClient(verl_config, router))
    samples = [(f"p{n // 4}", [n // 4] * 9, [5 + n, 7]) for n in range(16)]
    for step in (1, 2):
        output = manager.generate_sequences(batch(samples, step=step))
        for row, (_, prompt, lengths) in enumerate(samples):
            expected = continuation(prompt, sum(lengths))
            assert output.batch["responses"][row][: len(expected)].tolist() == expected
    # verl's client waits for no release: the last may come after the batch.
    end_s = time.monotonic() + PATIENCE_S
    idle = {"total_inflight": 0, "waiting": 0, "idle": 0}
    while not idle.items() <= (status := ray.get(router.get_status.remote())).items():
        assert time.monotonic() < end_s, status
        time.sleep(0.05)
    ray.get(router.write_journal.remote())
    (folder,) = (tmp_path / "runs").iterdir()
    events = [entry.event for entry in load_run(folder, unfinished=True).entries()]
    started = [e for e in events if isinstance(e, RolloutStarted) and e.trajectories is not None]
    assert [(e.rollout.partition("/")[0], e.trajectories, e.weights_version) for e in started] == [
        ("train-1", 16, 1),
        ("train-2", 16, 2),
    ]
    arrived = [e for e in events if isinstance(e, TrajectoryArrived)]
    assert len(arrived) == 32
    assert {e.task for e in arrived} == {"coding"}
    assert sorted(e.group for e in arrived[:16]) == [f"p{n // 4}" for n in range(16)]
    assert {e.rollout for e in arrived} == {e.rollout for e in started}
    assert sum(isinstance(e, TrajectoryFinished) for e in events) == 32
    assert not any(isinstance(e, RolloutClosed) for e in events)


def test_a_sample_that_fails_before_its_first_request_holds_nobody_up(verl_config, yaml_file):
    import ray
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from heddle_verl.agent_loops import Manager
    from tests.verl.fakes import engines

    router = get_router_handle(engines(1, slots=4), router_config_path=yaml_file())
    manager = Manager.create(verl_config, LLMServerClient(verl_config, router))
    samples = [("p0", [1] * 9, []), ("p0", [1] * 9, [5])]
    with pytest.raises(Exception, match="a sample that fails"):
        manager.generate_sequences(batch(samples, step=1))
    again = manager.generate_sequences(batch([("p1", [1] * 9, [5]), ("p1", [1] * 9, [5])], step=2))
    assert len(again) == 2
    status = ray.get(router.get_status.remote())
    assert (status["total_inflight"], status["waiting"]) == (0, 0)


def test_the_manager_says_that_it_needs_heddles_router(verl_config):
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from heddle_verl.agent_loops import Manager
    from tests.verl.fakes import engines

    router = get_router_handle(engines(1))
    with pytest.raises(ValueError, match=r"set rollout\.router_config_path to a file"):
        Manager.create(verl_config, LLMServerClient(verl_config, router))
