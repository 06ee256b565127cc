"""The router behind verl's own loader and clients, over engines that are Ray actors."""

import asyncio
import contextlib

import pytest

from tests.patience import PATIENCE_S
from tests.verl.one_loop import asynchronous

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("ray_cluster")]

WITH_AND_WITHOUT_A_PROXY = pytest.mark.parametrize("proxy", ["true", "false"])


def loader():
    from verl.workers.rollout.router import get_router_handle

    return get_router_handle


def client_of(router, *, resumes=False, **rollout):
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    from tests.verl.fakes import client_config

    kind = FullyAsyncLLMServerClient if resumes else LLMServerClient
    return kind(client_config(**rollout), router)


def lengths_of(number, most):
    return [1 + (number * 37 + step * 101) % most for step in range(5)]


def assert_undisturbed(prompt, lengths, outputs):
    """Each step has the tokens and log-probs that one engine alone would have made."""
    from tests.verl.fakes import VOCABULARY, continuation

    context = list(prompt)
    for length, output in zip(lengths, outputs, strict=True):
        expected = continuation(context, length)
        assert output.token_ids == expected
        assert output.log_probs == [-token / VOCABULARY for token in expected]
        # A client that resumes an abort itself has a word of its own for the limit.
        assert output.stop_reason in ("completed", "length")
        context += [*expected, *range(8)]


async def drained(router, limit_s=PATIENCE_S):
    for _ in range(int(limit_s / 0.05)):
        if not await router.get_total_inflight.remote():
            return True
        await asyncio.sleep(0.05)
    return False


