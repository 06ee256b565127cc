"""The process of one engine. With `client_sampling`, the only code that imports vllm's engine.

It runs vLLM's `LLMEngine` with scheduler and model runner in this process, one iteration at a time.
Orders are executed between two iterations, so that an abort is exact. Outputs are those of the
engine core, before vLLM's front end turns them into outputs of requests.

This file hides differences between the supported releases, which `heddle_runtime.vllm.settings`
names. Only `VllmSteppedEngine` uses internals of vLLM (`engine_core.engine_core.scheduler` and
below).
"""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import connection
from operator import add
from types import FrameType, MappingProxyType
from typing import Any

from heddle_runtime.process import wire
from heddle_runtime.process.child import PART_DIED, group_members, unlink_shared_memory
from heddle_runtime.process.connection import connect
from heddle_runtime.process.fatal_error import fail_on_thread_death, fatal_error
from heddle_runtime.process.loop import serve
from heddle_runtime.process.stepped_engine import Activity, Finish, IterationOutput
from heddle_runtime.process.wire import ClosedError
from heddle_runtime.vllm.checks import read_model
from heddle_runtime.vllm.client_sampling import ClientSampling, refusals
from heddle_runtime.vllm.nixl_connector import nixl_connector, pause_nixl
from heddle_runtime.vllm.settings import (
    CPU_BLOCK_TOKENS,
    CPU_KV_BYTES,
    VllmSettings,
    installed_vllm,
)


