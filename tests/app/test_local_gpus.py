"""Each vLLM engine of this machine has GPUs of its own. No GPU is needed: no model runs here."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.config import RunConfig, RuntimeConfig
from heddle.engines import engine_facts, open_vllm
from heddle_core.ids import EngineId, EngineShape
from heddle_core.plans import EngineSpec
from heddle_runtime.process.child import ChildProcess
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm import checks, engine, launcher
from heddle_runtime.vllm.checks import EngineSetupError, visible_gpus
from heddle_runtime.vllm.engine import VllmEngine
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import SUPPORTED, Installed
from tests.rollout.contract import Recorder

pytest.importorskip("safetensors", reason="makes the tiny model")


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for GPUs, whose engines are processes without a model."""

    def counting(module: str, **options: object) -> ChildProcess:
        return ChildProcess("tests.runtime.counting_process", **options)

    for module in (checks, launcher):
        monkeypatch.setattr(module, "installed_vllm", lambda: Installed(SUPPORTED["cuda"], "cuda"))
    monkeypatch.setattr(engine, "ChildProcess", counting)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "10,4,GPU-5b1d")


def config_of(folder: Path, **runtime: object) -> RunConfig:
    return RunConfig(
        trace="unused",
        cluster=ClusterConfig(gpus=3, tp=1),
        runtime=RuntimeConfig(engine="vllm", model_dir=str(folder), **runtime),
    )


def spec(name: str, tp: int) -> EngineSpec:
    return EngineSpec(engine=EngineId(name), shape=EngineShape("h100", tp), max_running=1)


async def started(engines: VllmLauncher, recorder: Recorder, name: str, tp: int) -> VllmEngine:
    engine = engines.start(spec(name, tp), recorder)
    await recorder.take("ready")
    return engine


def gpus_of(engine: VllmEngine) -> list[str]:
    """Those in the environment of its process."""
    environ = Path(f"/proc/{engine.pid}/environ").read_bytes().decode()
    return environ.partition("CUDA_VISIBLE_DEVICES=")[2].partition("\0")[0].split(",")


def test_engines_share_no_gpu_and_take_those_of_engines_that_have_ended(tmp_path):
    async def main() -> None:
        recorder = Recorder()
        engines = open_vllm(config_of(tmp_path), tmp_path / "logs")
        assert gpus_of(await started(engines, recorder, "first", 1)) == ["10"]
        wide = await started(engines, recorder, "wide", 2)
        assert gpus_of(wide) == ["4", "GPU-5b1d"]
        engines.start(spec("refused", 1), recorder)
        assert await recorder.take("failed") == ("TP 1 needs 1 GPU(s), and fewer are free", {})
        wide.stop()
        assert gpus_of(await started(engines, recorder, "next", 1)) == ["4"]
        await engines.close()

    asyncio.run(main())


def test_engines_share_gpus_if_the_settings_say_so(tmp_path):
    async def main() -> None:
        recorder = Recorder()
        config = config_of(tmp_path, engines_per_gpu=2, gpu_memory_share=0.4)
        engines = open_vllm(config, tmp_path / "logs")
        found = [gpus_of(await started(engines, recorder, f"e{n}", 1)) for n in range(4)]
        assert found == [["10"], ["4"], ["GPU-5b1d"], ["10"]]
        await engines.close()

    asyncio.run(main())


def test_more_engines_than_gpus_are_refused_before_one_starts(tmp_path):
    make_tiny_model(tmp_path, seed=1)
    config = config_of(tmp_path)
    assert engine_facts(config, 100)["platform"] == "cuda"
    many = replace(config, cluster=replace(config.cluster, gpus=4))
    with pytest.raises(EngineSetupError, match=r"^4 engines take 4 GPU\(s\) .* has 3 for them"):
        engine_facts(many, 100)
    shared = replace(many, runtime=replace(many.runtime, engines_per_gpu=2, gpu_memory_share=0.4))
    assert engine_facts(shared, 100)["platform"] == "cuda"


def test_gpus_are_those_that_cuda_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0,-1,1")
    assert visible_gpus() == ("2", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for number in range(8):
        (tmp_path / f"0000:{number:02}:00.0").mkdir()
    monkeypatch.setattr(checks, "_DRIVER_GPUS", tmp_path)
    assert visible_gpus() == tuple("01234567")
