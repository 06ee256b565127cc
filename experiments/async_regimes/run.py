"""L: asynchronous and partial rollout over the synchronous step, as their systems report it."""

from collections.abc import Mapping
from typing import Any

from experiments.harness.drawing import ratio_bars
from experiments.harness.experiment import Context, Measured
from experiments.harness.jobs import Computation, Size
from experiments.harness.loops import (
    Lengths,
    Loop,
    by_regime,
    sized,
    step_s,
    verl_async,
    verl_colocated,
    verl_regime,
)
from experiments.harness.values import exactly

SWITCH = "verl-separate-async"
NO_SWITCH = "verl-separate-async:enable_switch=false"
COLOCATE = "verl-colocate-async"
STREAM, STALE = "0", "0.5"
"""Staleness thresholds of verl's fully asynchronous trainer."""
REQUIRE = (1, 2, 4)
V1_LAYOUT = {"train_tp": 2, "train_pp": 2, "train_cp": 2, "train_ep": 8}
"""Of the trainer in verl's V1 runs, two nodes of it at least."""
LENDING = (0, 1, 2, 4)
"""Batches ahead, of BiDiRL's table."""


def _lending(ahead: int, *, lent: bool) -> str:
    # As verl's fully asynchronous Rollouter: 16 prompts at once for each of four engines.
    at_once = "staleness.admits=groups:staleness.max_concurrent=512"
    ends = f"num_warmup_batches={ahead}:parameter_sync_step=1:enable_switch={str(lent).lower()}"
    return f"verl-separate-async:{ends}:{at_once}"


