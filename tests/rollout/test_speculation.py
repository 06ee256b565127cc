"""Settings of speculative decoding: read, refused, and equal to vLLM's own."""

import pytest

from heddle_rollout.speculation import Speculation, SpeculationError, read_speculation

SCHEDULE = "mtp:1-16=3,32-64=1,65-=0:0.9/0.8/0.7"


def test_one_number_of_drafts_holds_for_every_batch_size() -> None:
    found = read_speculation("ngram:4")
    assert found.accepted is None
    assert found.drafts(3) == [0, 4, 4, 4]
    assert found.vllm_config() == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }


def test_gaps_and_the_end_of_a_schedule_carry_the_last_drafts_on() -> None:
    found = read_speculation("mtp:1-2=3,5-6=1")
    assert found.drafts(8) == [0, 3, 3, 3, 3, 1, 1, 1, 1]
    assert found.most_drafts == 3
    assert found.vllm_config()["num_speculative_tokens_per_batch_size"] == [[1, 2, 3], [5, 6, 1]]


def test_a_setting_is_written_as_it_was_typed() -> None:
    assert str(read_speculation(SCHEDULE)) == SCHEDULE
    assert str(read_speculation("eagle3:2:0.5")) == "eagle3:2:0.5"


def test_schedules_expand_as_in_vllm() -> None:
    utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    for text in ("mtp:1-16=3,32-64=1,65-=0", "ngram:1-1=5", "mtp:1-4=0,5-9=2,20-30=16"):
        found = read_speculation(text)
        config = found.vllm_config()
        ranges = config.get("num_speculative_tokens_per_batch_size") or [list(found.ranges[0])]
        theirs = utils.build_dynamic_sd_schedule_lookup(ranges, 100, found.most_drafts)
        assert found.drafts(100) == theirs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("on", "is not off, best or METHOD:DRAFTS"),
        ("mtp:", "is not off, best or METHOD:DRAFTS"),
        ("medusa:3", "unknown: take ngram, mtp, eagle3, draft_model, grouped"),
        ("mtp:three", "is no range of a schedule"),
        ("mtp:17", "17 drafts are not 0 to 16"),
        ("mtp:0", "no batch size has drafts"),
        ("mtp:2-4=3", "begin at 1"),
        ("mtp:1-8=3,8-9=1", "overlaps the one that ends at 8"),
        ("mtp:1-8=3,5-4=1", "ends before it begins"),
        ("mtp:2:0.9/0.8/0.7", "3 values for 2 drafts"),
        ("mtp:2:0.9/1.2", "an acceptance of 1.2 is no chance"),
        ("mtp:2:nan", "an acceptance of nan is no chance"),
        ("mtp:2:", "is neither numbers with slashes between"),
    ],
)
def test_what_no_engine_can_be_set_to_is_refused(text: str, said: str) -> None:
    with pytest.raises(SpeculationError, match=said.replace("[", r"\[")):
        read_speculation(text)


def test_acceptance_that_rises_is_noticed() -> None:
    rising = Speculation(method="mtp", ranges=((1, 9, 2),), accepted=(0.5, 0.6))
    assert rising.rises
    assert not read_speculation(SCHEDULE).rises