@WITH_AND_WITHOUT_A_PROXY
@asynchronous
async def test_64_trajectories_of_5_steps_end_with_their_tokens_and_nothing_stays_in_flight(
    yaml_file, proxy
):
    from tests.verl.fakes import engines, run_steps

    servers = engines(2, slots=4)
    router = loader()(servers, router_config_path=yaml_file(proxy=proxy))
    client = client_of(router)
    prompts = [[number // 8] * 20 for number in range(64)]
    outputs = await asyncio.gather(
        *(
            run_steps(client, f"r{number}", prompts[number], lengths_of(number, 60))
            for number in range(64)
        )
    )
    for number in range(64):
        assert_undisturbed(prompts[number], lengths_of(number, 60), outputs[number])
    assert await drained(router)
    status = await router.get_status.remote()
    assert status["servers"] == dict.fromkeys(servers, 0)
    assert (status["active_servers"], status["waiting"], status["idle"]) == (2, 0, 64)
    assert await router.get_all_servers.remote() == list(servers)
    reports = [await engine.report.remote() for engine in servers.values()]
    assert sum(len(report["calls"]) for report in reports) == 320
    assert all(report["most"] == 4 for report in reports)
    assert all(report["resets"] == 0 for report in reports)


@WITH_AND_WITHOUT_A_PROXY
@asynchronous
async def test_held_steps_come_in_the_order_of_the_policy(yaml_file, proxy):
    from tests.verl.fakes import engines

    servers = engines(1, slots=1, token_s=0.005)
    settings = yaml_file(proxy=proxy, policy="verl+round_robin")
    client = client_of(router := loader()(servers, router_config_path=settings))
    ended = []

    async def step(name, prompt_tokens, tokens):
        await client.generate(
            name, prompt_ids=[1] * prompt_tokens, sampling_params={"max_tokens": tokens}
        )
        ended.append((name, prompt_tokens))

    await step("old", 10, 4)
    blocking = asyncio.ensure_future(step("first", 10, 800))  # until all others wait
    while not await router.get_total_inflight.remote():
        await asyncio.sleep(0.02)
    # Requested before all others, but the second of its trajectory.
    second = asyncio.ensure_future(step("old", 30, 4))
    while (await router.get_status.remote())["waiting"] < 1:
        await asyncio.sleep(0.02)
    others = [asyncio.ensure_future(step(f"new{i}", 10, 4)) for i in range(3)]
    await asyncio.gather(blocking, second, *others)
    assert ended[-1] == ("old", 30)
    assert {name for name, _ in ended[2:-1]} == {"new0", "new1", "new2"}


@asynchronous
async def test_steps_of_an_engine_that_is_removed_go_on_elsewhere_as_if_undisturbed(yaml_file):
    from tests.verl.fakes import engines, run_steps

    servers = engines(2, slots=8, token_s=0.004)
    router = loader()(servers, router_config_path=yaml_file(proxy="true"))
    client = client_of(router)
    runs = [
        asyncio.ensure_future(run_steps(client, f"r{n}", [n] * 20, [200, 40])) for n in range(8)
    ]
    while await router.get_total_inflight.remote() < 8:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    gone, kept = servers
    await router.remove_servers.remote([gone])
    outputs = await asyncio.gather(*runs)
    for number, output in enumerate(outputs):
        assert_undisturbed([number] * 20, [200, 40], output)
    aborted = [c for c in (await servers[gone].report.remote())["calls"] if c["tokens"] < 200]
    resumed = [c for c in (await servers[kept].report.remote())["calls"] if c["prompt"] > 20]
    assert len(aborted) == 4
    assert any(c["tokens"] for c in aborted)
    # The rest of a step has its tokens so far for a prompt: none of them is made again.
    rests = {20 + c["tokens"] for c in aborted}
    assert rests <= {c["prompt"] for c in resumed} | {20}
    assert sum(output.num_preempted or 0 for run in outputs for output in run) >= 1
    assert await router.get_all_servers.remote() == [kept]
    assert (await servers[gone].report.remote())["resets"] == 0
    assert await drained(router)


@WITH_AND_WITHOUT_A_PROXY
@asynchronous
async def test_a_phase_switch_of_verls_trainer_loses_no_token(yaml_file, proxy):
    """Remove engines and abort them, as `switch_to_trainer` does; then add them again."""
    from tests.verl.fakes import engines, run_steps

    servers = engines(2, slots=4, token_s=0.004)
    router = loader()(servers, router_config_path=yaml_file(proxy=proxy))
    client = client_of(router, resumes=True)
    runs = [
        asyncio.ensure_future(run_steps(client, f"r{n}", [n] * 20, [150, 30])) for n in range(12)
    ]
    while await router.get_total_inflight.remote() < 8:
        await asyncio.sleep(0.02)
    hybrid, _ = servers
    await router.remove_servers.remote([hybrid])
    await servers[hybrid].abort_all_requests.remote(reject_request=True)
    await asyncio.sleep(0.5)
    await servers[hybrid].resume_generation.remote()
    await router.add_servers.remote({hybrid: servers[hybrid]})
    outputs = await asyncio.gather(*runs)
    for number, output in enumerate(outputs):
        assert_undisturbed([number] * 20, [150, 30], output)
    assert await drained(router)


@WITH_AND_WITHOUT_A_PROXY
@asynchronous
async def test_a_rebalancing_of_verls_rollouter_drains_although_steps_wait(yaml_file, proxy):
    """Clear, abort all, poll until nothing is in flight, resume: `rebalance_requests`."""
    from tests.verl.fakes import engines, run_steps

    servers = engines(2, slots=2, token_s=0.004)
    router = loader()(servers, router_config_path=yaml_file(proxy=proxy))
    client = client_of(router, resumes=True)
    runs = [
        asyncio.ensure_future(run_steps(client, f"r{n}", [n] * 20, [150, 30])) for n in range(8)
    ]
    while await router.get_total_inflight.remote() < 4:
        await asyncio.sleep(0.02)
    answer = await router.clear_sticky_cache.remote()
    assert answer == {"cleared_entries": 0, "server_loads": dict.fromkeys(servers, 2)}
    await asyncio.gather(*(engine.abort_all_requests.remote() for engine in servers.values()))
    assert await drained(router, 25.0)
    await asyncio.gather(*(engine.resume_generation.remote() for engine in servers.values()))
    outputs = await asyncio.gather(*runs)
    for number, output in enumerate(outputs):
        assert_undisturbed([number] * 20, [150, 30], output)


@asynchronous
async def test_steps_of_an_engine_that_dies_are_made_elsewhere(yaml_file):
    from tests.verl.fakes import engines, run_steps

    servers = engines(2, slots=8, token_s=0.004)
    router = loader()(servers, router_config_path=yaml_file(proxy="true"))
    client = client_of(router)
    runs = [
        asyncio.ensure_future(run_steps(client, f"r{n}", [n] * 20, [100, 20])) for n in range(8)
    ]
    while await router.get_total_inflight.remote() < 8:
        await asyncio.sleep(0.02)
    dead, kept = servers
    with contextlib.suppress(Exception):
        await servers[dead].fail.remote()
    outputs = await asyncio.gather(*runs)
    for number, output in enumerate(outputs):
        assert_undisturbed([number] * 20, [100, 20], output)
    assert await router.get_all_servers.remote() == [kept]


@asynchronous
async def test_a_client_that_is_cancelled_frees_its_slot(yaml_file):
    from tests.verl.fakes import engines

    servers = engines(1, slots=1, token_s=0.01)
    router = loader()(servers, router_config_path=yaml_file(proxy="true"))
    client = client_of(router)
    long = asyncio.ensure_future(
        client.generate("a", prompt_ids=[1] * 9, sampling_params={"max_tokens": 2000})
    )
    while not await router.get_total_inflight.remote():
        await asyncio.sleep(0.02)
    waits = asyncio.ensure_future(
        client.generate("b", prompt_ids=[2] * 9, sampling_params={"max_tokens": 5})
    )
    long.cancel()
    assert len((await waits).token_ids) == 5
    (call, _) = (await servers[next(iter(servers))].report.remote())["calls"]
    assert call["tokens"] < 2000


@asynchronous
async def test_engines_that_sort_by_priority_get_the_priority_of_the_policy(yaml_file):
    from tests.verl.fakes import engines, run_steps

    servers = engines(1, slots=4, by_priority=True)
    settings = yaml_file(proxy="true", policy="verl+longest_total+progressive")
    client = client_of(loader()(servers, router_config_path=settings))
    await run_steps(client, "a", [1] * 9, [50, 50, 50])
    calls = (await next(iter(servers.values())).report.remote())["calls"]
    priorities = [call["priority"] for call in calls]
    # More and more tokens in all: more and more urgent, which is lower for vLLM.
    assert priorities == sorted(priorities, reverse=True)
    assert priorities[-1] < priorities[0]


@asynchronous
async def test_steps_without_a_limit_keep_that_of_their_engine_when_they_are_resumed(yaml_file):
    from tests.verl.fakes import continuation, engines

    servers = engines(2, slots=4, token_s=0.001)
    client = client_of(router := loader()(servers, router_config_path=yaml_file(proxy="true")))
    run = asyncio.ensure_future(client.generate("a", prompt_ids=[1] * 9, sampling_params={}))
    while not await router.get_total_inflight.remote():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    status = await router.get_status.remote()
    busy = next(name for name, steps in status["servers"].items() if steps)
    await router.remove_servers.remote([busy])
    assert (await run).token_ids == continuation([1] * 9, 2048)


@asynchronous
async def test_a_run_leaves_a_journal_that_replays(yaml_file, tmp_path):
    from heddle.runs import load_run
    from heddle.runs.replay import replay
    from tests.verl.fakes import engines, run_steps

    servers = engines(2, slots=2)
    settings = yaml_file(proxy="true", out=tmp_path / "runs")
    client = client_of(router := loader()(servers, router_config_path=settings))
    await asyncio.gather(*(run_steps(client, f"r{n}", [n] * 9, [9, 9]) for n in range(8)))
    await router.write_journal.remote()
    (folder,) = (tmp_path / "runs").iterdir()
    replayed = replay(load_run(folder, unfinished=True))
    assert replayed.divergence is None
    assert replayed.commands >= 16


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": None}, r"model is missing: name the profile .* model: qwen3-14b"),
        ({"gpu": None}, r"gpu is missing"),
        ({"polcy": "verl"}, r'polcy is no key of a Heddle router\. Did you mean "policy"\?'),
        ({"model": "qwen3-13b"}, r"qwen3-13b.*qwen3-14b"),
        ({"model": "nothing.json"}, r"cannot read the profile nothing\.json"),
        ({"policy": "hedle"}, r"no policy is called 'hedle'.*heddle"),
        ({"policy": "heddle+oracle"}, r"knows the future"),
        ({"max_running": "many"}, r"max_running: Expected `int \| null`"),
        ({"max_running": 0}, r"max_running must be 1 or more"),
        ({"idle_s": 0}, r"idle_s must be more than 0"),
        ({"tp": 3}, r"has no TP 3, but"),
    ],
)
def test_a_bad_file_is_refused_at_the_call_that_names_it(yaml_file, values, message):
    with pytest.raises(ValueError, match=message) as caught:
        loader()({}, router_config_path=yaml_file(**values))
    assert "\n" not in str(caught.value)


@asynchronous
async def test_engines_that_report_nothing_need_their_numbers_in_the_file(yaml_file):
    import ray

    from tests.verl.fakes import continuation

    class Silent:
        async def generate(self, prompt_ids, sampling_params, request_id, **_):
            from tests.verl.fakes import TokenOutput

            return TokenOutput(token_ids=continuation(prompt_ids, 3), stop_reason="completed")

    servers = {"a": ray.remote(num_cpus=0, max_concurrency=100)(Silent).remote()}
    client = client_of(loader()(servers, router_config_path=yaml_file(tp=1)))
    with pytest.raises(ValueError, match="max_running is missing, and these engines do not report"):
        await client.generate("r", prompt_ids=[1], sampling_params={})
    client = client_of(loader()(servers, router_config_path=yaml_file(tp=1, max_running=4)))
    output = await client.generate("r", prompt_ids=[1], sampling_params={})
    assert output.token_ids == continuation([1], 3)
