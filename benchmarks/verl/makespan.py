"""Makespan of a recorded workload under verl's balancer and under Heddle's router.

    make verl && .venv-verl/bin/python benchmarks/verl/makespan.py

verl's own balancer and client run, in virtual time: agents follow a trace, and engines keep time as
a profile says. Engines have slots and queue in order of arrival, as vLLM does. KV is not limited.
"""

import argparse
import asyncio
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from heddle.config import MissingConfig
from heddle.policy_inputs import missing_rules
from heddle_runtime.virtual_time import run_virtual
from heddle_trace.complete import complete
from heddle_trace.files import read_trace
from heddle_verl.dispatcher import Dispatcher
from heddle_verl.proxy import Lengths, ProxyHandle, prompt_of
from heddle_verl.settings import EngineFacts, prepare_router, read_settings
from heddle_verl.steps import SampleIdentity

ROOT = Path(__file__).resolve().parents[2]


class Engine:
    """A vLLM engine of verl: slots, a queue in order of arrival, iterations of a cost model."""

    def __init__(self, cost, slots):
        self.cost, self.slots = cost, slots
        self.running: dict[str, list] = {}
        """Tokens left, context, and what ends it, by request."""
        self.queue: list[tuple[str, list]] = []
        self.since = 0.0
        self.timer = None
        self.cached: dict[str, int] = {}
        self.generate = SimpleNamespace(remote=self._generate)
        self.abort_request = SimpleNamespace(remote=self._abort)

    async def _generate(self, *, request_id, prompt_ids, sampling_params, **_):
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        limit = sampling_params["max_tokens"]
        new_tokens = len(prompt_ids) - self.cached.get(prompt_ids.of, 0)
        extra = self.cost.prefill_s * max(new_tokens, 0) / self.cost.iteration_s(1, len(prompt_ids))
        self.queue.append((request_id, [limit + extra, len(prompt_ids), over]))
        self._review()
        left = await over
        made = limit if left <= 0 else max(0, min(limit, int(limit - left)))
        self.cached[prompt_ids.of] = len(prompt_ids) + made
        return SimpleNamespace(
            token_ids=range(made),
            log_probs=None,
            routed_experts=None,
            stop_reason="completed" if left <= 0 else "aborted",
            num_preempted=None,
            extra_fields={},
            model_copy=lambda update: SimpleNamespace(**update, stop_reason="completed"),
        )

    async def _abort(self, request_id, reset_prefix_cache=True):
        self._advance()
        entry = self.running.pop(request_id, None)
        if entry is not None:
            entry[2].set_result(max(entry[0], 0.01))
        self._review()
        return {"aborted": entry is not None}

    def _iteration_s(self):
        contexts = sum(entry[1] for entry in self.running.values())
        return self.cost.iteration_s(len(self.running), contexts)

    def _advance(self):
        now = asyncio.get_running_loop().time()
        if self.running:
            made = (now - self.since) / self._iteration_s()
            for entry in self.running.values():
                entry[0] -= made
        self.since = now

    def _review(self):
        self._advance()
        for name, entry in list(self.running.items()):
            if entry[0] <= 1e-6:
                del self.running[name]
                entry[2].set_result(0.0)
        while self.queue and len(self.running) < self.slots:
            name, entry = self.queue.pop(0)
            self.running[name] = entry
        if self.timer is not None:
            self.timer.cancel()
        if self.running:
            left = min(entry[0] for entry in self.running.values())
            delay = max(left, 0.0) * self._iteration_s() + 1e-9
            self.timer = asyncio.get_running_loop().call_later(delay, self._review)


class Ids:
    """Token ids of a trajectory, as far as a client and a router look at them."""

    def __init__(self, of, first, size):
        self.of, self.first, self.size = of, first, size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter((self.first,))


class InLoop:
    """A router's actor in this event loop: `method.remote(...)` is awaited, as of a Ray actor."""

    def __init__(self, router):
        self._router = router

    def __getattr__(self, name):
        method = getattr(self._router, name)

        def remote(*args, **kwargs):
            async def call():
                result = method(*args, **kwargs)
                return await result if asyncio.iscoroutine(result) else result

            return asyncio.ensure_future(call())

        return SimpleNamespace(remote=remote)