class VllmSteppedEngine:
    """vLLM behind our loop; implements `SteppedEngine`."""

    def __init__(self, engine: Any, settings: VllmSettings, eos_ids: list[int]) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreEventType
        from vllm.v1.request import RequestStatus

        self._engine, self._settings, self._eos_ids = engine, settings, eos_ids
        self._core = engine.engine_core
        # Internals: no call returns whether `step` has anything to do, nor the load.
        self._inner = engine.engine_core.engine_core
        self._scheduler = self._inner.scheduler
        self._stuck = False
        """Whether requests wait although nothing runs: exported KV holds the blocks."""
        self._tasks = engine.get_supported_tasks()
        self._tokens_input, self._params = tokens_input, SamplingParams
        self._event, self._status = EngineCoreEventType, RequestStatus
        self._clients = ClientSampling(engine, settings, eos_ids)
        cache = engine.vllm_config.cache_config
        self.block_tokens: int = cache.block_size
        # vLLM reserves one block as the null block.
        self.kv_capacity_tokens: int = (cache.num_gpu_blocks - 1) * cache.block_size
        self.drafted: tuple[int, ...] = ()

    def warm_up(self) -> None:
        """Run a step, and leave none of its KV.

        The first step of an engine with several ranks took seconds longer than others. In the
        middle of a rollout trajectories would wait for it.
        """
        self.add("warm-up", [0] * self.block_tokens, max_tokens=2)
        while self.activity() == "computing":
            for _ in self.step():
                pass
        self._engine.reset_prefix_cache()

    def add(
        self,
        request: str,
        prompt: list[int],
        *,
        max_tokens: int,
        exact: bool = True,
        seed: str = "",
        salt: str = "",
        kv: dict[str, Any] | None = None,
        export: bool = False,
        pin: bool = False,
        known: int = 0,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        transfer = {"do_remote_decode": True} if export else kv
        with refusals():
            if sampling is not None:
                params = self._clients.params(sampling, max_tokens, exact=exact)
            else:
                params = self._params(
                    max_tokens=max_tokens,
                    detokenize=False,
                    extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
                    **({"temperature": 0.0, "ignore_eos": True} if exact else self._sampling(seed)),
                )
            # vLLM's streaming input: another request of the same name continues a pinned one.
            made = self._engine.input_processor.process_inputs(
                request,
                self._tokens_input(prompt[known:], cache_salt=salt or None),
                params,
                self._tasks,
                resumable=pin,
            )
            if sampling is not None:
                self._clients.begin(request, sampling, made)
        self._core.add_request(made)
        self._stuck = False

    def _sampling(self, seed: str) -> dict[str, Any]:
        settings = self._settings
        # Without a tokenizer vLLM does not know where texts end.
        chosen: dict[str, Any] = {
            "temperature": settings.temperature,
            "stop_token_ids": self._eos_ids,
            "logprobs": 0 if settings.logprobs else None,
        }
        if settings.temperature > 0:
            chosen |= {"top_p": settings.top_p, "seed": _number(seed)}
        return chosen

    def abort(self, request: str) -> None:
        self._clients.drop(request)
        self._core.abort_requests([request])

    def step(self) -> Iterator[IterationOutput]:
        made = self._core.get_output()
        outputs, stats = made.outputs, made.scheduler_stats
        if drafts := self._settings.speculative:
            self._count_drafts(outputs, stats, int(drafts["num_speculative_tokens"]))
        self._stuck = bool(self._scheduler.waiting) and not self._scheduler.running
        for output in outputs:
            scheduled_s, preemptions = 0.0, 0
            for event in output.events or ():
                if event.type == self._event.SCHEDULED:
                    scheduled_s = scheduled_s or event.timestamp
                elif event.type == self._event.PREEMPTED:
                    preemptions += 1
            stats = output.prefill_stats
            finish = _FINISHES.get(str(output.finish_reason), "error")
            ended = bool(finish)
            finish, stop_reason, top = self._clients.end(output, finish)
            if finish:
                self._clients.drop(output.request_id)
                if not ended:  # by a stop string, of which the core does not know
                    self._core.abort_requests([output.request_id])
            yield IterationOutput(
                output.request_id,
                output.new_token_ids,
                finish,
                scheduled_s,
                preemptions,
                stats.num_cached_tokens if stats is not None else -1,
                output.kv_transfer_params,
                # The first column is of the sampled token.
                () if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist(),
                top,
                stop_reason,
            )

    def _count_drafts(self, outputs: Sequence[Any], stats: Any, drafts: int) -> None:
        """Count iterations of sequences that decode, those without a draft too, and acceptance.

        vLLM itself counts those with drafts only, and n-grams often find none.
        """
        decoded = sum(bool(o.new_token_ids) and o.prefill_stats is None for o in outputs)
        made = None if stats is None else stats.spec_decoding_stats
        accepted = [0] * drafts if made is None else made.num_accepted_tokens_per_pos
        new = (decoded, *accepted)
        self.drafted = tuple(map(add, self.drafted or (0,) * len(new), new))

    def activity(self) -> Activity:
        scheduler = self._scheduler
        if scheduler.running or scheduler.finished_req_ids or self._inner.batch_queue:
            return "computing"
        if scheduler.waiting and not self._stuck:
            return "computing"
        # What remains: requests that wait for blocks of another engine, and finished requests whose
        # blocks wait for a pull.
        return "waiting" if scheduler.has_requests() else "idle"

    def has_begun(self, request: str) -> bool:
        """Whether a request has left the queue, or its pull has begun."""
        known = self._scheduler.requests.get(request)
        return known is None or known.status != self._status.WAITING

    def release(self, exported: str) -> None:
        """End the lease of an exported request's KV now; vLLM has no call for it."""
        self._engine.collective_rpc(_end_lease, args=(exported,))

    def load_weights(self, path: str, *, keep_kv: bool = False) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if not keep_kv:
            self._engine.reset_prefix_cache()  # only to free blocks: False while a pull is awaited

    def counters(self) -> tuple[int, int, int]:
        """Return requests running and waiting, and tokens of KV in use."""
        running, waiting = self._scheduler.get_request_counts()
        waiting -= self._scheduler.num_waiting_for_streaming_input  # pinned requests are not queued
        used = self._scheduler.kv_cache_manager.usage * self.kv_capacity_tokens
        return running, waiting, round(used)

    def sleep(self, level: int) -> None:
        """Free memory: `level` 1 keeps the weights in main memory, 2 drops them."""
        self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake_up()


_FINISHES: Mapping[str, Finish] = MappingProxyType(
    {"None": "", "length": "length", "stop": "stop", "abort": "abort"}
)
"""By vLLM's word for how a request finished; any other is an error."""


def _number(seed: str) -> int:
    """Return a number for a seed's text, equal in every process."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "little")


def _end_lease(process: Any, exported: str) -> None:
    """Runs in each process of an engine: at its next check the connector finds the lease over."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    leases = get_kv_transfer_group().connector_worker._reqs_to_send
    if leases.pop(exported, None) is not None:
        # To the front: older releases stop at the first lease that is not over.
        others = dict(leases)
        leases.clear()
        leases |= {exported: 0.0, **others}


def build(order: wire.Boot) -> tuple[VllmSteppedEngine, wire.Ready]:
    settings = order.settings
    installed = installed_vllm()
    assert installed is not None, "the launcher checked"
    began_s = time.monotonic()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    imported_s = time.monotonic()
    on_cpu = installed.platform == "cpu"
    wanted: dict[str, Any] = {
        "model": settings.model_dir,
        "dtype": settings.dtype,
        "load_format": settings.load_format,
        # -1: the model's limit, or less if KV space holds less.
        "max_model_len": -1 if settings.max_context is None else settings.max_context,
        "max_num_seqs": order.max_running + settings.spare_slots,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "tensor_parallel_size": order.tp,
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu if settings.eager is None else settings.eager,
        "enable_sleep_mode": settings.sleep_mode,
        "gpu_memory_utilization": settings.gpu_memory_share,
        "skip_tokenizer_init": not settings.tokenizer,
        # A model's sampling defaults would change greedy outputs.
        "generation_config": "vllm",
        "disable_log_stats": False,  # events of the core report queueing and preemptions
        "seed": settings.seed,
    }
    if on_cpu or settings.kv_bytes is not None:
        wanted["kv_cache_memory_bytes"] = settings.kv_bytes or CPU_KV_BYTES
    if on_cpu and settings.temperature > 0:
        wanted |= _whole_prefills(settings)
    if on_cpu or settings.block_tokens is not None:
        wanted["block_size"] = settings.block_tokens or CPU_BLOCK_TOKENS
    if order.tp > 1:
        wanted["distributed_executor_backend"] = "mp"
    if settings.host_kv_gib is not None:
        wanted["kv_offloading_size"] = settings.host_kv_gib * order.tp
    if settings.speculative is not None:
        wanted["speculative_config"] = settings.speculative
    if settings.kv_transfer == "nixl":
        wanted["kv_transfer_config"] = nixl_connector(settings, on_cpu=on_cpu)
        if on_cpu:
            pause_nixl()
    engine = LLMEngine.from_engine_args(EngineArgs(**wanted))
    model = engine.vllm_config.model_config
    core = VllmSteppedEngine(engine, settings, _eos_ids(model))
    if order.tp > 1:
        _watch_tp_processes()
        # Every process has it open by now. It would stay if all were killed at once.
        unlink_shared_memory(group_members(os.getpgrp()))
        core.warm_up()
    one = model.get_total_num_kv_heads() * model.get_head_size() * model.dtype.itemsize
    return core, wire.Ready(
        kv_capacity_tokens=core.kv_capacity_tokens,
        block_tokens=core.block_tokens,
        kv_bytes_per_token=2 * one * model.get_total_num_hidden_layers(),
        max_context=model.max_model_len,
        release=installed.release,
        import_s=imported_s - began_s,
        load_s=time.monotonic() - imported_s,
        dtype=str(model.dtype).removeprefix("torch."),
        device="" if on_cpu else str(current_platform.get_device_name()),
    )


def _whole_prefills(settings: VllmSettings) -> dict[str, Any]:
    """Let no prefill be cut in two: vLLM would rewind the generator of a request with a seed, and
    those of CPUs cannot do that, so that the engine would die.
    """
    longest = settings.max_context
    if longest is None:
        model = read_model(settings.model_dir, weights=False)
        kv_tokens = (settings.kv_bytes or CPU_KV_BYTES) // model.kv_bytes_per_token(settings.dtype)
        longest = min(model.max_context, kv_tokens)
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_batched_tokens, longest),
    }


