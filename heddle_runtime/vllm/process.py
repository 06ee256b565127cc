"""One engine: a process with vLLM in it. The one file that imports vllm.

It runs vLLM's `LLMEngine` with scheduler and model runner in this very process, and steps it by
hand: orders are carried out between two iterations, so that an abort is exact, and outputs are read
as the engine core makes them, before vLLM's front end turns them into requests' outputs.

What differs between the supported releases is hidden here; `heddle_runtime.vllm.settings` names
them. What vLLM does not promise to keep (`engine_core.engine_core.scheduler` and below) is used in
`VllmCore` only, and each use says for what.
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
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from heddle_runtime.process import wire
from heddle_runtime.process.child import PART_DIED, group_members
from heddle_runtime.process.engine_core import Activity, Finish, Output
from heddle_runtime.process.fatal_error import give_up, threads_matter
from heddle_runtime.process.loop import connect, serve
from heddle_runtime.process.wire import ClosedError
from heddle_runtime.vllm.settings import (
    CPU_BLOCK_TOKENS,
    CPU_KV_BYTES,
    VllmSettings,
    installed_vllm,
)

NIXL_PAUSE_US = 500
"""Adds so much to a pull at most; without a pause, decoding was seen at half its speed."""


class VllmCore:
    """vLLM, stepped by hand; implements `stepped_core.Core`."""

    def __init__(self, engine: Any, settings: VllmSettings, eos_ids: list[int]) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreEventType
        from vllm.v1.request import RequestStatus

        self._engine, self._settings, self._eos_ids = engine, settings, eos_ids
        self._core = engine.engine_core
        # Read for what no call tells: whether anything is left to step for, and how much is there.
        self._inner = engine.engine_core.engine_core
        self._scheduler = self._inner.scheduler
        self._stuck = False
        """Whether requests wait although nothing runs: their room is on loan to other engines."""
        self._tasks = engine.get_supported_tasks()
        self._tokens_input, self._params = tokens_input, SamplingParams
        self._event, self._status = EngineCoreEventType, RequestStatus
        cache = engine.vllm_config.cache_config
        self.block_tokens: int = cache.block_size
        # One block is vLLM's own, as a place for nothing.
        self.kv_capacity_tokens: int = (cache.num_gpu_blocks - 1) * cache.block_size

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
    ) -> None:
        """Take a request; see `Core.add`."""
        transfer = {"do_remote_decode": True} if export else kv
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
        self._core.add_request(made)
        self._stuck = False

    def _sampling(self, seed: str) -> dict[str, Any]:
        settings = self._settings
        # Without a tokenizer vLLM does not know where texts end.
        chosen: dict[str, Any] = {
            "temperature": settings.temperature,
            "stop_token_ids": self._eos_ids,
        }
        if settings.temperature > 0:
            chosen |= {"top_p": settings.top_p, "seed": _number(seed)}
        return chosen

    def abort(self, request: str) -> None:
        """Drop a request; see `Core.abort`."""
        self._core.abort_requests([request])

    def step(self) -> Iterator[Output]:
        """Run one iteration."""
        outputs = self._core.get_output().outputs
        self._stuck = bool(self._scheduler.waiting) and not self._scheduler.running
        for output in outputs:
            scheduled_s, preemptions = 0.0, 0
            for event in output.events or ():
                if event.type == self._event.SCHEDULED:
                    scheduled_s = scheduled_s or event.timestamp
                elif event.type == self._event.PREEMPTED:
                    preemptions += 1
            stats = output.prefill_stats
            yield Output(
                output.request_id,
                output.new_token_ids,
                _FINISHES.get(str(output.finish_reason), "error"),
                scheduled_s,
                preemptions,
                stats.num_cached_tokens if stats is not None else -1,
                output.kv_transfer_params,
            )

    def activity(self) -> Activity:
        """Whether there is anything to step for."""
        scheduler = self._scheduler
        if scheduler.running or scheduler.finished_req_ids or self._inner.batch_queue:
            return "computing"
        if scheduler.waiting and not self._stuck:
            return "computing"
        # Left are requests that wait for blocks of another engine, and finished ones whose own
        # blocks wait to be pulled.
        return "waiting" if scheduler.has_requests() else "idle"

    def has_begun(self, request: str) -> bool:
        """Whether a request has left the queue, or its pull has begun."""
        known = self._scheduler.requests.get(request)
        return known is None or known.status != self._status.WAITING

    def release(self, exported: str) -> None:
        """Let the lease of an exported request's KV end now; vLLM has no call for it."""
        self._engine.collective_rpc(_end_lease, args=(exported,))

    def load_weights(self, path: str) -> None:
        """Replace the weights."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self._engine.reset_prefix_cache()  # only to make room: False while blocks are on loan

    def counters(self) -> tuple[int, int, int]:
        """Return requests running and waiting, and tokens of KV in use."""
        running, waiting = self._scheduler.get_request_counts()
        waiting -= self._scheduler.num_waiting_for_streaming_input  # pinned ones wait for nothing
        used = self._scheduler.kv_cache_manager.usage * self.kv_capacity_tokens
        return running, waiting, round(used)

    def sleep(self, level: int) -> None:
        """Give memory back: `level` 1 keeps the weights in main memory, 2 drops them."""
        self._engine.sleep(level)

    def wake(self) -> None:
        """Take it again."""
        self._engine.wake_up()


_FINISHES: Mapping[str, Finish] = MappingProxyType(
    {"None": "", "length": "length", "stop": "stop", "abort": "abort"}
)
"""By vLLM's word for how a request finished; any other is an error."""


