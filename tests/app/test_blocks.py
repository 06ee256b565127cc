"""Settings to paste into each framework: the numbers of the plan, under names that parse."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.command_config import FrameworkName
from heddle.comparison.compare import compare
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.planning.blocks import CHECKED, FRAMEWORKS, block, blocks, framework_of
from heddle.planning.deployment import Deployment
from heddle.search.compared import answer_of, deployment_of_comparison
from tests.app.journals import Heddle

CLUSTER = ClusterConfig(model="qwen3-8b", gpu="h100", gpus=8, tp=2, max_running=48)


def deployment(trace: Path, out: Path, cluster: ClusterConfig, policy: str = "verl") -> Deployment:
    result = compare(RunConfig(trace=str(trace), cluster=cluster), [policy], out=out)
    answer = answer_of(result)
    assert answer is not None
    return deployment_of_comparison(result, answer)


@pytest.fixture
def plan(trace: Path, tmp_path: Path) -> Deployment:
    return deployment(trace, tmp_path / "runs", CLUSTER)


def pairs(text: str) -> dict[str, str]:
    """KEY=VALUE and --flag VALUE of a block."""
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(" " if line.startswith("--") else "=")
        found[key.lstrip("+")] = value
    return found


def test_every_framework_has_degree_and_slots(plan: Deployment):
    every = blocks(plan)
    assert every.keys() == FRAMEWORKS.keys() - {"sglang"}
    named = {
        "verl": ("actor_rollout_ref.rollout.tensor_model_parallel_size", "max_num_seqs"),
        "skyrl": ("generator.inference_engine.tensor_parallel_size", "max_num_seqs"),
        "slime": ("--rollout-num-gpus-per-engine", "--sglang-max-running-requests"),
        "vime": ("--rollout-num-gpus-per-engine", "--vllm-max-num-seqs"),
        "nemo-rl": ("policy.generation.vllm_cfg.tensor_parallel_size", "max_num_seqs"),
    }
    for name, (degree, slots) in named.items():
        found = pairs(every[name])
        assert found[degree] == "2", name
        (number,) = (value for key, value in found.items() if key.endswith(slots))
        assert number == "48", name
    assert pairs(every["skyrl"])["generator.inference_engine.num_engines"] == "4"
    assert pairs(every["slime"])["--rollout-num-gpus"] == "8"


def test_slime_is_told_of_nodes_that_do_not_have_eight_gpus(
    plan: Deployment, tmp_path: Path, trace: Path
):
    assert "--num-gpus-per-node" not in blocks(plan)["slime"]
    small = deployment(trace, tmp_path, replace(CLUSTER, gpus=4))
    every = blocks(small)
    assert pairs(every["slime"])["--num-gpus-per-node"] == "4"
    assert pairs(every["vime"])["--num-gpus-per-node"] == "4"


def test_drafts_of_sglang_name_their_head(trace: Path, tmp_path: Path):
    drafted = replace(CLUSTER, speculation="eagle3:2")
    every = blocks(deployment(trace, tmp_path, drafted))
    head = json.loads(shlex.split(pairs(every["vime"])["--vllm-speculative-config"])[0])["model"]
    assert pairs(every["slime"])["--sglang-speculative-draft-model-path"] == head


def test_a_policy_is_routed_as_its_framework_can(trace: Path, tmp_path: Path):
    found = {
        policy: blocks(deployment(trace, tmp_path / policy, CLUSTER, policy))
        for policy in ("verl", "slime-2026", "seer")
    }
    assert "router" not in found["verl"]["verl"]
    assert pairs(found["slime-2026"]["slime"])["--router-policy"] == "cache_aware"
    assert pairs(found["slime-2026"]["vime"])["--vllm-router-policy"] == "cache_aware"
    assert "No router here is policy verl" in found["verl"]["slime"]
    assert "No router here is policy seer" in found["seer"]["slime"]
    (comment,) = [line for line in found["seer"]["verl"].splitlines() if line.startswith("# hed")]
    written = comment.partition(": ")[2]
    assert written == (
        "{router_class: heddle_verl.Router, model: qwen3-8b, gpu: h100, policy: seer}"
    )
    key = "actor_rollout_ref.rollout.router_config_path"
    assert pairs(found["seer"]["verl"])[key] == "heddle.yaml"


def test_prime_rl_is_toml(plan: Deployment):
    found = tomllib.loads(block(plan, "prime-rl"))
    vllm = found["inference"]["vllm"]
    assert (vllm["tensor_parallel_size"], vllm["data_parallel_size"]) == (2, 4)
    assert vllm["max_num_seqs"] == 48
    assert found["inference"]["router"] == {"policy": "consistent_hash"}
    # One node is what it takes by itself; the type of several has to be there.
    assert "deployment" not in found["inference"]
    assert found["orchestrator"]["concurrency"] == {"min_inflight": 192, "max_inflight": 192}


def test_commands_prime_rl_and_the_gateway_name_the_nodes(trace: Path, tmp_path: Path):
    plan = deployment(trace, tmp_path / "runs", replace(CLUSTER, gpus=12, tp=4))
    found = tomllib.loads(block(plan, "prime-rl"))
    several = {"type": "multi_node", "gpus_per_node": 4, "num_nodes": 3}
    assert found["inference"]["deployment"] == several
    assert found["inference"]["vllm"]["data_parallel_size"] == 1
    _, first, a, b, second, c = block(plan, "vllm").splitlines()
    assert (first, second) == ("# on h100-0:", "# on h100-1:")
    devices = [line.split()[0].partition("=")[2] for line in (a, b, c)]
    assert devices == ["0,1,2,3", "4,5,6,7", "0,1,2,3"]
    served = deployment(trace, tmp_path / "sglang", replace(plan.cluster, engine="sglang"))
    assert "# on h100-1:" in block(served, "sglang").splitlines()
    assert shlex.split(block(plan, "heddle"), comments=True)[-1] == "runtime.launcher=ray"


def test_vllm_has_a_line_for_each_engine_and_the_gateway_one(plan: Deployment):
    _, *lines = block(plan, "vllm").splitlines()
    assert len(lines) == 4
    assert all("--tensor-parallel-size 2" in line for line in lines)
    words = shlex.split(block(plan, "heddle"))
    assert words[:4] == ["heddle", "serve", "--engine", "vllm"]
    assert words[words.index("--engines") + 1] == "4"
    assert words[words.index("--policy") + 1] == "verl"


def test_drafts_are_named_as_each_framework_does(trace: Path, tmp_path: Path):
    drafted = replace(CLUSTER, speculation="eagle3:3:0.8/0.7/0.6")
    found = blocks(deployment(trace, tmp_path / "runs", drafted))
    vime = pairs(found["vime"])["--vllm-speculative-config"]
    config = json.loads(shlex.split(vime)[0])
    assert (config["method"], config["num_speculative_tokens"]) == ("eagle3", 3)
    assert tomllib.loads(found["prime-rl"])["inference"]["vllm"]["speculative_config"]
    assert "--sglang-speculative-algorithm EAGLE3" in found["slime"]
    assert "--sglang-speculative-num-draft-tokens 4" in found["slime"]
    for name in ("verl", "skyrl", "nemo-rl"):
        assert "num_speculative_tokens:3" in found[name], name
    assert "cluster.speculation=eagle3:3" in found["heddle"]


def test_a_block_says_what_its_names_were_checked_against(plan: Deployment):
    assert CHECKED.keys() == FRAMEWORKS.keys() - {"heddle"}
    for name, text in blocks(plan).items():
        if name != "heddle":
            assert f"# Names of {CHECKED[name]}." in text.splitlines()
    # The version whose configuration the tests read.
    installed = Path("constraints-verl.txt").read_text(encoding="utf-8")
    assert f"\n{CHECKED['verl'].replace(' ', '==')}\n" in installed


def test_a_policy_is_of_its_framework():
    names = {"verl": "verl", "verl-2026": "verl", "slime-2026": "slime", "heddle+x": "heddle"}
    names |= {"prime-rl": "prime-rl", "vimes": "heddle"}
    assert {name: framework_of(name) for name in names} == names
    assert framework_of("seer") == "heddle"


def test_what_has_no_settings_says_why(plan: Deployment, trace: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no settings are known for 'trl': take one of verl"):
        block(plan, "trl")
    roles = replace(CLUSTER, roles="prefill=4,decode=4")
    parted = deployment(trace, tmp_path / "roles", roles)
    assert blocks(parted) == {}


def test_commands_print_the_settings_of_the_framework_that_is_named(heddle: Heddle, trace: Path):
    on = ("--gpus", 2, "--policies", "verl", "--seeds", 2, "--set", "plan.framework=skyrl")
    done = heddle("compare", trace, *on)
    assert done.exit_code == 0, done.output
    assert "settings of skyrl (plan.framework names another):" in done.stdout
    assert "  generator.inference_engine.num_engines=2" in done.stdout
    found = json.loads(heddle("compare", trace, *on, "--json").stdout)
    assert "generator.inference_engine.num_engines=2" in found["recommended"]["export"]["skyrl"]
    assert set(get_args(FrameworkName)) == FRAMEWORKS.keys()
    served = ("--set", "cluster.engine=sglang", "--set", "plan.framework=sglang")
    done = heddle("compare", trace, *on[:-2], *served)
    assert done.exit_code == 0, done.output
    assert "python3 -m sglang.launch_server --model-path MODEL" in done.stdout
    refused = heddle("compare", trace, "--gpus", 2, "--set", "plan.framework=trl")
    assert refused.exit_code == 2
    assert "take one of 'verl', 'skyrl'" in refused.stderr


def test_a_named_framework_without_settings_is_refused(heddle: Heddle, trace: Path):
    drafted = ("--speculation", "grouped:2:0.8/0.6", "--seeds", 2, "--policies", "verl")
    done = heddle("compare", trace, "--gpus", 2, *drafted, "--set", "plan.framework=verl")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "vLLM takes no drafts from other samples" in done.stderr
    named = ("--set", "plan.framework=verl")
    done = heddle("compare", trace, "--gpus", 2, *drafted, *named, "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    loop = ("loop", trace, "--gpus", 8, *drafted[:2], "--seeds", 1, "--regimes", "sync")
    for form in ((), ("--json",)):
        done = heddle(*loop, *named, *form)
        assert (done.exit_code, done.stdout) == (2, ""), done.output
        assert "vLLM takes no drafts from other samples" in done.stderr
    assert heddle(*loop, "--json").exit_code == 0
    done = heddle("compare", trace, "--gpus", 2, *drafted)
    assert "no settings of verl to paste" in done.stdout
