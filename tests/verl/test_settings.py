"""A router's file, and the set-up that comes of it."""

import pytest

from heddle.config_error import ConfigError
from heddle_verl.settings import EngineFacts, check, prepare_router, read_settings

FILE = {"router_class": "heddle_verl.Router", "model": "qwen3-14b", "gpu": "h100"}
REPORTED = {
    "tensor_model_parallel_size": 2,
    "max_num_seqs": 64,
    "max_model_len": None,
    "prompt_length": 4096,
    "response_length": 8192,
    "scheduling_policy": "priority",
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": ""}, r"model is missing: name the profile .* model: qwen3-14b"),
        ({"gpu": ""}, r"gpu is missing"),
        ({"polcy": "verl"}, r'polcy is no key of a Heddle router\. Did you mean "policy"\?'),
        ({"zzz": 1}, r"zzz is no key of a Heddle router\. Known: router_class, model"),
        ({"model": "qwen3-13b"}, r"qwen3-13b.*qwen3-14b"),
        ({"model": "nothing.json"}, r"cannot read the profile nothing\.json"),
        ({"gpu": "h99"}, r"h99"),
        ({"policy": "hedle"}, r"no policy is called 'hedle'.*heddle"),
        ({"policy": "heddle+oracle"}, r"knows the future"),
        ({"history": "prior:nothing"}, r"nothing"),
        ({"max_running": "many"}, r"max_running: Expected `int \| null`"),
        ({"max_running": 0}, r"max_running must be 1 or more"),
        ({"ends": "maybe"}, r"ends is 'maybe': write announced or unknown"),
        ({"idle_s": 0}, r"idle_s must be more than 0"),
        ({"tp": 3}, r"has no TP 3, but"),
    ],
)
def test_a_bad_file_is_one_message_with_the_remedy(values, message):
    with pytest.raises(ValueError, match=message) as caught:
        check(FILE | values)
    assert "\n" not in str(caught.value)


def test_what_an_engine_reports_fills_in_what_the_file_leaves_out():
    facts = EngineFacts.of(REPORTED)
    setup = prepare_router(read_settings(FILE), facts, 3).setup
    assert (setup.context.shape.tp, setup.context.max_running) == (2, 64)
    assert setup.context.pools == {setup.context.shape.gpu: 6}
    assert facts.by_priority
    given = read_settings(FILE | {"tp": 4, "max_running": 8, "kv_tokens": 5000})
    prepared = prepare_router(given, facts, 1)
    assert (prepared.setup.context.shape.tp, prepared.setup.context.max_running) == (4, 8)
    assert prepared.kv_tokens == 5000


def test_a_number_that_nobody_gives_is_missing():
    with pytest.raises(ConfigError, match=r"tp is missing.*rollout\.tensor_model_parallel_size"):
        prepare_router(read_settings(FILE), EngineFacts(max_running=4), 1)
    with pytest.raises(ConfigError, match=r"max_running is missing.*rollout\.max_num_seqs"):
        prepare_router(read_settings(FILE), EngineFacts(tp=1), 1)


def test_kv_of_trajectories_is_kept_only_where_their_ends_are_announced():
    facts = EngineFacts.of(REPORTED)
    unknown = prepare_router(read_settings(FILE), facts, 2).setup
    announced = prepare_router(read_settings(FILE | {"ends": "announced"}), facts, 2).setup
    assert not unknown.policy.admission.keeps_kv
    assert announced.policy.admission.keeps_kv
    assert unknown.config.policy.preset == "heddle+given+keep_engines+fitting"


def test_no_policy_plans_engines_that_are_verls():
    for name in ("heddle", "heddle-paper", "libra-cmlfq", "verl"):
        setup = prepare_router(read_settings(FILE | {"policy": name}), EngineFacts.of(REPORTED), 4)
        plan = setup.setup.policy.planner.plan([], [])
        assert plan.engines == ()
