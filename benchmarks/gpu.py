"""Times of `vllm serve` on one GPU: steps, prompts, speculation, sleep, KV moves, a killed engine.

    python -m benchmarks.gpu all --out gpu.json

Models have the shapes of Qwen3 and random weights, so nothing is downloaded. Each part is kept in
the JSON as soon as it ends, and a part that is there is not measured again. Without a GPU the
engines run on CPU with a small model: the same calls, and times that say nothing.

`engine`: one engine on most of the card. `speculation`: engines side by side, without and with a
head, measured one after the other, and sleep; `drafts`: likewise n-grams, and a head at K = 0.
Draft tokens are accepted by vLLM's synthetic rejection sampler at the rates of `ACCEPTED`, so that
cost and acceptance are separate. `pair`: two engines with NIXL on the card, and `heddle serve` in
front while one is killed.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import click

from heddle.hardware import hardware
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.command import PARENT
from heddle_runtime.vllm.serve import serve_arguments, serve_environment
from heddle_runtime.vllm.settings import VllmSettings, installed_vllm
from heddle_runtime.vllm_http.probe import GENERATE

KEY = "of-this-run"
START_LIMIT_S, WINDOW_S, WINDOWS = 300.0, 0.6, 2
SEED = 7
ACCEPTED = (0.886, 0.770, 0.663)
"""By position, of Qwen3.5-9B with its own MTP head on dapo-math (SkyRL, spec_decode.mdx)."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    "qwen3-14b": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
}
COMMON: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


class Sizes:
    """What is measured on a GPU; `small` for a try on CPU."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.context = 2048 if small else 36864
        self.slots = 8 if small else 128
        self.contexts = (64, 256) if small else (1024, 4096, 16384, 32768)
        self.batches = (1, 4) if small else (1, 2, 4, 8, 16, 32, 64, 128)
        self.prompts = (64, 512) if small else (512, 1024, 2048, 4096, 8192, 16384)
        self.draft_context = 64 if small else 512
        self.draft_batches = (1, 4) if small else (1, 2, 4, 8, 16, 32, 64)
        self.decoded = 1500 if small else 4000
        self.moved = (128, 512) if small else (1024, 4096, 16384)
        self.clients, self.slots_of_rollout = (6, 4) if small else (128, 32)
        self.mean_output, self.most_output = (24, 64) if small else (500, 2048)


def write_model(folder: Path, name: str) -> Path:
    """Write the config of a model and a tokenizer of as many words as it has tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"t{n}": n for n in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_drafter(folder: Path, model: Path) -> Path:
    """Write the config of an EAGLE-3 head for a model: one layer of it, 32,000 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"num_hidden_layers": 1, "draft_vocab_size": min(32000, config["vocab_size"])}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Server:
    """One `vllm serve`, used by its URL."""

    def __init__(self, name: str, log: Path, arguments: Sequence[str], platform: Any) -> None:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            port, kv_port = one.getsockname()[1], other.getsockname()[1]
        self.name, self.url, self.log = name, f"http://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "heddle_runtime.vllm.command", PARENT, str(os.getpid())]
        command += [*arguments, "--host", "127.0.0.1", "--port", str(port)]
        environment = serve_environment(platform, host="127.0.0.1", kv_port=kv_port, key=KEY)
        self.began_s, self.start_s = time.monotonic(), 0.0
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**environment, "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
            )
        self.session = aiohttp.ClientSession(
            self.url,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=aiohttp.ClientTimeout(total=300.0),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def ready(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it ended, or takes too long; with the end of its log.
        """
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with self.session.get("/health") as answer:
                    if answer.status == 200:
                        break
            late = time.monotonic() - self.began_s > START_LIMIT_S
            if late or self._process.poll() is not None:
                lines = self.log.read_text(errors="replace").splitlines()
                errors = [line for line in lines if "Error" in line][:12]
                raise RuntimeError(
                    "\n".join([f"{self.name} does not start", *errors, *lines[-25:]])
                )
            await asyncio.sleep(0.2)
        self.start_s = time.monotonic() - self.began_s

    def logged(self) -> dict[str, str]:
        """What its log says of memory, KV and compilation."""
        text = self.log.read_text(errors="replace")
        found = {}
        for name, pattern in (
            ("kv_cache_tokens", r"GPU KV cache size: ([\d,]+) tokens"),
            ("weights", r"Model loading took (.*)"),
            ("graphs", r"Graph capturing finished in (.*)"),
            ("compile", r"torch.compile.* took ([\d.]+ s)"),
            ("attention", r"Using (\w+ attention backend|.* backend)"),
        ):
            if match := re.search(pattern, text):
                found[name] = match[1]
        return found

    async def metrics(self) -> dict[str, float]:
        """Sums of its counters by name, and the time when they were read."""
        async with self.session.get("/metrics") as answer:
            text = await answer.text()
        found: dict[str, float] = {"now_s": time.perf_counter()}
        for line in text.splitlines():
            if line.startswith("vllm:") and (at := line.rfind(" ")) > 0:
                name = line[5:at].partition("{")[0]
                found[name] = found.get(name, 0.0) + float(line[at:])
        return found

    async def post(self, path: str, body: Any = None, **query: Any) -> Any:
        """Call it.

        Raises:
            RuntimeError: it refuses.
        """
        async with self.session.post(path, json=body, params=query) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise RuntimeError(f"{self.name} {path}: {answer.status} {text[:300]}")
        return json.loads(text) if text.startswith("{") else text

    async def generate(self, prompt: Sequence[int], tokens: int, **more: Any) -> Any:
        """Run a step of so many tokens; `more`: its `extra_args`."""
        sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        sampling |= {"max_tokens": tokens, "min_tokens": tokens}
        if more:
            sampling["extra_args"] = more
        return await self.post(GENERATE, {"token_ids": prompt, "sampling_params": sampling})

    def kill(self) -> None:
        """End its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it and wait."""
        await self.session.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, 10.0)
        self.kill()
        await asyncio.to_thread(self._process.wait)


