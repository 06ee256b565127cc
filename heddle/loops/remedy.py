"""All that is wrong with a loop that cannot be set up, and settings with which it runs."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from shlex import join
from typing import Any, Final, TypeAlias

from heddle.cluster.profiles import memory_profile
from heddle.config_error import ConfigError
from heddle.loops.comparison import NoRegimeError
from heddle.loops.config import LoopConfig, loop_of
from heddle.loops.layout import PoolError
from heddle.loops.setup import LoopSetup
from heddle.loops.splits import SplitError
from heddle.workload import CapacityError
from heddle_sim.profile_parts import ProfileError
from heddle_sim.training import TrainingError
from heddle_sim.training_memory import MEMORY_GIB
from heddle_trace.errors import GapError

UNFIT: Final = (CapacityError, GapError, NoRegimeError, ProfileError, SplitError, TrainingError)
"""Errors that other GPUs, TP degrees, or rules for gaps may mend."""
_TIMES_GPUS: Final = (1, 2, 4, 8, 16)
_OPTIONS: Final = ("cluster.gpu", "cluster.gpus", "cluster.tp", "regimes")

Keys: TypeAlias = dict[str, Any]
"""Values by key of the configuration, in the order in which errors ask for them."""
Ready: TypeAlias = Callable[[LoopConfig], Sequence[LoopSetup]]
Given: TypeAlias = Callable[[Collection[str]], Sequence[str]]


def with_remedy(
    error: ValueError, loop: LoopConfig, ready: Ready, swept: Collection[str], given: Given
) -> ValueError:
    """The error of a loop with all that would follow it, and commands that `ready` takes.

    First one that keeps all trajectories; where it needs other GPUs, one that leaves long ones out
    on the given GPUs too. Keys in `swept` stay, and so do engines of several types or roles.
    `given` has the words of the command without the options of some keys. The error itself where
    there is no more to say.
    """
    if loop.run.cluster.pool or loop.run.cluster.roles:
        return error
    gaps = dict(error.rules) if isinstance(error, GapError) else {}
    gpu, dropping = loop.run.cluster.gpu.lower(), {**gaps, "cluster.over_capacity": "drop"}
    ways = [_first(loop, ready, _changes(loop, swept, gaps, _TIMES_GPUS, [gpu]))]
    if not ways[0] or "cluster.gpus" in ways[0][0]:
        times = _TIMES_GPUS[: 1 if ways[0] else None]
        ways.append(_first(loop, ready, _changes(loop, swept, dropping, times, [gpu])))
    if not any(ways):
        larger = [name for name, gib in MEMORY_GIB.items() if gib > MEMORY_GIB.get(gpu, 0.0)]
        ways.append(_first(loop, ready, _changes(loop, swept, gaps, _TIMES_GPUS, larger)))
    found = [way for way in ways if way is not None]
    most = [*_changes(loop, swept, gaps, _TIMES_GPUS[-1:], [gpu]), gaps]
    steps = found[0][0] if found else max(most, key=lambda keys: keys.get("cluster.tp", 0))
    said, so_far = _wrong(error), Keys()
    for key, value in steps.items():
        now = gaps if key in gaps else {key: value}
        so_far |= now
        failed = _tried(loop, ready, so_far)
        for text in _wrong(failed, whole=not found) if isinstance(failed, ValueError) else ():
            if not any(each.endswith(text) for each in said):
                said.append(f"then, with {join(_options(now))}, {text}")
    if not found and len(said) == 1:
        return error
    runs = (f"this runs{out}: {join([*given(keys), *_options(keys)])}" for keys, out in found)
    return ConfigError("; ".join([*said, *runs]))


def _changes(
    loop: LoopConfig, swept: Collection[str], keys: Keys, times: Sequence[int], types: Sequence[str]
) -> Iterator[Keys]:
    """Other values of what nobody has fixed, with `keys`, the smallest change first."""
    cluster, train_gpus = loop.run.cluster, loop.run.loop.train_gpus
    trainers = [train_gpus] if "loop.train_gpus" in swept else dict.fromkeys([train_gpus, None])
    for gpu, n, train in product(types, times, trainers):
        own = {} if gpu == cluster.gpu.lower() else {"cluster.gpu": gpu}
        try:
            degrees = memory_profile(replace(cluster, gpu=gpu)).tps
        except ValueError:
            continue
        others = sorted(
            {*degrees} - {cluster.tp}, key=lambda tp: (tp < cluster.tp, abs(tp - cluster.tp))
        )
        for tp in [cluster.tp, *(() if "cluster.tp" in swept else others)]:
            of_tp = {} if tp == cluster.tp else {"cluster.tp": tp}
            of_trainer = {} if train == train_gpus else {"loop.train_gpus": None}
            of_gpus = {} if n == 1 else {"cluster.gpus": n * cluster.gpus}
            yield keys | own | of_tp | of_trainer | of_gpus


def _first(loop: LoopConfig, ready: Ready, changes: Iterator[Keys]) -> tuple[Keys, str] | None:
    """The first changes that work, and what they leave out: half of all at most, if possible."""
    failed: dict[str, str] = {}
    poor: tuple[Keys, str] | None = None
    for keys in changes:
        beside = str(keys | {"cluster.gpus": 0})
        if failed.get(beside) == "":
            continue
        made = _tried(loop, ready, keys)
        if isinstance(made, PoolError) and len(loop.regimes) == 1:
            own = re.sub(":pool_gpus=[^:]*", "", loop.regimes[0])
            keys["regimes"] = f"{own}:pool_gpus={made.pool_gpus}"
            made = _tried(loop, ready, keys)
        if not isinstance(made, ValueError):
            if "loop.train_gpus" in keys:
                keys["loop.train_gpus"] = made[0].requested.train_gpus
            work = made[0].run.workload
            left, of = len(work.dropped), len(work.dropped) + work.trajectories
            way = (keys, f" and leaves out {left:,} of {of:,} trajectories" if left else "")
            if 2 * left <= of:
                return way
            poor = poor or way
            continue
        why = _wrong(made)[0]
        # What more GPUs have not changed, still more do not.
        failed[beside] = "" if failed.get(beside) == why else why
    return poor


def _tried(loop: LoopConfig, ready: Ready, keys: Keys) -> Sequence[LoopSetup] | ValueError:
    run = loop.run
    try:
        for section in {key.partition(".")[0] for key in keys if "." in key}:
            own = {k.partition(".")[2]: v for k, v in keys.items() if k.startswith(f"{section}.")}
            run = replace(run, **{section: replace(getattr(run, section), **own)})
        named = [keys["regimes"]] if "regimes" in keys else loop.regimes
        return ready(loop_of(run, named, seeds=loop.seeds))
    except ValueError as error:
        return error


def _wrong(error: ValueError, *, whole: bool = False) -> list[str]:
    """What it says of each regime; if not `whole`, without a remedy, which is after a semicolon."""
    failed = error.failed if isinstance(error, NoRegimeError) else [error]
    return list(dict.fromkeys(str(e) if whole else str(e).partition("; ")[0] for e in failed))


def _options(keys: Keys) -> list[str]:
    """Words of a command line."""
    words = (
        [f"--{k.rpartition('.')[2]}", f"{v}"] if k in _OPTIONS else ["--set", f"{k}={v}"]
        for k, v in keys.items()
    )
    return [word for each in words for word in each]
