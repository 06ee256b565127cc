"""`heddle plan --export`: what starts a plan, and what cannot be written."""

import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from heddle.comparison.tuning import Variant, with_policy
from heddle.config import RunConfig
from heddle.config_files import ConfigError, ConfigSource, resolve, setting
from heddle.planning.deployment import GPUS_PER_NODE, Deployment, deployment_of
from heddle.planning.exports import export, placed_engines, uniform_engines
from heddle.search.interval import PredictionInterval
from heddle.search.result import Judged, engines_of
from heddle.setup import prepare
from heddle.workload import ReplayedTrace, Workload
from heddle_core.plans import ResourcePlan
from heddle_trace.files import write_trace
from heddle_trace.synth import synth
from tests.app.journals import Heddle
from tests.runtime.vllm_bench import VLLM_GROUP, forks_of_vllm, no_vllm

KINDS = ("verl.yaml", "vllm.sh", "gateway.toml")
MIXED = (4, 2, 1, 1)


@pytest.fixture(scope="module")
def coding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "some.jsonl"
    write_trace(path, synth("coding", 64, seed=5, samples_per_group=8))
    return path


KEYS = {"--gpus": "cluster.gpus", "--max-running": "cluster.max_running", "--history": "history"}


def deployment(coding: Path, *more: object, tps: Sequence[int] = ()) -> Deployment:
    """Engines of these TP degrees, or those that `heddle` starts with, as if a search had
    recommended them; verl takes TP 2, longer."""
    words = list(map(str, more))
    settings = [
        setting(value if flag == "--set" else f"{KEYS[flag]}={value}")
        for flag, value in zip(words[::2], words[1::2], strict=True)
    ]
    config = resolve([ConfigSource("t", {"trace": str(coding)}), *settings])
    setup = prepare(with_policy(config, "heddle", config.cluster))
    profile = setup.profiles.classes[0].profile
    mine = tuple((profile.shape(tp), tps.count(tp)) for tp in dict.fromkeys(tps))
    judged = [
        Judged(
            candidate=Variant(
                name=policy, policy=policy, cluster=config.cluster, swept=False, baseline=False
            ),
            makespan_s=PredictionInterval(mean=mean_s, low=mean_s, high=mean_s),
            times=(mean_s,),
            engines=engines,
        )
        for policy, mean_s, engines in (
            ("heddle", 100.0, mine or engines_of(setup)),
            ("verl", 120.0, ((profile.shape(2), config.cluster.gpus // 2),)),
        )
    ]
    return deployment_of(setup, judged)


def exported(
    coding: Path,
    folder: Path,
    *more: object,
    kinds: Sequence[str] = KINDS,
    tps: Sequence[int] = (),
) -> Deployment:
    folder.mkdir(exist_ok=True)
    plan = deployment(coding, *more, tps=tps)
    for kind in kinds:
        for path, text in export(plan, folder / kind).items():
            path.write_text(text)
    return plan


def yaml_values(path: Path) -> dict[str, Any]:
    """Keys and values of the lines of a YAML file, whatever section they are in."""
    pairs = [line.strip().split(": ", 1) for line in path.read_text().splitlines()]
    return {p[0]: json.loads(p[1]) for p in pairs if len(p) == 2 and not p[0].startswith("#")}


def served(path: Path) -> list[tuple[list[int], list[str]]]:
    """CUDA devices and arguments of each `vllm serve` of a script."""
    lines = [line.strip() for line in path.read_text().splitlines() if " vllm serve " in line]
    found = []
    for line in lines:
        devices, _, arguments = line.partition(" vllm serve ")
        words = shlex.split(arguments.partition(" > ")[0])
        found.append(([int(d) for d in devices.partition("=")[2].split(",")], words))
    return found


def options_of(words: list[str]) -> Mapping[str, str]:
    return dict(pairwise(words))


def test_the_script_starts_the_engines_of_the_plan(coding: Path, tmp_path: Path):
    found = exported(coding, tmp_path, "--gpus", 8, "--max-running", 24)
    engines = served(tmp_path / "vllm.sh")
    tps = [len(devices) for devices, _ in engines]
    assert tps == [shape.tp for _, shape in found.engines]
    assert sorted(d for devices, _ in engines for d in devices) == list(range(8))
    ports = set()
    for devices, words in engines:
        options = options_of(words)
        ports.add(options["--port"])
        assert options["--tensor-parallel-size"] == str(len(devices))
        assert options["--max-num-seqs"] == "24"
        assert options["--scheduling-policy"] == "priority"
        assert "--enable-prefix-caching" in words
    assert len(ports) == len(engines)


def test_the_script_is_bash_and_passes_options_and_signals_on(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 2)
    script = tmp_path / "vllm.sh"
    checked = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    stand_in = tmp_path / "bin" / "vllm"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES|$@"\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", script, "--dtype", "float32"],
        env={"PATH": path, "MODEL": "some folder", "LOGS": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0
    logs = sorted(tmp_path.glob("e*.log"))
    assert len(logs) == len(served(script))
    for log in logs:
        assert "|serve some folder --host 127.0.0.1 " in log.read_text()
        assert log.read_text().endswith(" --dtype float32\n")
    stand_in.write_text("#!/bin/bash\nexit 7\n")
    failed = subprocess.run(
        ["bash", script], env={"PATH": path, "MODEL": "m", "LOGS": str(tmp_path)}, check=False
    )
    assert failed.returncode == 7
    bare = subprocess.run(
        ["bash", script], env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert bare.returncode == 2
    assert bare.stderr.startswith("usage: MODEL=")


def test_engines_of_several_nodes_are_started_on_each(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 20, kinds=["vllm.sh"])
    text = (tmp_path / "vllm.sh").read_text()
    for node in ("h100-0", "h100-1", "h100-2"):
        assert f"  {node})\n" in text
    engines = served(tmp_path / "vllm.sh")
    assert sum(len(devices) for devices, _ in engines) == 20
    assert all(max(devices) < GPUS_PER_NODE for devices, _ in engines)
    refused = subprocess.run(
        ["bash", tmp_path / "vllm.sh", "h100-9"],
        env={"PATH": os.environ["PATH"], "MODEL": "m"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "NODE is one of h100-0, h100-1, h100-2" in refused.stderr


@pytest.mark.xdist_group(VLLM_GROUP)
@pytest.mark.skipif(bool(no_vllm()), reason=no_vllm() or "vLLM is installed")
def test_vllm_knows_every_option_of_the_script(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 8)
    words = next(words for devices, words in served(tmp_path / "vllm.sh") if len(devices) > 1)
    options = options_of(words)
    expected = {
        "tensor_parallel_size": int(options["--tensor-parallel-size"]),
        "max_num_seqs": 100,
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "enable_scale_out": True,
        "enable_prompt_tokens_details": True,
        "max_num_batched_tokens": 8192,
        "port": int(options["--port"]),
        "served_model_name": ["qwen3-14b"],
    }
    log = tmp_path / "options.json"
    with log.open("wb") as output:
        status = forks_of_vllm().run(
            "tests.app.vllm_options", ",".join(expected), *words[:-1], output=output
        )
    assert status == 0, log.read_text()
    assert json.loads(log.read_text().splitlines()[-1]) == expected


def test_verl_gets_the_one_tp_degree_that_ends_first(coding: Path, tmp_path: Path):
    mixed = exported(coding, tmp_path, tps=MIXED)
    shape, makespan_s = uniform_engines(mixed)
    assert len(mixed.mix) > 1
    text = (tmp_path / "verl.yaml").read_text()
    rollout = yaml_values(tmp_path / "verl.yaml")
    assert rollout["tensor_model_parallel_size"] == shape.tp
    assert rollout["max_num_seqs"] == 100
    assert rollout["scheduling_policy"] == "priority"
    assert f"TP {shape.tp} ends first, after {makespan_s:,.1f} s." in text
    assert f"simulated to end after {mixed.makespan_s:,.1f} s" in text
    assert "A mix needs engines of your own behind `heddle serve`." in text
    router = Path(rollout["router_config_path"])
    assert router == tmp_path / "verl-router.yaml"
    assert yaml_values(router) == {
        "router_class": "heddle_verl.Router",
        "model": "qwen3-14b",
        "gpu": "h100",
        "policy": "heddle",
        "history": "prior:coding",
        "task": "coding",
    }


def test_a_plan_of_one_degree_is_exported_without_a_word_of_a_mix(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 4, "--set", "cluster.tp_choices=[2]")
    text = (tmp_path / "verl.yaml").read_text()
    assert yaml_values(tmp_path / "verl.yaml")["tensor_model_parallel_size"] == 2
    assert "mix" not in text
    assert "2 engines of h100 tp2" in text


def config_of(path: Path) -> RunConfig:
    """The configuration of a run of which the gateway's file is one source."""
    values = tomllib.loads(path.read_text())
    # A model has to be named where engines are vLLM's, which they are without a further option.
    model = {"trace": "t", "runtime": {"model_dir": "FOLDER"}}
    found = resolve([ConfigSource(path.name, values), ConfigSource("t", model)])
    assert found.runtime.engine == "vllm"
    return found


def commands(path: Path) -> list[list[str]]:
    """The commands in the head of a file."""
    lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("heddle serve")]


def test_the_gateway_gets_the_engines_policy_and_knowledge(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 8, "--max-running", 24, tps=MIXED)
    config = config_of(tmp_path / "gateway.toml")
    engines = [len(devices) for devices, _ in served(tmp_path / "vllm.sh")]
    assert len(set(engines)) > 1
    assert (config.policy.preset, config.history) == ("heddle+fixed+keep_engines", "prior:coding")
    assert (config.cluster.gpus, config.cluster.max_running) == (8, 24)
    assert list(config.cluster.mix) == engines
    (command,) = commands(tmp_path / "gateway.toml")
    policy = "heddle+fixed+keep_engines"
    assert command[:6] == ["heddle", "serve", "-c", "gateway.toml", "--policy", policy]
    assert command[6:] == ["--model-dir", "FOLDER"]
    # The policy can be made for these engines, and starts no others.
    workload = Workload(trace=ReplayedTrace("t"), trajectories=0, largest_tokens=0)
    setup = prepare(config, workload=workload)
    started = setup.policy.planner.plan((), ())
    assert isinstance(started, ResourcePlan)
    assert [engine.shape.tp for engine in started.engines] == engines


def test_an_exported_gateway_never_starts_engines_that_run_no_model(
    refused: Callable[..., str], coding: Path, tmp_path: Path
):
    exported(coding, tmp_path, "--gpus", 8)
    said = refused("serve", "-c", tmp_path / "gateway.toml")
    assert "model_dir must name the folder of a model" in said


def test_engines_of_one_degree_are_served_by_their_urls_too(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 16, "--set", "cluster.tp_choices=[4]")
    starts, command = commands(tmp_path / "gateway.toml")
    assert options_of(starts)["--set"] == "runtime.launcher=ray"
    options = options_of(command)
    assert options["--tp"] == "4"
    urls = [url for flag, url in pairwise(command) if flag == "--worker"]
    assert len(urls) == 4
    assert urls[0] == "http://h100-0:8000"
    assert config_of(tmp_path / "gateway.toml").cluster.engine_count == 4
    exported(coding, tmp_path / "8", "--gpus", 8, "--set", "cluster.tp_choices=[4]")
    starts, by_url = commands(tmp_path / "8" / "gateway.toml")
    assert "--model-dir" in starts
    assert options_of(by_url)["--worker"] == "http://127.0.0.1:8001"


def test_a_gateway_starts_a_mix_on_several_machines_by_ray(coding: Path, tmp_path: Path):
    exported(coding, tmp_path, "--gpus", 20, kinds=["g.toml"], tps=(8, 8, 2, 2))
    (command,) = commands(tmp_path / "g.toml")
    assert options_of(command)["--set"] == "runtime.launcher=ray"
    assert config_of(tmp_path / "g.toml").cluster.mix == (8, 8, 2, 2)


@pytest.mark.skipif(not find_spec("heddle.cli.serve"), reason="there is no heddle serve yet")
def test_the_gateways_commands_are_those_of_heddle_serve(
    heddle: Heddle, coding: Path, tmp_path: Path
):
    exported(coding, tmp_path, "--gpus", 8, "--set", "cluster.tp_choices=[4]")
    shown = heddle("serve", "--help").stdout
    for command in commands(tmp_path / "gateway.toml"):
        for flag in command:
            assert not flag.startswith("--") or flag in shown


def test_a_plan_of_several_classes_is_exported_to_vllm_only(coding: Path, tmp_path: Path):
    pools = (
        *("--set", "cluster.model=qwen3-32b"),
        *("--set", 'cluster.pool=[{gpu="h800",gpus=8,tp=2},{gpu="h20",gpus=8,tp=2}]'),
    )
    exported(coding, tmp_path, *pools, kinds=["v.sh"])
    text = (tmp_path / "v.sh").read_text()
    assert "  h800-0)\n" in text
    assert "  h20-0)\n" in text
    for kind, says in (
        ("v.yaml", "all engines of verl have one shape"),
        ("v.toml", "`heddle serve` starts engines of one GPU class"),
    ):
        with pytest.raises(ConfigError, match=says):
            exported(coding, tmp_path, *pools, kinds=[kind])


def test_every_engine_has_gpus_of_its_own_on_one_node(coding: Path):
    engines = placed_engines(deployment(coding, "--gpus", 27, "--max-running", 8))
    taken = [(engine.node, device) for engine in engines for device in engine.devices]
    assert len(taken) == len(set(taken)) == 27
    assert all(len(engine.devices) == engine.shape.gpus for engine in engines)
    assert max(int(engine.node.rpartition("-")[2]) for engine in engines) == 3


def test_a_history_of_ones_own_is_named_by_its_whole_path(
    coding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_trace(tmp_path / "earlier.jsonl", synth("coding", 64, seed=9, samples_per_group=8))
    monkeypatch.chdir(tmp_path)
    exported(coding, tmp_path, "--history", "earlier.jsonl")
    router = yaml_values(tmp_path / "verl-router.yaml")
    assert router["history"] == str(tmp_path / "earlier.jsonl")


def test_names_of_a_profile_cannot_run_commands(coding: Path, tmp_path: Path):
    source = Path(__file__).parents[2] / "heddle_sim" / "profiles" / "qwen3-14b.h100.json"
    profile = json.loads(source.read_text())
    profile["model"] = "a';touch hacked;'$(touch hacked)"
    own = tmp_path / "own.json"
    own.write_text(json.dumps(profile))
    exported(coding, tmp_path, "--set", f"cluster.model={own}", kinds=["v.sh"])
    stub = tmp_path / "bin" / "vllm"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\ntouch "{tmp_path}/started"\n')
    stub.chmod(0o755)
    path = f"{stub.parent}:{os.environ['PATH']}"
    subprocess.run(
        ["bash", tmp_path / "v.sh"],
        cwd=tmp_path,
        env={"PATH": path, "MODEL": "m"},
        capture_output=True,
        check=False,
    )
    assert (tmp_path / "started").exists()
    assert not (tmp_path / "hacked").exists()
    assert profile["model"] in served(tmp_path / "v.sh")[0][1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--export", "plan.txt"), "plan.txt: .txt names no kind of export; name a file like"),
        (("--export", "plan"), "plan: no suffix names no kind of export"),
        (("--export", "none/vllm.sh"), "none: no such folder; make it first"),
        (("--export", "a.sh", "--export", "./a.sh"), "a.sh: is written twice"),
        (("--export", "v.yaml", "--export", "v-router.yaml"), "v-router.yaml: is written twice"),
        (("--export", "folder.sh"), "folder.sh: is a folder; name a file in it"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    heddle: Heddle,
    coding: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[object, ...],
    says: str,
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.sh").mkdir()
    done = heddle("plan", coding, *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.sh", "here"]


def test_a_file_that_exists_is_not_replaced(heddle: Heddle, coding: Path, tmp_path: Path):
    router = tmp_path / "verl-router.yaml"
    router.write_text("mine")
    done = heddle("plan", coding, "--export", tmp_path / "verl.yaml")
    assert done.exit_code == 2
    assert f"{router}: exists; name another file, or remove it" in done.stderr
    assert router.read_text() == "mine"
    assert not (tmp_path / "verl.yaml").exists()
