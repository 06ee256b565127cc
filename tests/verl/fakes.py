"""Engines of verl that keep time and make tokens by rule, as Ray actors; and clients of them."""

import asyncio
import time
from types import SimpleNamespace

import ray
from pydantic import BaseModel

VOCABULARY = 50_021
MULTIPLIER = 48_271


def fold(ids, state=1):
    for token in ids:
        state = (state * MULTIPLIER + token + 1) % 2_147_483_647
    return state


def continuation(prompt_ids, tokens):
    """The tokens that follow a prompt: each is a function of all before it."""
    state, made = fold(prompt_ids), []
    for _ in range(tokens):
        made.append(state % VOCABULARY)
        state = fold(made[-1:], state)
    return made


class TokenOutput(BaseModel):
    """verl's class with this name has these fields; to import it takes seconds in each actor."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: object = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict = {}


class Config(dict):
    """What an engine reports: fields of verl's `RolloutConfig`."""


class FakeEngine:
    """`max_num_seqs` steps at once, `token_s` for a token; the rest wait in order of arrival."""

    def __init__(self, name, *, slots=4, token_s=0.001, by_priority=False, reports=True):
        self.name, self.token_s, self.reports = name, token_s, reports
        self.slots = asyncio.Semaphore(slots)
        self.config = Config(
            tensor_model_parallel_size=1,
            max_num_seqs=slots,
            max_model_len=32_768,
            prompt_length=4096,
            response_length=2048,
            scheduling_policy="priority" if by_priority else "fcfs",
        )
        self.aborts: dict[str, asyncio.Event] = {}
        self.calls: list[dict] = []
        self.resets = 0
        self.open = asyncio.Event()
        self.open.set()
        self.rejects = False
        self.running = self.most = 0

    async def get_rollout_config(self):
        return self.config

    async def generate(
        self,
        prompt_ids,
        sampling_params,
        request_id,
        image_data=None,
        video_data=None,
        audio_data=None,
        mm_processor_kwargs=None,
        priority=0,
        kv_transfer_params=None,
    ):
        if not self.open.is_set() and self.rejects:
            return self._output([], "aborted")
        await self.open.wait()
        abort = self.aborts[request_id] = asyncio.Event()
        call = {
            "request_id": request_id,
            "prompt": len(prompt_ids),
            "priority": priority,
            "arrived": time.monotonic(),
        }
        self.calls.append(call)
        limit = sampling_params.get("max_tokens")
        if limit is None:
            limit = min(2048, 4096 + 2048 - len(prompt_ids))
        try:
            async with self.slots:
                self.running += 1
                self.most = max(self.most, self.running)
                began = time.monotonic()
                try:
                    await asyncio.wait_for(abort.wait(), limit * self.token_s)
                    made = min(limit, int((time.monotonic() - began) / self.token_s))
                except TimeoutError:
                    made = limit
                self.running -= 1
        finally:
            del self.aborts[request_id]
        call["tokens"], call["ended"] = made, time.monotonic()
        ids = continuation(prompt_ids, made)
        return self._output(ids, "completed" if made == limit else "aborted")

    def _output(self, ids, reason):
        return TokenOutput(
            token_ids=ids,
            log_probs=[-token / VOCABULARY for token in ids],
            stop_reason=reason,
            extra_fields={"global_steps": 1, "num_cached_tokens": 0},
        )

    async def abort_request(self, request_id, reset_prefix_cache=True):
        self.resets += reset_prefix_cache
        found = self.aborts.get(request_id)
        if found is None:
            return {"aborted": False, "error": "not found"}
        found.set()
        return {"aborted": True, "request_id": request_id}

    async def abort_all_requests(self, reject_request=False):
        self.open.clear()
        self.rejects = reject_request
        for abort in self.aborts.values():
            abort.set()

    async def resume_generation(self):
        self.rejects = False
        self.open.set()

    async def report(self):
        return {"calls": self.calls, "resets": self.resets, "most": self.most}

    async def fail(self):
        import os

        os._exit(1)


RemoteEngine = ray.remote(num_cpus=0, max_concurrency=10_000)(FakeEngine)


def engines(count, **options):
    return {f"10.0.0.{i}:8000": RemoteEngine.remote(f"s{i}", **options) for i in range(count)}


def client_config(**rollout):
    """As much of verl's configuration as its clients read."""
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(
                name="vllm", full_determinism=False, response_length=2048, **rollout
            )
        )
    )


async def run_steps(client, request_id, prompt, lengths, *, tool_s=0.0, observed=8):
    """A trajectory of so many steps, its context growing; returns all tokens that it was sent."""
    context, outputs = list(prompt), []
    for length in lengths:
        output = await client.generate(
            request_id, prompt_ids=context, sampling_params={"max_tokens": length}
        )
        outputs.append(output)
        context += [*output.token_ids, *range(observed)]
        if tool_s:
            await asyncio.sleep(tool_s)
    return outputs