class Bench:
    """The engines of one machine, and the prompts that they get."""

    def __init__(self, folder: Path, model: str, sizes: Sizes, more: Sequence[str] = ()) -> None:
        """`more`: arguments of every engine."""
        installed = installed_vllm()
        assert installed is not None, "vLLM is not installed"
        self.folder, self.sizes, self.more = folder, sizes, more
        self.platform = installed.platform
        self.fresh = count(1)
        """Names of prompts that no engine has cached."""
        self.model = (
            write_model(folder / model, model)
            if self.platform == "cuda"
            else make_tiny_model(folder / "tiny", size="small", seed=SEED)
        )
        self.vocabulary = json.loads((self.model / "config.json").read_text())["vocab_size"]

    @asynccontextmanager
    async def servers(
        self, share: float, kv_gib: int | None = None, **arguments: Sequence[str]
    ) -> AsyncIterator[list[Server]]:
        """Start engines side by side, each with more arguments, on this share of the card.

        `kv_gib`: KV of each; engines that start together cannot measure what is free.
        """
        settings = VllmSettings(
            model_dir=str(self.model),
            load_format="dummy" if self.platform == "cuda" else "auto",
            max_context=self.sizes.context,
            max_batched_tokens=8192 if self.platform == "cuda" else 2048,
            gpu_memory_share=share,
            kv_bytes=64 << 20 if self.platform == "cpu" else kv_gib and kv_gib << 30,
        )
        common = serve_arguments(settings, self.platform, tp=1, max_running=self.sizes.slots)
        begun: list[Server] = []
        try:
            for name, more in arguments.items():
                log = self.folder / f"{name}.log"
                begun.append(Server(name, log, [*common, *self.more, *more], self.platform))
            await asyncio.gather(*(server.ready() for server in begun))
            yield begun
        finally:
            await asyncio.gather(*(server.close() for server in begun))

    def ids(self, name: str, count: int) -> list[int]:
        """Tokens drawn by a name; the longer begins with the shorter."""
        rng = random.Random(f"{SEED}/{name}")
        return [rng.randrange(3, self.vocabulary - 1) for _ in range(count)]


async def decode(
    server: Server, prompts: Sequence[Sequence[int]], *, tokens: int
) -> list[dict[str, float]]:
    """Time iterations of a batch whose prompts are cached before, in windows, then drop it."""
    await asyncio.gather(*(server.generate(prompt, 1) for prompt in prompts))
    loads = [asyncio.create_task(server.generate(prompt, tokens)) for prompt in prompts]
    try:
        begun = await server.metrics()
        while True:
            now = await server.metrics()
            all_run = now["num_requests_running"] >= len(prompts)
            if all_run and now["generation_tokens_total"] > begun[
                "generation_tokens_total"
            ] + 4 * len(prompts):
                break
            await asyncio.sleep(0.01)
            for load in loads:
                if load.done():
                    load.result()
        found = []
        for _ in range(WINDOWS):
            before = await server.metrics()
            await asyncio.sleep(WINDOW_S)
            after = await server.metrics()
            window = _window(before, after, len(prompts))
            found.append({"batch": len(prompts), "context": len(prompts[0]), **window})
        return found
    finally:
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        while (await server.metrics())["num_requests_running"]:
            await asyncio.sleep(0.01)


