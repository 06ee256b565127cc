"""The router behind verl's loader and client, over real vLLM engines on CPU.

verl's own engines need GPUs. Here the actors that its clients call pass steps on to `vllm serve`,
greedy and in float32, so every trajectory has the tokens of one server that is asked directly.
"""

import asyncio
import json

import pytest

from tests.patience import PATIENCE_S
from tests.verl.one_loop import asynchronous

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("ray_cluster")]

TRAJECTORIES, LENGTHS, SLOTS = 8, (60, 90, 30), 3
PROMPT_TOKENS, OBSERVED = 40, 8


class Served:
    """An engine as verl's clients call it; its tokens are those of a server."""

    def __init__(self, url):
        self.url = url
        self.aborts: dict[str, asyncio.Event] = {}
        self.calls: list[tuple[str, int, int]] = []
        """Request, length of its prompt, tokens made."""
        self.generated = 0

    async def get_rollout_config(self):
        from tests.verl.fakes import Config

        return Config(
            tensor_model_parallel_size=1,
            max_num_seqs=SLOTS,
            max_model_len=8192,
            prompt_length=4096,
            response_length=2048,
            scheduling_policy="fcfs",
        )

    async def generate(self, prompt_ids, sampling_params, request_id, **_):
        from tests.verl.fakes import TokenOutput

        abort = self.aborts[request_id] = asyncio.Event()
        ids: list[int] = []
        logprobs: list[float] = []
        reading = asyncio.ensure_future(self._read(prompt_ids, sampling_params, ids, logprobs))
        aborted = asyncio.ensure_future(abort.wait())
        await asyncio.wait((reading, aborted), return_when=asyncio.FIRST_COMPLETED)
        cut = not reading.done()
        for task in (reading, aborted):
            task.cancel()
        if not cut:
            reading.result()
        del self.aborts[request_id]
        self.calls.append((request_id, len(prompt_ids), len(ids)))
        return TokenOutput(
            token_ids=ids,
            log_probs=logprobs,
            stop_reason="aborted" if cut else "completed",
            extra_fields={"global_steps": 1, "num_cached_tokens": 0},
        )

    async def _read(self, prompt_ids, sampling_params, ids, logprobs):
        import aiohttp

        body = {
            "prompt": list(prompt_ids),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 1,
            "stream": True,
            **sampling_params,
        }
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice["token_ids"]
                        logprobs += choice["logprobs"]["token_logprobs"]
                        self.generated += len(choice["token_ids"])

    async def abort_request(self, request_id, reset_prefix_cache=True):
        found = self.aborts.get(request_id)
        if found is None:
            return {"aborted": False, "error": "not found"}
        found.set()
        return {"aborted": True, "request_id": request_id}

    async def report(self):
        return self.calls, self.generated


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    from tests.runtime.vllm_serve import two_servers

    with two_servers(tmp_path_factory.mktemp("vllm")) as found:
        yield found


@asynchronous
async def test_trajectories_have_the_tokens_of_one_server_although_an_engine_leaves(
    urls, yaml_file, tmp_path
):
    import ray
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from heddle.runs import load_run
    from heddle.runs.replay import replay
    from tests.runtime.vllm_serve import direct
    from tests.verl.fakes import client_config, run_steps

    engine = ray.remote(num_cpus=0, max_concurrency=1_000)(Served)
    servers = {url.removeprefix("http://"): engine.remote(url) for url in urls}
    settings = yaml_file(proxy="true", out=tmp_path / "runs")
    router = get_router_handle(servers, router_config_path=settings)
    client = LLMServerClient(client_config(), router)
    prompts = [[5 + n, *range(40, 39 + PROMPT_TOKENS)] for n in range(TRAJECTORIES)]
    going = [
        asyncio.ensure_future(run_steps(client, f"r{n}", prompt, LENGTHS, observed=OBSERVED))
        for n, prompt in enumerate(prompts)
    ]
    leaves, stays = servers.values()
    async with asyncio.timeout(PATIENCE_S):
        while (await leaves.report.remote())[1] < 20:
            await asyncio.sleep(0.02)
    await router.remove_servers.remote([next(iter(servers))])
    outputs = await asyncio.gather(*going)
    for prompt, steps in zip(prompts, outputs, strict=True):
        context = list(prompt)
        for length, output in zip(LENGTHS, steps, strict=True):
            assert [*context, *output.token_ids] == await direct(urls[1], context, length)
            assert len(output.log_probs) == length
            assert all(each <= 0.0 for each in output.log_probs)
            context += [*output.token_ids, *range(OBSERVED)]
    # Steps of the engine that left went on at the other with the tokens that they had.
    cut = [made for _, _, made in (await leaves.report.remote())[0] if made not in LENGTHS]
    rests = {length for _, length, _ in (await stays.report.remote())[0]}
    assert any(cut)
    assert {PROMPT_TOKENS + made for made in cut} <= rests | {PROMPT_TOKENS}
    assert not await router.get_total_inflight.remote()
    await router.write_journal.remote()
    (folder,) = (tmp_path / "runs").iterdir()
    assert replay(load_run(folder, unfinished=True)).divergence is None
