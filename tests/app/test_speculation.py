"""Speculative decoding in commands: settings, the best of them, tables, exports and refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from heddle.cluster.config import ClusterConfig
from heddle.cluster.profiles import load_profiles
from heddle.comparison.compare import compare
from heddle.comparison.tuning import speculations
from heddle.config import RunConfig
from heddle.config_error import ConfigError
from heddle.engines import check_available, speculative_config
from heddle_runtime.vllm.checks import EngineSetupError
from heddle_sim.drafted_tables import Drafter, with_drafter
from heddle_sim.profile_files import ProfileError
from heddle_trace import synth, write_trace
from tests.app.journals import BRIEF, Heddle
from tests.in_turn import some

PUBLISHED = "eagle3:3:0.886/0.770/0.663"
ON = ("--model", "qwen3-8b", "--gpus", "4", "--max-running", "4")
REPORTLESS = ("--set", "report.page=false")

Refused = Callable[..., str]


def cluster(speculation: str, **more: object) -> ClusterConfig:
    return ClusterConfig(model="qwen3-8b", speculation=speculation, **more)  # type: ignore[arg-type]


def makespans(heddle: Heddle, trace: Path, *args: str) -> dict[str, float]:
    result = heddle("compare", trace, *ON, "--policies", "verl,heddle", "--json", *args)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["policies"]
    return {row["policy"]: row["makespan_s"]["mean"] for row in rows}


def test_drafts_that_are_accepted_shorten_a_rollout(heddle: Heddle, trace: Path):
    off = makespans(heddle, trace)
    drafted = makespans(heddle, trace, "--speculation", PUBLISHED)
    assert all(drafted[policy] < off[policy] for policy in off)


def test_drafts_that_are_never_accepted_lengthen_it(heddle: Heddle, trace: Path):
    off = makespans(heddle, trace)
    drafted = makespans(heddle, trace, "--speculation", "eagle3:4:0")
    assert all(drafted[policy] > off[policy] for policy in off)


def test_best_tries_none_one_to_four_and_a_schedule_under_every_policy(heddle: Heddle, trace: Path):
    found = makespans(heddle, trace, "--speculation", "eagle3:best:0.9/0.8")
    settings = ["off", "eagle3:1", "eagle3:2", "eagle3:3", "eagle3:4", "eagle3:schedule"]
    expected = [f"{policy}/{s}" for policy in ("verl@tp1",) for s in settings]
    assert list(found) == [*expected, *(f"heddle@{s}" for s in settings)]


def test_the_bound_of_a_comparison_holds_for_its_fastest_setting(heddle: Heddle, trace: Path):
    result = heddle(
        "compare", trace, *ON, "--policies", "verl", "--speculation", "eagle3:best:1", "--json"
    )
    found = json.loads(result.stdout)
    assert found["bound"]["makespan_s"] <= min(
        row["makespan_s"]["mean"] for row in found["policies"]
    )


def test_a_waterfall_has_a_step_of_speculation(heddle: Heddle, trace: Path):
    result = heddle(
        *("compare", trace, *ON, "--sweep", "policy.parts=waterfall"),
        *("--speculation", "eagle3:best:0.9/0.8", "--json"),
    )
    assert result.exit_code == 0, result.output
    steps = [row["step"] for row in json.loads(result.stdout)["waterfall"]]
    assert [step.partition(",")[0] for step in steps][:3] == [
        "verl",
        "best TP degree",
        "speculation",
    ]


def test_the_table_says_where_acceptance_is_from(heddle: Heddle, trace: Path):
    said = heddle("compare", trace, *ON, "--speculation", "eagle3:2", *REPORTLESS).stdout
    assert "drafts" in said
    assert "arXiv 2604.26779" in said
    given = heddle("compare", trace, *ON, "--speculation", PUBLISHED, *REPORTLESS).stdout
    assert "acceptance as given" in given


def test_a_loop_tries_drafts_and_trains_an_mtp_head_for_longer(heddle: Heddle, trace: Path):
    loop = (
        *(
            "loop",
            trace,
            "--seeds",
            "1",
            "--regimes",
            "sync",
            "--model",
            "deepseek-v3",
            "--gpu",
            "h200",
        ),
        *("--gpus", 144, "--tp", 8, "--set", "loop.train_gpus=128", "--set", "loop.batches=3"),
        *("--set", "loop.groups=1", "--set", "loop.samples=2", "--json", "--speculation"),
    )
    result = heddle(*loop, "mtp:best:0.8/0.6")
    assert result.exit_code == 0, result.output
    tried = json.loads(result.stdout)["tried"]
    assert [row.get("speculation", "off") for row in tried][:2] == ["off", "mtp:1:0.8"]
    frozen, trained, twice = (
        json.loads(heddle(*loop, "mtp:1:0.8", "--set", f"loop.drafter_training={share}").stdout)
        for share in (0, 0.5, 1)
    )
    seconds = [each["regimes"][0]["split_s"]["training"] for each in (frozen, trained, twice)]
    # What collectives of a step take is the same; the rest grows by the share.
    assert seconds[0] < seconds[1]
    assert seconds[2] - seconds[0] == pytest.approx(2 * (seconds[1] - seconds[0]), rel=1e-3)


def test_a_frozen_drafter_slows_a_loop_down(heddle: Heddle, trace: Path):
    loop = (
        *(
            "loop",
            trace,
            "--seeds",
            "1",
            "--regimes",
            "sync",
            "--model",
            "qwen3-8b",
            "--gpus",
            8,
            "--json",
        ),
        *("--set", "loop.train_gpus=4", "--set", "loop.batches=5", "--set", "loop.repeat=true"),
        *("--set", "loop.groups=1", "--set", "loop.samples=2", "--speculation", "eagle3:2:0.9/0.8"),
    )
    kept, lost = (
        json.loads(heddle(*loop, "--set", f"cluster.acceptance_decay={decay}").stdout)
        for decay in (0, 0.5)
    )
    rollout_s = [each["regimes"][0]["split_s"]["rollout"] for each in (kept, lost)]
    assert rollout_s[1] > 1.1 * rollout_s[0]


def test_drafts_from_other_samples_grow_with_those_that_have_ended(heddle: Heddle, trace: Path):
    alone = makespans(heddle, trace, "--speculation", "ngram:3")
    grouped = makespans(heddle, trace, "--speculation", "grouped:3")
    assert all(grouped[policy] < alone[policy] for policy in alone)


def test_exports_start_engines_that_draft(heddle: Heddle):
    setting = "eagle3:1-2=3,3-=1:0.9/0.8/0.7"
    files = [
        word for name in ("verl.yaml", "vllm.sh", "gateway.toml") for word in ("--export", name)
    ]
    write_trace("four.jsonl", synth("coding", 16, seed=5, samples_per_group=4))
    files += ["--set", "plan.framework=skyrl"]
    result = heddle("plan", "four.jsonl", *ON, *BRIEF, "--speculation", setting, *files)
    assert result.exit_code == 0, result.output
    config = '"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 1000000, 1]]'
    assert config in Path("verl.yaml").read_text()
    script = Path("vllm.sh").read_text()
    assert "--speculative-config" in script
    assert config in script
    (drafts,) = [x for x in result.stdout.splitlines() if "speculative_config=" in x]
    assert drafts.startswith("  generator.inference_engine.speculative_config=")
    assert config.partition(": ")[2] in drafts
    assert f'speculation = "{setting}"' in Path("gateway.toml").read_text()


def test_real_engines_get_the_drafts_of_the_cluster():
    config = RunConfig(trace="x", cluster=cluster("ngram:3:0.2/0.1"))
    found = speculative_config(config)
    assert found is not None
    assert (found["method"], found["num_speculative_tokens"]) == ("ngram", 3)
    assert speculative_config(RunConfig(trace="x")) is None


@pytest.mark.parametrize(
    ("speculation", "said"),
    [
        ("eagle3:schedule", "give a number or ranges"),
        ("eagle3:3", "runtime.drafter"),
        ("grouped:3", "no drafts from other samples"),
    ],
)
def test_real_engines_refuse_drafts_that_they_cannot_start_with(speculation: str, said: str):
    runtime = {"engine": "vllm", "model_dir": "folder"}
    config = RunConfig(trace="x", cluster=cluster(speculation))
    object.__setattr__(config, "runtime", config.runtime.__class__(**runtime))  # type: ignore[arg-type]
    with pytest.raises(EngineSetupError, match=said):
        check_available(config)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("mtp:3", "qwen3-8b has no head for mtp: take ngram or grouped or eagle3"),
        ("eagle3:3:0.9/0.8/0.7/0.6", "4 values for 3 drafts"),
        ("eagle3:17", "17 drafts are not 0 to 16"),
        ("eagle3:1-8=2,4-9=1", "overlaps"),
        ("eagle3:2-8=2", "begin at 1"),
        ("ngram:3:1.5", "is no chance"),
        ("always", "is not off, best or METHOD:DRAFTS"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    refused: Refused, trace: Path, setting: str, said: str
):
    assert said in refused("compare", trace, *ON, "--speculation", setting)


def test_best_is_no_key(refused: Refused, trace: Path):
    said = refused("compare", trace, *ON, "--set", "cluster.speculation=best")
    assert "is found by --speculation best" in said


def test_best_takes_a_head_where_there_is_one_and_else_n_grams():
    assert speculations(cluster("off"), "best")[1] == "eagle3:1"
    assert speculations(replace(cluster("off"), model="minimax-m2.5", tp=4), "best")[1] == "ngram:1"
    with pytest.raises(ConfigError, match="neither best nor"):
        speculations(cluster("off"), "eagle3:3")


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 25.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 5.0
"""