def _window(
    before: Mapping[str, float], after: Mapping[str, float], batch: int
) -> dict[str, float]:
    def passed(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    iterations = passed("iteration_tokens_total_count")
    found = {
        "iterations": iterations,
        "iteration_ms": 1000 * passed("now_s") / max(iterations, 1),
        "tokens_of_each": passed("generation_tokens_total") / max(iterations * batch, 1),
    }
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        if drafted := passed(f"spec_decode_{name}_total"):
            found[name] = drafted / max(iterations * batch, 1)
    return found


async def rollout(bench: Bench, server: Server) -> dict[str, float]:
    """Run sequences with a long tail of lengths, all there at the start, in fewer slots."""
    sizes, rng = bench.sizes, random.Random(SEED)
    slots = asyncio.Semaphore(sizes.slots_of_rollout)
    outputs = [
        max(
            8, min(sizes.most_output, round(rng.lognormvariate(0.0, 1.0) * sizes.mean_output * 0.6))
        )
        for _ in range(sizes.clients)
    ]

    async def run(number: int, tokens: int) -> None:
        async with slots:
            await server.generate(bench.ids(f"rollout{number}", 256), tokens)

    began_s = time.perf_counter()
    await asyncio.gather(*(run(number, tokens) for number, tokens in enumerate(outputs)))
    return {
        "makespan_s": time.perf_counter() - began_s,
        "sequences": len(outputs),
        "slots": sizes.slots_of_rollout,
        "tokens": sum(outputs),
        "longest": max(outputs),
    }


async def prefill(bench: Bench, server: Server, prompt: int, cached: int) -> dict[str, float]:
    """Time a prompt, of which so many tokens are cached before."""
    ids = bench.ids(f"prefill{next(bench.fresh)}", prompt)
    if cached:
        await server.generate(ids[:cached], 1)
    before = await server.metrics()
    began_s = time.perf_counter()
    await server.generate(ids, 1)
    wall_s = time.perf_counter() - began_s
    after = await server.metrics()
    name = "request_prefill_time_seconds_sum"
    return {"wall_ms": 1000 * wall_s, "prefill_ms": 1000 * (after[name] - before[name])}


async def engine_part(bench: Bench) -> dict[str, Any]:
    """One engine on most of the card: its start, decoding, prompts, prompts beside a batch."""
    sizes = bench.sizes
    async with bench.servers(0.9, engine=()) as (server,):
        found: dict[str, Any] = {"start_s": server.start_s, **server.logged()}
        kv = int(found.get("kv_cache_tokens", "20,000").replace(",", ""))
        found["decode"] = decodes = list[dict[str, float]]()
        for context in sizes.contexts:
            for batch in reversed(sizes.batches):
                if batch * (context + 400) > 0.9 * kv:
                    continue
                prompts = [bench.ids(f"decode{n}", context) for n in range(batch)]
                decodes += await decode(server, prompts, tokens=sizes.decoded)
        found["prefill"] = [
            {"prompt": prompt, "cached": cached, **await prefill(bench, server, prompt, cached)}
            for _ in range(3)
            for prompt in sizes.prompts
            for cached in (0, prompt // 2)
        ]
        found["beside"] = await beside(bench, server)
        found["rollout"] = await rollout(bench, server)
    return found


async def beside(bench: Bench, server: Server) -> list[dict[str, Any]]:
    """Time prompts that join a batch which decodes."""
    found = []
    for batch in bench.sizes.batches[2:7:2] or bench.sizes.batches[-1:]:
        context = bench.sizes.contexts[0]
        prompts = [bench.ids(f"decode{n}", context) for n in range(batch)]
        await asyncio.gather(*(server.generate(prompt, 1) for prompt in prompts))
        loads = [asyncio.create_task(server.generate(prompt, 1200)) for prompt in prompts]
        await asyncio.sleep(WINDOW_S)
        for prompt in bench.sizes.prompts[:3]:
            one = await prefill(bench, server, prompt, 0)
            found.append({"batch": batch, "context": context, "prompt": prompt, **one})
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    return found


def speculative(*, synthetic: bool = True, **config: Any) -> tuple[str, ...]:
    """The arguments of a drafter; vLLM accepts by rates on GPUs only."""
    accepted = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": ACCEPTED[: config["num_speculative_tokens"]],
    }
    return ("--speculative-config", json.dumps({**config, **(accepted if synthetic else {})}))


async def speculation_part(bench: Bench) -> dict[str, Any]:
    """Engines without and with a head: iterations by batch, and a rollout of each; sleep."""
    engines: dict[str, tuple[str, ...]] = {"plain": ()}
    if bench.platform == "cuda":
        head = eagle_head(bench)
        engines = {
            "plain": ("--enable-sleep-mode",),
            "eagle1": speculative(num_speculative_tokens=1, **head),
            "eagle3": speculative(num_speculative_tokens=3, **head),
        }
    async with bench.servers(0.28, 9, **engines) as servers:
        found = await drafted(bench, servers)
        plain = servers[0]
        if bench.platform == "cuda":
            found["sleep"] = [await nap(plain, level) for level in (1, 1, 1, 2)]
    return found


async def drafts_part(bench: Bench) -> dict[str, Any]:
    """Drafts from the prompt, and a head that is loaded and drafts nothing: K = 0."""
    ngram: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    ngram["synthetic"] = bench.platform == "cuda"
    engines: dict[str, tuple[str, ...]] = {}
    if find_spec("numba"):  # vLLM's n-gram drafter needs it
        engines |= {f"ngram{k}": speculative(num_speculative_tokens=k, **ngram) for k in (1, 3)}
    if bench.platform == "cuda":
        none = {"num_speculative_tokens_per_batch_size": [[1, bench.sizes.slots, 0]]}
        engines["loaded"] = speculative(num_speculative_tokens=1, **eagle_head(bench), **none)
    if not engines:
        return {}
    async with bench.servers(0.28, 9, **engines) as servers:
        return await drafted(bench, servers)


def eagle_head(bench: Bench) -> dict[str, Any]:
    """The drafter of a head with random weights."""
    return {"method": "eagle3", "model": str(write_drafter(bench.folder / "head", bench.model))}


async def drafted(bench: Bench, servers: Sequence[Server]) -> dict[str, Any]:
    """Iterations by batch and a rollout of each engine, one after the other."""
    sizes, found = bench.sizes, dict[str, Any](accepted=ACCEPTED)
    for server in servers:
        found[server.name] = of_one = {"start_s": server.start_s, **server.logged()}
        rows: list[dict[str, float]] = []
        for batch in sizes.draft_batches:
            # A pattern that repeats: an n-gram drafter always finds what to draft.
            prompts = [
                (bench.ids(f"draft{n}", 32) * sizes.draft_context)[: sizes.draft_context]
                for n in range(batch)
            ]
            rows += await decode(server, prompts, tokens=sizes.decoded)
        of_one |= {"decode": rows, "rollout": await rollout(bench, server)}
    return found


async def nap(server: Server, level: int) -> dict[str, float]:
    """Release an engine's memory and take it again."""
    times = [time.perf_counter()]
    await server.post("/sleep", level=level)
    times.append(time.perf_counter())
    await server.post("/wake_up")
    times.append(time.perf_counter())
    return {"level": level, "sleep_s": times[1] - times[0], "wake_s": times[2] - times[1]}


async def pair_part(bench: Bench) -> dict[str, Any]:
    """Two engines on the card: moves of KV between them, then one is killed under the gateway."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
    nixl["kv_buffer_device"] = bench.platform
    more = ("--kv-transfer-config", json.dumps(nixl))
    async with bench.servers(0.42, 30, first=more, second=more) as (first, second):
        found: dict[str, Any] = {"start_s": [first.start_s, second.start_s]}
        found["moves"] = [
            {"tokens": tokens, **await move(bench, first, second, f"{tokens}/{again}", tokens)}
            for again in range(3)
            for tokens in bench.sizes.moved
        ]
        found["killed"] = await killed(bench, first, second)
    return found


async def move(
    bench: Bench, source: Server, target: Server, name: str, tokens: int
) -> dict[str, float]:
    """Time a step on a context that the target pulls, and the same without a pull."""
    ids, other = bench.ids(f"move{name}", tokens), bench.ids(f"moved{name}", tokens)
    first = await source.generate(ids, 1, kv_transfer_params={"do_remote_decode": True})
    params = first.get("kv_transfer_params")
    assert params, f"no handle: {str(first)[:300]}"
    began_s = time.perf_counter()
    await target.generate(ids, 1, kv_transfer_params=params)
    pulled_s = time.perf_counter()
    await target.generate(other, 1)
    prefilled_s = time.perf_counter()
    return {"pull_ms": 1000 * (pulled_s - began_s), "prefill_ms": 1000 * (prefilled_s - pulled_s)}


async def killed(bench: Bench, first: Server, second: Server) -> dict[str, Any]:
    """Run clients through `heddle serve`, and kill an engine in the middle."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    code = "from heddle.command import main; main()"
    command = [sys.executable, "-c", code, "serve", "--engine", "http", "--port", str(port)]
    command += ["--worker", first.url, "--worker", second.url, "--out", str(bench.folder / "runs")]
    log = (bench.folder / "gateway.log").open("wb")
    environment = {**os.environ, "HEDDLE_ENGINE_KEY": KEY}
    gateway = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    outcomes: list[str] = []
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get("/health") as answer:
                        if answer.status == 200:
                            break
                assert gateway.poll() is None, "heddle serve ended"
                await asyncio.sleep(0.2)

            async def client(number: int) -> None:
                body: dict[str, Any] = {"model": bench.model.name, "temperature": 0}
                body |= {"prompt": bench.ids(f"client{number}", 200), "ignore_eos": True}
                body |= {"max_tokens": 300}
                async with session.post("/v1/completions", json=body) as answer:
                    answered = await answer.json()
                whole = (answered.get("usage") or {}).get("completion_tokens") == 300
                outcomes.append("whole" if whole else f"{answer.status}: {str(answered)[:200]}")

            began_s = time.perf_counter()
            clients = [asyncio.create_task(client(n)) for n in range(bench.sizes.slots // 2)]
            await asyncio.sleep(1.0)
            first.kill()
            await asyncio.wait(clients, timeout=60.0)
            return {
                "clients": len(clients),
                "whole": outcomes.count("whole"),
                "seconds": time.perf_counter() - began_s,
                "others": [outcome for outcome in outcomes if outcome != "whole"][:3],
            }
    finally:
        gateway.terminate()
        gateway.wait(20.0)
        log.close()


PARTS: Mapping[str, Callable[[Bench], Coroutine[Any, Any, dict[str, Any]]]] = {
    "engine": engine_part,
    "speculation": speculation_part,
    "drafts": drafts_part,
    "pair": pair_part,
}


@click.command(help=__doc__)
@click.argument("parts", nargs=-1, type=click.Choice([*PARTS, "all"]), required=True)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="JSON to write or go on with"
)
@click.option("--model", type=click.Choice(list(SHAPES)), default="qwen3-8b", show_default=True)
@click.option(
    "--folder", type=click.Path(path_type=Path), default=Path("gpu-bench"), help="For logs"
)
@click.option("--serve", default="", help="More arguments of every vllm serve")
def main(parts: tuple[str, ...], out: Path, model: str, folder: Path, serve: str) -> None:
    """Measure, part by part."""
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(out.read_text()) if out.exists() else {}
    installed = installed_vllm()
    small = installed is None or installed.platform == "cpu"
    bench = Bench(folder, model, Sizes(small=small), serve.split())
    found |= {"schema": "heddle.gpu/1", "model": bench.model.name, "hardware": hardware()}
    found |= {"vllm": installed.release if installed else "", "seed": SEED}
    failed = []
    for name in PARTS if "all" in parts else parts:
        if name in found:
            continue
        began_s = time.monotonic()
        try:
            found[name] = asyncio.run(PARTS[name](bench))
        except Exception as error:
            failed.append(f"{name}: {error!r}")
            click.echo(f"{name}: {error}", err=True)
            continue
        found[name]["took_s"] = time.monotonic() - began_s
        out.write_text(json.dumps(found, indent=1) + "\n")
        click.echo(f"{name}: {found[name]['took_s']:.0f} s")
    if failed:
        raise click.ClickException("; ".join(failed))


if __name__ == "__main__":
    main()
