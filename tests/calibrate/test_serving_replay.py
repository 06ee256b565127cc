"""What a closed loop consists of, by hand, and that its iterations do not depend on their times."""

from dataclasses import replace

import pytest

from heddle_calibrate.fit.kernel_profile import NO_HOST
from heddle_calibrate.serving.replay import Clients, serving_work
from heddle_sim.profile_files import expand, load_profile
from tools.profiles.closed_loop import ClosedLoop, replay

KERNELS = expand(load_profile("qwen3-8b", "h100"), 1, host=NO_HOST)


def clients(concurrency: int, **given: float) -> Clients:
    sizes = {"input_tokens": 1000, "output_tokens": 100, "shortest": 1.0, "waves": 3} | given
    return Clients(concurrency=concurrency, **sizes)  # type: ignore[arg-type]


def test_one_client_waits_for_its_own_prompt_alone() -> None:
    work = serving_work(KERNELS, clients(1))
    prompt = KERNELS.prefill_s(1000, 1000**2 / 2)
    assert work.first_token.steps == 1
    assert work.first_token.prompts == 1
    assert work.first_token.prefill_s == pytest.approx(prompt)
    assert work.first_token.decode_s == pytest.approx(KERNELS.base_s[0])


def test_one_client_decodes_by_itself() -> None:
    work = serving_work(KERNELS, clients(1))
    # 99 iterations on 1000 to 1098 tokens.
    context = sum(range(1000, 1099)) / 99
    one = KERNELS.base_s[1] + KERNELS.per_context_s[1] * context
    assert work.per_token.steps == 1
    assert work.per_token.sequences == 1
    assert work.per_token.decode_s == pytest.approx(one)
    assert work.per_token.prefill_s == 0


def test_prompts_of_clients_that_start_together_share_an_iteration() -> None:
    work = serving_work(KERNELS, clients(4, waves=1))
    assert work.first_token.prompts == pytest.approx(4)
    assert work.first_token.prefill_s == pytest.approx(KERNELS.prefill_s(4000, 4 * 1000**2 / 2))
    assert work.per_token.sequences == pytest.approx(4)


def test_an_idle_engine_starts_with_the_first_request() -> None:
    # Second wave: one prompt alone, then the three that came while it ran, which wait for both.
    first = serving_work(KERNELS, clients(4, waves=1)).first_token
    work = serving_work(KERNELS, clients(4, waves=2)).first_token
    assert first.steps == 1
    assert work.steps == pytest.approx((4 * 1 + 1 + 3 * 2) / 8)
    assert work.prompts == pytest.approx((4 * 4 + 1 + 3 * (1 + 3)) / 8)


def test_a_request_enters_after_the_iteration_that_is_running() -> None:
    # Unequal lengths: while one client sends its next prompt, the other decodes.
    work = serving_work(KERNELS, clients(2, shortest=0.5, waves=200))
    assert 1.9 < work.first_token.steps < 2.05


@pytest.mark.parametrize("count", [3, 40])
def test_every_token_takes_one_iteration(count: int) -> None:
    work = serving_work(KERNELS, clients(count, shortest=0.8))
    assert work.preemptions == 0
    assert work.per_token.steps == pytest.approx(1)


def test_work_is_linear_in_kernel_times() -> None:
    slower = replace(
        KERNELS,
        base_s=[3 * s for s in KERNELS.base_s],
        per_context_s=[3 * s for s in KERNELS.per_context_s],
    )
    whole = clients(16, shortest=0.8)
    one, three = serving_work(KERNELS, whole), serving_work(slower, whole)
    assert three.per_token.decode_s == pytest.approx(3 * one.per_token.decode_s)
    assert three.first_token.decode_s == pytest.approx(3 * one.first_token.decode_s)
    assert three.per_token.steps == one.per_token.steps
    assert three.first_token.prefill_s == pytest.approx(one.first_token.prefill_s)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_one_wave_decodes_as_in_the_plain_closed_loop(count: int) -> None:
    # Few enough for one iteration to take all prompts: both models then go in lockstep.
    plain = replay(
        KERNELS, ClosedLoop(input_tokens=1000, output_tokens=100, concurrency=count, waves=1)
    )
    work = serving_work(KERNELS, clients(count, waves=1))
    assert work.per_token.decode_s == pytest.approx(plain.tpot_s)
    assert work.first_token.decode_s + work.first_token.prefill_s == pytest.approx(plain.ttft_s)


