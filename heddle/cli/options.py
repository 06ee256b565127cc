"""Options that verbs share: what to replay, on which cluster, and what to do about gaps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import rich_click as click
from click.types import FuncParamType

from heddle.cli.engine_options import engines_of, positive_numbers, tp_degrees
from heddle.config_error import ConfigError

if TYPE_CHECKING:
    from heddle.command_config import Config
    from heddle.config_files import ConfigSource

Verb: TypeAlias = Callable[..., Any]
T = TypeVar("T")


def read_as(name: str, read: Callable[[str], T]) -> FuncParamType[str, T]:
    """The type of an option that `read` reads; it says in a ValueError what it cannot read."""
    kind = FuncParamType(read)
    kind.name = name
    return kind


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a whole number nor auto.") from None


def _numbers(text: str) -> list[int]:
    found = positive_numbers(text)
    if not found:
        raise ValueError(f"{text} is no list such as 4,8 of whole numbers from 1.")
    return found


NUMBERS = read_as("numbers", _numbers)
"""Whole numbers of 1 or more, with commas between."""
TRACE = "[TRACE|LOGS...]"
CONFIG_FILE = "heddle.toml"
"""Read from the working folder where no --config is given."""
TOOL_RULES = (
    "Tool seconds that the trace lacks: error, zero, sample, typical (of the kind of tool), 1.5, "
    "or bash=2,search=1.4 [error]"
)

CLUSTER: Sequence[tuple[str, str, Any, str]] = (
    ("--model", "cluster.model", str, "Model; its profile must exist [qwen3-14b]"),
    ("--gpu", "cluster.gpu", str, "GPU type [h100]"),
    ("--gpus", "cluster.gpus", int, "GPUs in all, those of the engines of --tp [8]"),
    ("--tp", "cluster.tp", str, "TP degree of every engine; best tries all [1]"),
    (
        "--max-running",
        "cluster.max_running",
        read_as("number", _number_or_auto),
        "Steps that an engine runs at once; auto: as many as KV allows [100]",
    ),
    (
        "--speculation",
        "cluster.speculation",
        str,
        "off, best, or METHOD:DRAFTS[:ACCEPTANCE], as mtp:3:0.886/0.770/0.663 [off]",
    ),
    ("--history", "history", str, "Trace of earlier rollouts, prior, prior:WORKLOAD, none [prior]"),
    (
        "--over-capacity",
        "cluster.over_capacity",
        click.Choice(["error", "drop"]),
        "Trajectories that exceed an engine's KV cache: refuse, or leave out and count [error]",
    ),
    ("--missing-tool-s", "missing.tool_s", str, TOOL_RULES),
)
"""Options of a cluster and a trace; every other key is in a TOML file or given by --set."""
_KEYS = {flag.lstrip("-").replace("-", "_"): key for flag, key, _, _ in CLUSTER}


config_files = click.option(
    "-c",
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help=f"TOML file of keys; may be repeated, later ones win [{CONFIG_FILE} if it is there]",
)
"""Of verbs that read the configuration."""

settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any key of the configuration, such as cluster.report_interval_s=1",
)
"""Of verbs with keys."""


out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder for run directories",
)


def _options(
    flags: Sequence[str], *, sources: bool = True, out: bool = False
) -> Callable[[Verb], Verb]:
    """Return what adds SOURCES, `--config`, these options of `CLUSTER`, `--set` and `--out`."""

    def add(verb: Verb) -> Verb:
        verb = settings_option(out_option(verb) if out else verb)
        for flag, _, kind, text in reversed(CLUSTER):
            if flag in flags:
                verb = click.option(flag, type=kind, default=None, help=text)(verb)
        verb = config_files(verb)
        return click.argument("sources", nargs=-1, metavar=TRACE)(verb) if sources else verb

    return add


_EVERY = [flag for flag, *_ in CLUSTER]
replayed = _options(_EVERY, out=True)
_NOT_OF_ENGINES = (
    *("--gpus", "--tp", "--speculation"),
    *("--history", "--over-capacity", "--missing-tool-s"),
)
_ON_ENGINES = [flag for flag in _EVERY if flag not in _NOT_OF_ENGINES]
run_on_engines = _options(_ON_ENGINES, out=True)
looped = _options([flag for flag in _EVERY if flag != "--over-capacity"])
planned = _options([flag for flag in _EVERY if flag not in ("--tp", "--over-capacity")])
served = _options(("--model", "--gpu", "--max-running"), sources=False, out=True)
"""Options of the verbs that replay a trace, and of those that plan, or serve agents."""


def take_config(
    sources: Sequence[str],
    options: dict[str, Any],
    settings: Sequence[str],
    *,
    usual: Mapping[str, Any] = MappingProxyType({}),
    logs: bool = False,
    engines: tuple[int | None, str | None] = (None, None),
    roles_tried: bool = False,
    **more: Any,
) -> "tuple[Config, str | None]":
    """Make the configuration of a run, and the text of its TOML files if there are any.

    Later wins: defaults, `usual` by configuration key, TOML files from left to right, the trace,
    options, `--set`. `logs`: sources may be logs, whose first one is named in place of a trace.
    `engines` are `--engines` and `--tp` of verbs that start engines.
    `roles_tried`: roles are chosen later. `more` are options by their configuration key with "__"
    for ".".

    Raises:
        ConfigError: a value does not fit; the message names its source and the remedy.
    """
    from heddle.cluster.config import check_role_settings
    from heddle.config_files import option_value, read_toml, resolve, setting

    tomls = _config_files(options.pop("configs"))
    values = [option_value(key, value, key) for key, value in usual.items()]
    values += [read_toml(path) for path in tomls]
    values += _trace(sources[:1] if logs else sources)
    set_by_key = [setting(text) for text in settings]
    tps = options.get("tp")
    if tps is not None:
        for key, value in tp_degrees(tps).items():
            values.append(option_value(f"cluster.{key}", value, f"--tp {tps}"))
    pools = any(_has_pools(source) for source in (*values, *set_by_key))
    values += engines_of(*engines, pools=pools)
    named = {name: value for name, value in options.items() if name != "tp"}
    given = {_KEYS[name]: (name, value) for name, value in named.items() if value is not None}
    given |= {k.replace("__", "."): (k, v) for k, v in more.items() if v is not None}
    for key, (name, value) in given.items():
        flag = "--" + name.rpartition("__")[2].replace("_", "-").replace("preset", "policy")
        values.append(option_value(key, value, f"{flag} {value}"))
    text = "\n".join(f"# {p}\n{p.read_text(encoding='utf-8')}" for p in tomls) if tomls else None
    config = resolve([*values, *set_by_key])
    drafts = config.cluster.drafts()
    if drafts is not None and drafts.rises:
        click.echo(
            f"Warning: acceptance rises in {drafts}: the chance that the first drafts are all "
            "accepted cannot grow with their number; give it by position, cumulated",
            err=True,
        )
    if options.get("gpu") is not None:
        check_file_is_of(config.cluster.model, config.cluster.gpu)
    if not roles_tried:
        check_role_settings(config.cluster)
    return config, text


def take_replayed(
    sources: Sequence[str], options: dict[str, Any], settings: Sequence[str], **more: Any
) -> "tuple[Config, str | None]":
    """Make the configuration as `take_config` does, of a trace or of logs in its place."""
    from heddle.cli.logs import USUAL, are_logs

    logs = are_logs(sources)
    return take_config(sources, options, settings, usual=USUAL if logs else {}, logs=logs, **more)


def given_keys(options: Mapping[str, Any], settings: Sequence[str]) -> set[str]:
    """Keys that options, `--set` and TOML files set, and not a default.

    Raises:
        ConfigError: a file or a setting cannot be read.
    """
    from heddle.config_files import read_toml, setting

    sources = [*map(read_toml, _config_files(options["configs"])), *map(setting, settings)]
    found = {_KEYS[name] for name, v in options.items() if name in _KEYS and v is not None}
    for source in sources:
        for section, values in source.values.items():
            keys = values if isinstance(values, Mapping) else {}
            found |= {section, *(f"{section}.{key}" for key in keys)}
    return found


def take_settings(settings: Sequence[str], configs: Sequence[Path] = (), **given: Any) -> "Config":
    """Read keys of a command that replays no trace; `given` are options by their
    key with "__" for ".".

    Raises:
        ConfigError: a value does not fit.
    """
    from heddle.config_files import option_value, read_toml, resolve, setting

    values = [option_value("trace", "(none)", "trace"), *map(read_toml, _config_files(configs))]
    given = {key.replace("__", "."): value for key, value in given.items() if value is not None}
    values += [option_value(key, value, key) for key, value in given.items()]
    return resolve([*values, *map(setting, settings)])


def _config_files(named: Sequence[Path]) -> list[Path]:
    here = Path(CONFIG_FILE)
    return list(named) if named or not here.is_file() else [here]


def _trace(sources: Sequence[str]) -> "list[ConfigSource]":
    from heddle.config_files import option_value

    for source in sources:
        if source.endswith(".toml"):
            raise ConfigError(f"{source}: give a TOML file as -c {source}")
    if len(sources) > 1:
        raise ConfigError(f"one trace at a time, not {len(sources)}: {', '.join(sources)}")
    return [option_value("trace", trace, trace) for trace in sources]


def _has_pools(source: "ConfigSource") -> bool:
    cluster = source.values.get("cluster")
    return isinstance(cluster, Mapping) and bool(cluster.get("pool"))


def check_file_is_of(model: str, gpu: str) -> None:
    """Refuse `--gpu` beside a profile file of another class, which has the times of its own.

    Raises:
        ConfigError: the classes differ.
    """
    from heddle_sim.profile_files import load_profile

    if not model.endswith(".json"):
        return
    profile = load_profile(model)
    if profile.gpu.lower() != gpu.lower():
        raise ConfigError(
            f"--gpu {gpu}: {model} is a profile of {profile.gpu}: leave --gpu out, or give a "
            f"profile of {gpu}"
        )