def _eos_ids(model: Any) -> list[int]:
    config = model.try_get_generation_config()
    eos = config.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def _watch_tp_processes() -> None:
    """End this process as soon as one of its TP processes does.

    vLLM reports it after 10 s: it waits for the others, and they wait for the dead one.
    """
    parts = [part.sentinel for part in multiprocessing.active_children()]

    def watch() -> None:
        connection.wait(parts)
        os._exit(PART_DIED)

    threading.Thread(target=watch, name="heddle-parts", daemon=True).start()


def _use_cores(cores: Sequence[int]) -> None:
    """Pin every thread of this engine, and of its TP processes, to these cores.

    NIXL's connector pins the thread that creates it to the last core of the machine. Here that
    thread runs the model, so all engines would share this core.
    """
    for process in group_members(os.getpgrp()):
        with contextlib.suppress(OSError):  # it has just ended
            for thread in os.listdir(f"/proc/{process}/task"):
                os.sched_setaffinity(int(thread), cores)


def main(arguments: list[str]) -> None:
    """Run an engine; `arguments` holds the descriptor of the socket to the driver."""
    try:
        channel, boot = connect(int(arguments[0]), wire.Order, wire.Boot)
    except ClosedError:
        return
    cores = boot.cores or tuple(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    try:
        with fail_on_thread_death(channel):
            core, ready = build(boot)
        _use_cores(cores)
        channel.send(ready)
        serve(core, channel, boot.settings)
    except ClosedError:
        return
    except Exception as error:
        fatal_error(channel, error)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    main(sys.argv[1:])
    # Not a normal exit: threads of vLLM and NIXL crashed in it. The driver ends the whole process
    # group afterwards.
    os._exit(0)
