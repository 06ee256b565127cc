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
