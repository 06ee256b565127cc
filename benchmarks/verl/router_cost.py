"""Cost of a request to verl's balancer and to Heddle's router, each a Ray actor; 6,400 that wait.

    make verl && .venv-verl/bin/python benchmarks/verl/router_cost.py

Engines answer at once, so that a step costs its requests only. Rounds alternate.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import ray

ROOT = Path(__file__).resolve().parents[2]
FILE = "router_class: heddle_verl.Router\nmodel: qwen3-14b\ngpu: h100\ntp: 1\nmax_running: {}\n"


class Instant:
    """An engine that answers at once."""

    async def generate(self, prompt_ids, sampling_params, request_id, **_):
        """Make one token."""
        return SimpleNamespace(
            token_ids=[1], log_probs=None, stop_reason="completed", extra_fields={}
        )


def router_of(engines, slots, proxy):
    """Heddle's router by verl's loader; without `slots` verl's own."""
    from verl.workers.rollout.router import get_router_handle

    if not slots:
        return get_router_handle(engines)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(FILE.format(slots) + f"proxy: {str(proxy).lower()}\n")
    return get_router_handle(engines, router_config_path=file.name)


async def steps(router, count, at_once, prompt_tokens):
    """Milliseconds of a step, and steps in a second."""
    from verl.workers.rollout.llm_server import LLMServerClient

    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    client = LLMServerClient(config, router)
    prompt = list(range(prompt_tokens))
    each = []

    async def trajectory(number):
        for _ in range(count // at_once):
            began = time.perf_counter()
            await client.generate(f"{id(each)}-{number}", prompt_ids=prompt, sampling_params={})
            each.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(trajectory(number) for number in range(at_once)))
    return 1000 * statistics.median(each), len(each) / (time.perf_counter() - began)


def table(options):
    """Print a row for each router, size and number of trajectories at once."""
    engine = ray.remote(num_cpus=0, max_concurrency=1000)(Instant)
    routers = {
        "verl's balancer": router_of({"a": engine.remote(), "b": engine.remote()}, 0, False),
        "heddle, rung 0": router_of({"a": engine.remote(), "b": engine.remote()}, 256, False),
        "heddle, proxy": router_of({"a": engine.remote(), "b": engine.remote()}, 256, True),
    }
    print(f"{'router':17} {'prompt':>7} {'at once':>7} {'ms a step':>9} {'steps/s':>8}")
    for prompt_tokens in (512, 16_384):
        for at_once in (1, 64):
            found = {name: [] for name in routers}
            for _ in range(options.rounds):
                for name, router in routers.items():
                    asyncio.run(steps(router, at_once, at_once, prompt_tokens))
                    count = options.steps if at_once > 1 else options.steps // 4
                    found[name].append(asyncio.run(steps(router, count, at_once, prompt_tokens)))
            for name, rows in found.items():
                ms, rate = (statistics.median(column) for column in zip(*rows, strict=True))
                print(f"{name:17} {prompt_tokens:7,} {at_once:7} {ms:9.2f} {rate:8.0f}", flush=True)


def _resident_mib(pid):
    """Memory of a process on this machine."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def _release(router, refs):
    """Let all run, one after another, in whatever order they come."""
    router.release_server.remote("a", request_id="first")

    async def one(number, ref):
        await ref
        router.release_server.remote("a", request_id=f"r{number}")

    await asyncio.gather(*(one(number, ref) for number, ref in enumerate(refs)))


def waiting(number):
    """Print what it costs that so many requests wait in the router."""
    engine = ray.remote(num_cpus=0, max_concurrency=1000)(Instant)
    router = router_of({"a": engine.remote()}, 1, False)
    ray.get(router.acquire_server.remote("first", prompt_ids=[1] * 512))
    pid = ray.get(router.process.remote())
    before = _resident_mib(pid)
    began = time.perf_counter()
    refs = [router.acquire_server.remote(f"r{n}", prompt_ids=[1] * 512) for n in range(number)]
    while ray.get(router.get_status.remote())["waiting"] < number:
        time.sleep(0.05)
    held_s = time.perf_counter() - began
    calls = []
    for _ in range(50):
        began = time.perf_counter()
        ray.get(router.get_total_inflight.remote())
        calls.append(time.perf_counter() - began)
    grown = _resident_mib(pid) - before
    began = time.perf_counter()
    asyncio.run(_release(router, refs))
    print(
        f"{number:,} requests wait: held after {held_s:.1f} s, {grown:.0f} MiB more, "
        f"another call {1000 * statistics.median(calls):.2f} ms, "
        f"all released in {time.perf_counter() - began:.1f} s"
    )


def main():
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, default=6400)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=300_000_000,
        logging_level="ERROR",
        log_to_driver=False,
    )
    table(options)
    waiting(options.waiting)


if __name__ == "__main__":
    main()