def computations(size: Size, config: Mapping[str, Any]) -> Mapping[str, Computation]:
    """One for each cluster of a source."""
    long, short = Lengths(**config["v1"]), Lengths(**config["nemo"])
    # Its model needs them at any size.
    gpus, groups, layout = 32, sized(size, 64, 16), V1_LAYOUT
    half = gpus // 2
    # 12,053 tokens/s over 22.79 h, 150 steps and answers of 12,720 tokens are 8 samples a prompt.
    v1: dict[str, Any] = {
        "workload": long,
        "model": "qwen3.5-35b-a3b",
        "groups": groups,
        "samples": 8,
        "tps": (4,),
        "gpus": gpus,
        "steps": 12,
        "options": layout,
    }
    big = sized(size, 128, 16)
    laminar: dict[str, Any] = {
        "workload": Lengths(**config["laminar"]),
        "model": "qwen3-8b",
        "gpu": "h800",
        "gpus": sized(size, 64, 16),
        "groups": sized(size, 128, 16),
        # Slots hold so many batches.
        "steps": sized(size, 12, 28),
    }
    pipeline: dict[str, Any] = {
        "model": "qwen3-8b",
        "gpus": big,
        "groups": sized(size, 64, 16),
        "steps": 24,
    }
    sync_step: dict[str, Any] = {"groups": groups // 4, "steps": 24}
    loops = {
        "v1_sync": Loop(regimes=("sync", COLOCATE), colocated=True, **v1),
        "v1_separate": Loop(regimes=(NO_SWITCH,), train_gpus=(half,), **{**v1, **sync_step}),
        "v1_switch": Loop(
            regimes=(NO_SWITCH, SWITCH),
            train_gpus=(half,),
            # Without decoupled PPO engines' log-probabilities are used.
            **{
                **v1,
                **sync_step,
                "gpus": half + gpus // 4,
                "options": {**layout, "logprob_passes": 0},
            },
        ),
        "async_sync": verl_colocated(size, Lengths(**config["verl"])),
        "async": verl_async(size, Lengths(**config["verl"]), (STREAM, STALE)),
        "nemo_sync": Loop(
            regimes=("sync",),
            workload=short,
            model="llama-3.1-8b",
            gpus=16,
            colocated=True,
            groups=128,
            steps=8,
        ),
        "nemo_off": Loop(
            regimes=("one-step-off",),
            workload=short,
            model="llama-3.1-8b",
            gpus=16,
            train_gpus=(8,),
            groups=128,
            steps=8,
        ),
        "tail": Loop(
            regimes=("sync", "april:over_sampling=1.25", "rollpacker"),
            gpus=sized(size, 64, 16),
            groups=sized(size, 128, 16),
            colocated=True,
            steps=12,
        ),
        # Conventional RL has all GPUs in turn.
        "pipeline_sync": Loop(regimes=("sync",), colocated=True, **{**pipeline, "steps": 8}),
        "pipeline": Loop(regimes=("pipelinerl",), train_gpus=(big // 2,), **pipeline),
        "areal_sync": Loop(
            regimes=("sync",), gpus=sized(size, 64, 16), colocated=True, groups=64, steps=8
        ),
        "laminar_sync": Loop(regimes=("sync",), colocated=True, **laminar),
        "laminar": Loop(
            regimes=("one-step-off", "areal", "laminar"),
            train_gpus=(sized(size, 16, 4),),
            **laminar,
        ),
        "lending": Loop(
            regimes=tuple(_lending(n, lent=lent) for n in LENDING for lent in (False, True)),
            workload=Lengths(**config["bidirl"]),
            model="qwen3-8b",
            gpus=16,
            train_gpus=(12,),
            groups=sized(size, 60, 30),
            samples=8,
            steps=sized(size, 24, 12),
            # Its engines stay on the trainer's GPUs, asleep.
            options={"train_backend": "fsdp", "train_padded": True, "switch": "standby"},
        ),
        "areal": Loop(
            regimes=("areal",),
            gpus=sized(size, 64, 16),
            train_gpus=(sized(size, 16, 4),),
            groups=64,
            steps=14,
        ),
    }
    for required in REQUIRE:
        loops[f"require_{required}"] = verl_async(
            size, Lengths(**config["verl"]), (STALE,), batches=16 // required
        )
    return {name: loop.computation for name, loop in loops.items()}


def measure(context: Context) -> Measured:
    """Times of a step, or of as many samples, over those of the first regime."""
    made = computations(context.size, context.config)
    rows = {name: context.store.get(each.key) for name, each in made.items()}
    sync = step_s(rows["v1_sync"], "sync")
    small = step_s(rows["async_sync"], "sync")
    tail = step_s(rows["tail"], "sync")
    tokens = {
        name: row["tokens_per_s"]
        for each in ("laminar_sync", "laminar")
        for name, row in by_regime(rows[each]).items()
    }
    required = {n: step_s(rows[f"require_{n}"], verl_regime(STALE, 16 // n)) / n for n in REQUIRE}
    stream, stale = (4 * step_s(rows["async"], verl_regime(each)) for each in (STREAM, STALE))
    values = {
        "v1_colocate": step_s(rows["v1_sync"], COLOCATE) / sync,
        "v1_separate": 4 * step_s(rows["v1_separate"], NO_SWITCH) / sync,
        "v1_switch": step_s(rows["v1_switch"], SWITCH) / step_s(rows["v1_switch"], NO_SWITCH),
        "verl_stream": stream / small,
        "verl_stale": stale / small,
        "require_2": required[2] / required[1],
        "require_4": required[4] / required[1],
        "nemo_off": step_s(rows["nemo_sync"], "sync") / step_s(rows["nemo_off"], "one-step-off"),
        "april": tail / step_s(rows["tail"], "april:over_sampling=1.25"),
        "rollpacker": tail / step_s(rows["tail"], "rollpacker"),
        "pipelinerl": step_s(rows["pipeline_sync"], "sync")
        / step_s(rows["pipeline"], "pipelinerl"),
        "areal": step_s(rows["areal_sync"], "sync") / step_s(rows["areal"], "areal"),
        "laminar": tokens["laminar"] / tokens["sync"],
        "laminar_one_off": tokens["laminar"] / tokens["one-step-off"],
        "laminar_areal": tokens["laminar"] / tokens["areal"],
    }
    lent = by_regime(rows["lending"])
    for n in LENDING:
        kept, borrowed = (lent[_lending(n, lent=each)]["tokens_per_s"] for each in (False, True))
        values[f"lending_{n}"] = borrowed / kept
    return Measured(values={name: exactly(value) for name, value in values.items()}, data=values)


draw = ratio_bars