class Router:
    """`RouterActor` without Ray, over the same dispatcher."""

    def __init__(self, engines, settings, facts, identities):
        prepared = prepare_router(settings, facts, len(engines))
        self.proxy, self.identities = settings.proxy, identities
        self.dispatcher = Dispatcher(prepared, abort=self._abort if settings.proxy else None)
        self.dispatcher.add_engines(engines)
        self.calls: list = []

    async def _abort(self, handle, request_id):
        return (await handle.abort_request.remote(request_id))["aborted"]

    def require_acquire_fields(self):
        return [] if self.proxy else ["prompt_ids", "sampling_params"]

    def require_release_fields(self):
        return ["request_id"]

    async def acquire_server(self, request_id, prompt_ids=(), sampling_params=None):
        who = self.identities.get(request_id, SampleIdentity())
        if self.proxy:
            return "heddle", ProxyHandle(InLoop(self), request_id, who, Lengths(None, None), False)
        prompt = prompt_of(prompt_ids, {})
        grant = await self.dispatcher.request(request_id, prompt, who).waiter
        return grant.address, grant.handle

    def release_server(self, server_id, request_id=None):
        self.dispatcher.release(server_id, request_id)

    async def begin_step(self, request_id, prompt, identity):
        call = self.dispatcher.request(request_id, prompt, identity)
        self.calls.append(call)
        return len(self.calls) - 1, await call.waiter

    async def dispatch_ended(self, number, dispatch, tokens, aborted):
        call = self.calls[number]
        if self.dispatcher.dispatch_ended(call, dispatch, tokens, aborted=aborted):
            return await call.waiter
        return None


async def rollout(scripts, engines, router, on_end):
    """Run all agents; returns the seconds until the last has ended."""
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="vllm"))
    )
    client = LLMServerClient(config, InLoop(router))
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def agent(script):
        for step in script.steps:
            await client.generate(
                script.id,
                prompt_ids=Ids(script.id, hash(script.group) % 2**31, step.prompt_tokens),
                sampling_params={"max_tokens": step.output_tokens},
            )
            if step.tool is not None:
                await asyncio.sleep(step.tool_s or 0.0)
        on_end(script.id)

    await asyncio.gather(*(agent(script) for script in scripts))
    return loop.time() - started


def measure(scripts, how, options, seed):
    """Makespan under one router."""
    random.seed(seed)
    base = {"model": options.model, "gpu": options.gpu, "history": options.history}
    facts = EngineFacts(tp=options.tp, max_running=options.slots, max_context=32_768)
    plain = prepare_router(read_settings(base), facts, options.engines).setup.context
    cost = plain.cost.by_shape[plain.shape]

    async def run():
        engines = {f"e{i}": Engine(cost, options.slots) for i in range(options.engines)}
        if how == "verl's balancer":
            return await rollout(scripts, engines, GlobalRequestLoadBalancer(engines), lambda _: 0)
        policy, _, rung = how.partition(" ")
        settings = read_settings(
            base
            | {
                "policy": policy,
                "proxy": rung != "0",
                "task": options.task,
                "idle_s": options.idle_s,
                "ends": "announced" if rung == "2" else "unknown",
            }
        )
        known = rung == "2"
        identities = {
            s.id: SampleIdentity(group=s.group, task=s.task, rollout="r") for s in scripts if known
        }
        router = Router(engines, settings, facts, identities)
        if known:
            router.dispatcher.announce("r", len(scripts), 0)
        ended = (lambda name: router.dispatcher.finish([name])) if known else (lambda _: None)
        return await rollout(scripts, engines, router, ended)

    return run_virtual(run())


def main():
    """Print a table: a row for each router, its median over seeds and its spread."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=str(ROOT / "traces" / "coding-512.jsonl.gz"))
    parser.add_argument("--history", default="prior:coding")
    parser.add_argument("--task", default="coding")
    parser.add_argument("--model", default="qwen3-14b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--routers",
        nargs="+",
        default=["verl's balancer", "verl 1", "heddle 0", "heddle 1", "heddle 2"],
        help="verl's balancer, or a policy and a rung: 0, 1 (with a proxy), 2 (with its manager)",
    )
    options = parser.parse_args()
    rules = missing_rules(MissingConfig())
    print(f"{'router':18} {'makespan s':>10}  {'of verl':>7}  min..max")
    reference = None
    for how in options.routers:
        times = []
        for seed in range(options.seeds):
            scripts, _ = complete(read_trace(Path(options.trace)), rules=rules, seed=seed)
            order = list(scripts)
            random.Random(seed).shuffle(order)
            times.append(measure(order, how, options, seed))
        median = statistics.median(times)
        reference = reference or median
        print(
            f"{how:18} {median:10.1f}  {median / reference:7.3f}  "
            f"{min(times):.1f}..{max(times):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