def test_requests_without_kv_wait() -> None:
    # KV for two requests of four: the other two wait for a whole request to end.
    tight = replace(KERNELS, kv_capacity_tokens=2300)
    work = serving_work(tight, clients(4, waves=20))
    assert work.per_token.sequences <= 2
    assert work.first_token.steps > 90


def test_running_out_of_kv_preempts_and_ends() -> None:
    # Two prompts fit, two whole requests do not.
    tight = replace(KERNELS, kv_capacity_tokens=2500)
    work = serving_work(tight, clients(2, output_tokens=400, waves=20))
    assert work.preemptions > 0
    assert work.per_token.steps > 1


def test_ranks_share_sequences_and_prompts() -> None:
    ranks = replace(KERNELS, dp=2)
    one, two = (serving_work(t, clients(8, waves=1)) for t in (KERNELS, ranks))
    assert two.per_token.sequences == pytest.approx(one.per_token.sequences / 2)
    assert two.first_token.prompts == pytest.approx(one.first_token.prompts / 2)


def test_a_request_larger_than_kv_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit in 500 tokens of KV"):
        serving_work(replace(KERNELS, kv_capacity_tokens=500), clients(1))


def test_more_clients_than_the_table_has_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="larger max_batch"):
        serving_work(KERNELS, clients(1000))


def test_an_engine_runs_no_more_sequences_than_its_limit() -> None:
    work = serving_work(KERNELS, clients(8, max_running=2, requests=8))
    assert work.per_token.sequences <= 2
    # Pairs in turn: the last waits for three others.
    assert work.first_token.steps == pytest.approx((1 + 101 + 201 + 301) / 4, rel=0.02)


def test_a_small_token_budget_cuts_a_prompt() -> None:
    assert serving_work(KERNELS, clients(1, batched_tokens=500)).first_token.steps == 2


# -- SGLang ----------------------------------------------------------------------------------------


def test_sglang_computes_prompts_while_decoding_waits() -> None:
    # Chunks of one prompt each: the first client waits for one, the fourth for all.
    one = {"waves": 1, "batched_tokens": 1000}
    work = serving_work(KERNELS, clients(4, prefill_first=True, **one))
    prompt = KERNELS.prefill_s(1000, 1000**2 / 2)
    assert work.first_token.steps == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert work.first_token.prefill_s == pytest.approx(2.5 * prompt)
    # Its first token made, the first client waits for the prompts of three, the last for none.
    assert work.per_token.prefill_s == pytest.approx(1.5 * prompt / 99)
    assert work.per_token.sequences == pytest.approx(4)
    beside = serving_work(KERNELS, clients(4, **one))
    assert beside.per_token.steps < work.per_token.steps


def test_sglang_looks_for_requests_every_so_many_iterations() -> None:
    often, rarely = (
        serving_work(KERNELS, clients(4, prefill_first=True, shortest=0.5, receive_every=n))
        for n in (1, 20)
    )
    assert rarely.first_token.steps > often.first_token.steps + 5


def test_sglang_keeps_kv_free_for_what_requests_will_make() -> None:
    tight = replace(KERNELS, kv_capacity_tokens=2150)
    given = {"waves": 1, "output_tokens": 500}
    assert serving_work(tight, clients(2, **given)).preemptions == 1
    kept = serving_work(tight, clients(2, prefill_first=True, **given))
    assert kept.preemptions == 0
    assert kept.per_token.sequences == pytest.approx(1)
