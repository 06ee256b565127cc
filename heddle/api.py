"""`heddle.compare`, `heddle.plan` and `heddle.loop`: the commands as functions.

They take what the commands take, as plain values: a path and the keys of `heddle.toml` without
their section where a command has a flag for them, and any other key in `settings`. Errors have the
messages of the commands. A `RunConfig` stands for a path and its keys.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from heddle.cluster.config import ClusterConfig
from heddle.command_config import Config, plan_settings
from heddle.comparison.compare import compare as compared
from heddle.comparison.result import Comparison
from heddle.comparison.tuning import Choice
from heddle.config import RunConfig
from heddle.config_error import ConfigError, require
from heddle.config_files import ConfigSource, option_value, resolve
from heddle.planning.limits import RolloutLimits
from heddle.raw_logs import log_format
from heddle.search.policies import is_pattern, matching
from heddle.search.tuned import choices

if TYPE_CHECKING:
    from heddle.loops.result import LoopComparison
    from heddle.search.clusters import SearchedClusters

Source: TypeAlias = str | Path | RunConfig
Numbers: TypeAlias = Choice | int
"""``best``, one number, or several."""
BESIDE_CONFIG = "has no effect beside a RunConfig: set it there"
_CLUSTER = {field.name for field in fields(ClusterConfig)}


def compare(
    trace: Source,
    policies: str | Sequence[str] | None = None,
    *,
    tps: Numbers = None,
    slots: Numbers = None,
    seeds: int | None = None,
    out: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Comparison:
    """Compare policies on a trace, as `heddle compare` does.

    Args:
        trace: A path of a trace or of logs, or a `RunConfig`.
        policies: Names or patterns, or one of them; None: all shipped ones, each at its best
            setting.
        tps: TP degrees to try; None: of named policies the cluster's, else all.
        slots: Numbers of running steps of an engine to try, likewise.
        seeds: None: three, of one named policy one.
        out: Folder of the run directories.
        settings: Keys of `heddle.toml`, such as ``{"cluster.report_interval_s": 2}``.
        **keys: Keys of a cluster, such as `model`, `gpu`, `gpus`, `tp`, `max_running`; `history`;
            or arguments of `heddle.comparison.compare.compare`.

    Raises:
        ConfigError: a value that cannot be used.
        ValueError: any other of the packages' errors for bad input.
    """
    names = _names("policies", policies)
    speculation, keys = _speculation(keys)
    given = {key: keys.pop(key) for key in [*keys] if key in _COMPARED}
    config = _config(trace, settings, keys, out)
    raced = names is None or any(map(is_pattern, names))
    tried = _listed(tps), _listed(slots)
    if raced:
        tried = choices(config.cluster, _given(keys, settings), *tried)
    if seeds is None and not raced and len(names or ()) == 1:
        seeds = 1
    return compared(
        config,
        names,
        tps=tried[0],
        slots=tried[1],
        seeds=seeds,
        out=Path(out),
        speculation=speculation,
        **given,
    )


def plan(
    trace: Source,
    policies: str | Sequence[str] | None = None,
    *,
    gpus: int | Sequence[int] | None = None,
    gpu: str | Sequence[str] | None = None,
    regimes: str | Sequence[str] = (),
    deadline_s: float | None = None,
    dollars: float | None = None,
    budget_s: float | None = None,
    jobs: int | None = None,
    out: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
    **keys: Any,
) -> "SearchedClusters":
    """Search what to run, as `heddle plan` does.

    Args:
        trace: A path, or a `RunConfig`.
        policies: To search among; None: all shipped ones.
        gpus: Numbers of GPUs; of several, each is searched.
        gpu: Types of GPUs, likewise.
        regimes: Of an RL loop, as of `loop`, or ``best``; without, a rollout is planned.
        deadline_s: What a rollout may take.
        dollars: What it may cost.
        budget_s: Seconds of the search.
        jobs: Processes; None: as many as pay.
        out: Folder of the trace that is made of logs.
        settings: As of `compare`.
        **keys: As of `compare`; `speculation` may be ``best``.

    Raises:
        ConfigError: a value that cannot be used, or no cluster keeps the limits.
        ValueError: any other of the packages' errors for bad input.
    """
    speculation, keys = _speculation(keys)
    from heddle.loops.splits import loop_choices
    from heddle.search.clusters import search_clusters

    for name, limit in (("deadline_s", deadline_s), ("dollars", dollars)):
        number = limit is None or isinstance(limit, int | float)
        require(number and 0.0 < (limit or 1.0) < math.inf, f"{name}={limit!r}: a number above 0")
    counts = gpus if gpus is None or isinstance(gpus, Sequence) else [gpus]
    whole = all(isinstance(count, int) and count > 0 for count in counts or ())
    require(whole and counts != [], f"gpus={gpus!r}: it is a number of GPUs, or several")
    types = [gpu] if isinstance(gpu, str) else gpu
    if not isinstance(trace, RunConfig):
        keys |= {} if budget_s is None else {"plan.budget_s": budget_s}
        keys |= {"gpus": counts[0]} if counts else {}
        keys |= {"gpu": types[0]} if types else {}
    config = _config(trace, settings, keys, out)
    cluster, chosen = config.cluster, plan_settings(config)
    names = _names("policies", policies)
    require(names is None or len(names) > 0, "policies is empty: leave it out for all shipped ones")
    named = _names("regimes", regimes)
    loop = {} if not named else loop_choices(config, "best" if regimes == "best" else named)
    return search_clusters(
        config,
        policies=None if names is None else matching(names, config),
        gpus=counts or (cluster.gpus,),
        classes=types or (cluster.gpu,),
        limits=RolloutLimits(deadline_s=deadline_s, dollars=dollars),
        objective=chosen.objective,
        framework=chosen.framework,
        **loop,
        budget_s=chosen.budget_s if budget_s is None else budget_s,
        speculation=speculation,
        slots=(cluster.max_running,) if "cluster.max_running" in _given(keys, settings) else None,
        jobs=jobs,
    )


def loop(
    trace: str | Path,
    regimes: str | Sequence[str] = ("sync", "one-step-off", "areal"),
    *,
    policy: str | None = None,
    train_gpus: Numbers = None,
    tps: Numbers = None,
    slots: Numbers = None,
    seeds: int | None = None,
    jobs: int | None = 1,
    out: str | Path = "runs",
    settings: Mapping[str, Any] | None = None,
    **keys: Any,
) -> "LoopComparison":
    """Compare training regimes on a trace, as `heddle loop` does.

    Args:
        trace: A path.
        regimes: Names with parameters, such as ``areal:max_head_offpolicyness=1``, or one.
        policy: Of rollouts.
        train_gpus: GPUs of the trainer, of all `gpus`, to try; None: the configuration's.
        tps: TP degrees to try, likewise.
        slots: Numbers of running steps of an engine to try, likewise.
        seeds: Runs of each regime; None: three.
        jobs: Processes.
        out: Folder of the trace that is made of logs.
        settings: As of `compare`; `[loop]` is here, as ``{"loop.batches": 8}``.
        **keys: As of `compare`.

    Raises:
        ConfigError: a value that cannot be used.
        ValueError: any other of the packages' errors for bad input.
    """
    from heddle.loops.compared import compare_settings
    from heddle.loops.config import loop_of
    from heddle.loops.own_regimes import regime_names

    speculation, keys = _speculation(keys)
    named = {} if policy is None else {"policy.preset": policy}
    config = _config(trace, {**named, **(settings or {})}, keys, out)
    assert isinstance(config, Config)
    made = loop_of(
        config, regime_names(_names("regimes", regimes) or (), config.regimes), seeds=seeds
    )
    given = {"loop.train_gpus": train_gpus, "cluster.tp": tps, "cluster.max_running": slots}
    swept = {key: _listed(value) for key, value in given.items()}
    objective = config.plan.objective or "makespan"
    return compare_settings(made, swept, speculation, objective=objective, jobs=jobs)


_SEVERAL = {"tp": "tps", "max_running": "slots"}
"""Keys of one number, and the arguments for several."""
_COMPARED = ("roles", "jobs", "executor", "workspace", "objective")
"""Arguments of `heddle.comparison.compare.compare` that are passed on."""


def _config(
    trace: Source,
    settings: Mapping[str, Any] | None,
    keys: Mapping[str, Any],
    out: str | Path = "runs",
) -> RunConfig:
    if isinstance(trace, RunConfig):
        for name in [*keys, *(settings or {})]:
            raise ConfigError(f"{name} {BESIDE_CONFIG}")
        return trace
    require(isinstance(trace, str | Path), f"trace must be a path or a RunConfig, not {trace!r}")
    sources: list[ConfigSource] = [option_value("trace", str(trace), "trace")]
    logs = log_format(Path(trace)) is not None
    if logs:
        # The command line is a sixth of the import of a comparison.
        from heddle.cli.logs import USUAL, with_rollout

        sources += [option_value(key, value, key) for key, value in USUAL.items()]
    for name, value in keys.items():
        one = name not in _SEVERAL or (value != "best" and isinstance(value, int | str))
        require(
            one, f"{name}={value!r}: it is one number; {_SEVERAL.get(name)} are several, or best"
        )
        key = f"cluster.{name}" if name in _CLUSTER else name
        sources.append(option_value(key, _plain(value), f"{name}={value!r}"))
    for key, value in (settings or {}).items():
        sources.append(option_value(key, _plain(value), f"settings[{key!r}]"))
    config = resolve(sources)
    return with_rollout(config, [str(trace)], Path(out))[0] if logs else config


def _speculation(keys: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """The settings of speculative decoding to try, and the keys without them."""
    text = keys.get("speculation")
    if not isinstance(text, str) or "best" not in text.split(":")[:2]:
        return None, dict(keys)
    return text, {name: value for name, value in keys.items() if name != "speculation"}


def _given(keys: Mapping[str, Any], settings: Mapping[str, Any] | None) -> set[str]:
    """Keys of `heddle.toml` that a call names."""
    return {f"cluster.{name}" for name in keys} | {*(settings or {})}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _names(argument: str, given: str | Sequence[str] | None) -> Sequence[str] | None:
    """Names, of text with commas between too."""
    names = [n.strip() for n in given.split(",")] if isinstance(given, str) else given
    require(
        names is None or (isinstance(names, Sequence) and all(isinstance(n, str) for n in names)),
        f"{argument} must be a name or a list of names, not {given!r}",
    )
    return names


def _listed(numbers: Numbers) -> Choice:
    return (numbers,) if isinstance(numbers, int) else numbers