def _number(seed: str) -> int:
    """Make a number of a seed's text; equal in every process."""
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:6], "little")


def _end_lease(process: Any, exported: str) -> None:
    """Run in each process of an engine: the connector finds the lease over at its next look."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    leases = get_kv_transfer_group().connector_worker._reqs_to_send
    if leases.pop(exported, None) is not None:
        # To the front: older releases look no further than the first that is not over.
        others = dict(leases)
        leases.clear()
        leases |= {exported: 0.0, **others}


def build(order: wire.Boot) -> tuple[VllmCore, wire.Ready]:
    """Make the engine that was asked for."""
    settings = order.settings
    installed = installed_vllm()
    assert installed is not None, "the launcher looked"
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
        # -1: what the model was made for, or less if KV space holds less.
        "max_model_len": -1 if settings.max_context is None else settings.max_context,
        "max_num_seqs": order.max_running + settings.spare_slots,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "tensor_parallel_size": order.tp,
        "enable_prefix_caching": True,
        "enforce_eager": on_cpu if settings.eager is None else settings.eager,
        "enable_sleep_mode": settings.sleep_mode,
        "gpu_memory_utilization": settings.gpu_memory_share,
        "skip_tokenizer_init": True,
        # A model's own sampling defaults would make greedy outputs something else.
        "generation_config": "vllm",
        "disable_log_stats": False,  # the core's events tell queueing and preemptions
        "seed": settings.seed,
    }
    if on_cpu or settings.kv_bytes is not None:
        wanted["kv_cache_memory_bytes"] = settings.kv_bytes or CPU_KV_BYTES
    if on_cpu or settings.block_tokens is not None:
        wanted["block_size"] = settings.block_tokens or CPU_BLOCK_TOKENS
    if order.tp > 1:
        wanted["distributed_executor_backend"] = "mp"
    if settings.kv_transfer == "nixl":
        wanted["kv_transfer_config"] = _nixl(settings, on_cpu=on_cpu)
        if on_cpu:
            _calm_nixl()
    engine = LLMEngine.from_engine_args(EngineArgs(**wanted))
    model = engine.vllm_config.model_config
    core = VllmCore(engine, settings, _eos_ids(model))
    if order.tp > 1:
        _watch_parts()
        _unname_shared_memory()
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


def _nixl(settings: VllmSettings, *, on_cpu: bool) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_both",
        kv_buffer_device="cpu" if on_cpu else "cuda",
        # The other policy, recompute, was seen to hang when the source is dead.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={"kv_lease_duration": settings.kv_lease_s},
    )


def _calm_nixl() -> None:
    """Let NIXL's progress thread pause between two looks: it would keep a core of its own busy.

    Its Python face does not let one choose; on a machine with cores to spare it does not matter.
    """
    from nixl import _api

    make = _api.nixlBind.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_PAUSE_US
        return make(name, config)

    _api.nixlBind.nixlAgent = agent


def _eos_ids(model: Any) -> list[int]:
    config = model.try_get_generation_config()
    eos = config.get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)


def _watch_parts() -> None:
    """End this process as soon as one of its TP processes does.

    vLLM tells it only after it has waited for the others, which wait for the dead one: 10 s.
    """
    parts = [part.sentinel for part in multiprocessing.active_children()]

    def watch() -> None:
        connection.wait(parts)
        os._exit(PART_DIED)

    threading.Thread(target=watch, name="heddle-parts", daemon=True).start()


def _unname_shared_memory() -> None:
    """Take the names from the shared memory of vLLM's CPU collectives, which all have open by now.

    Nobody else removes it when the processes are killed.
    """
    for process in group_members(os.getpgrp()):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                name = line.partition("/dev/shm/")[2]
                if name.startswith("vllm_"):
                    Path("/dev/shm", name).unlink(missing_ok=True)


def _use_cores(cores: Sequence[int]) -> None:
    """Put every thread of this engine on these cores, those of its TP processes included.

    NIXL's connector puts whatever thread sets it up on the last core of the machine, to keep
    another one free for the model; that thread runs the model here, and every engine's would be on
    that one core.
    """
    for process in group_members(os.getpgrp()):
        with contextlib.suppress(OSError):  # it has just ended
            for thread in os.listdir(f"/proc/{process}/task"):
                os.sched_setaffinity(int(thread), cores)


def main(arguments: list[str]) -> None:
    """Become an engine; `arguments` are the descriptor of the socket to the driver."""
    try:
        channel, boot = connect(int(arguments[0]))
    except ClosedError:
        return
    cores = boot.cores or tuple(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores)
    try:
        with threads_matter(channel):
            core, ready = build(boot)
        _use_cores(cores)
        channel.send(ready)
        serve(core, channel, boot.settings)
    except ClosedError:
        return
    except Exception as error:
        give_up(channel, error)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    main(sys.argv[1:])
    # Not by the usual way out: vLLM's and NIXL's threads have been seen to crash in it. Whoever
    # started this process ends the whole process group once it is gone.
    os._exit(0)