def test_acceptance_is_read_from_what_engines_count(heddle: Heddle, trace: Path, tmp_path: Path):
    file = tmp_path / "metrics.txt"
    file.write_text(METRICS)
    counted = makespans(heddle, trace, "--speculation", f"eagle3:2:{file}")
    assert counted == makespans(heddle, trace, "--speculation", "eagle3:2:0.7/0.3")
    fewer = makespans(heddle, trace, "--speculation", f"eagle3:1:{file}")
    assert fewer == makespans(heddle, trace, "--speculation", "eagle3:1:0.7")


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "counts no drafts"), (METRICS.replace("60.0", "many"), "could not convert")],
)
def test_a_file_without_counters_of_drafts_is_refused(
    refused: Refused, trace: Path, tmp_path: Path, text: str, said: str
):
    file = tmp_path / "metrics.txt"
    file.write_text(text)
    assert said in refused("compare", trace, *ON, "--speculation", f"eagle3:2:{file}")


def config_json(folder: Path, **fields: object) -> Path:
    """The configuration of a dense model of 8 layers, or with these fields instead."""
    sizes = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 8,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 150_000,
    }
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps({**sizes, **fields}))
    return file


def test_heads_of_a_configuration_make_its_drafts(heddle: Heddle, trace: Path, tmp_path: Path):
    model = config_json(tmp_path / "own-model", num_nextn_predict_layers=1)
    head = config_json(
        tmp_path / "head",
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=32_000,
    )
    made = tmp_path / "own-model.json"
    asked = ("--gpu", "h100", "--tp", "1", "--set", f"profile.head={head.parent}", "-o", made)
    assert heddle("profile", "from-config", model, *asked).exit_code == 0
    heads = json.loads(made.read_text())["heads"]
    # 3 x 4096^2 + 2 x 4096 x 128 x 48 + 4096^2 + 3 x 4096 x 12288 + 32000 x 4096, of 2 bytes.
    assert heads["eagle3"]["read_bytes"] == 2 * 399_507_456
    assert heads["eagle3"]["kv_bytes_per_token"] == 4096
    # 4096^2 x 2.5 of attention, 2 x 4096^2, the same MLP, and 150,000 x 4096.
    assert heads["mtp"]["read_bytes"] == 2 * 840_892_416
    on = ("--gpus", "1", "--policies", "verl", "--json", "--model", made)
    plain = heddle("compare", trace, *on)
    assert plain.exit_code == 0, plain.output
    for method in ("mtp", "eagle3"):
        result = heddle("compare", trace, *on, "--speculation", f"{method}:3:.9/.8/.7")
        assert result.exit_code == 0, result.output
        of = [
            json.loads(each.stdout)["policies"][0]["makespan_s"]["mean"] for each in (result, plain)
        ]
        assert of[0] < of[1]


