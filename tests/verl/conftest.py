"""A Ray cluster for tests, and files for verl's router; `make verl` has Ray and verl."""

import os
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray cluster of this machine, whose actors see this checkout."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray", reason="no ray here; `make verl` has it")
        pytest.importorskip("verl", reason="no verl here; `make verl` has it")
        os.environ["PYTHONPATH"] = str(ROOT)
        ray.init(
            address="local",  # never a cluster that somebody else started
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            logging_level="ERROR",
            log_to_driver=False,
        )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def verl_config(tmp_path_factory):
    """verl's own configuration, with a small model for its tokenizer."""
    import verl
    from hydra import compose, initialize_config_dir

    from heddle_runtime.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=1)
    loops = tmp_path_factory.mktemp("loops") / "loops.yaml"
    loops.write_text("- name: scripted\n  _target_: tests.verl.loops.ScriptedLoop\n")
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(
        str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None
    ):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={folder}",
                f"{rollout}.name=vllm",
                f"{rollout}.prompt_length=64",
                f"{rollout}.response_length=64",
                f"{rollout}.agent.num_workers=2",
                f"{rollout}.agent.agent_loop_config_path={loops}",
                f"{rollout}.agent.default_agent_loop=scripted",
            ],
        )


@pytest.fixture
def yaml_file(tmp_path):
    """Write a router's file."""

    def write(**values):
        lines = {"router_class": "heddle_verl.Router", "model": "qwen3-14b", "gpu": "h100"}
        lines.update(values)
        path = tmp_path / "heddle.yaml"
        text = "".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None)
        path.write_text(text)
        return str(path)

    return write