def test_a_head_of_another_model_is_refused(refused: Refused, tmp_path: Path):
    model = config_json(tmp_path / "own-model")
    head = config_json(tmp_path / "head", target_hidden_size=5120)
    said = refused(
        "profile", "from-config", model, "--gpu", "h100", "--set", f"profile.head={head}"
    )
    assert "the head is of a model of hidden size 5,120, and own-model has 4,096" in said


def test_a_drafter_that_leaves_no_kv_is_refused():
    tight = cluster("eagle3:3")
    profile = load_profiles(tight).classes[0].profile
    assert (
        profile.at(1).kv_capacity_tokens
        < load_profiles(cluster("off")).only.at(1).kv_capacity_tokens
    )
    large = Drafter(reject_s_per_token=0.0, weight_bytes=60e9)
    with pytest.raises(ProfileError, match=r"the drafter .* leaves no room for KV"):
        with_drafter(profile, large).at(1)


def test_acceptance_that_rises_is_warned_of(heddle: Heddle, trace: Path):
    result = heddle("compare", trace, *ON, "--speculation", "eagle3:2:0.5/0.6", *REPORTLESS)
    assert result.exit_code == 0
    assert "Warning: acceptance rises" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workload", some(["search", "coding", "math"], 3))
def test_heddle_is_not_behind_verl_because_of_drafts(workload: str, tmp_path: Path):
    path = tmp_path / "rollout.jsonl.gz"
    write_trace(path, synth(workload, 256, 5, 16))

    def over_verl(speculation: str) -> float:
        """Makespan of verl at its best TP degree over that of heddle."""
        config = RunConfig(trace=str(path), cluster=cluster(speculation, gpus=8))
        found = compare(config, ["verl", "heddle"], tps="best", out=tmp_path / "runs", jobs=1)
        verl, heddle = (row.makespan_s.mean for row in found.best_rows)
        return verl / heddle

    least = 0.98 * min(1.0, over_verl("off"))
    assert over_verl(PUBLISHED) >= least
    assert over_verl("eagle3:schedule:0.886/0.770/0.663") >= least
