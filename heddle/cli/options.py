"""Options that verbs share: what to replay, on which cluster, and what to do about gaps."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import rich_click as click

from heddle.cli.engine_options import positive_numbers, tp_degrees

if TYPE_CHECKING:
    from heddle.config import RunConfig
    from heddle.config_files import ConfigSource

Verb: TypeAlias = Callable[..., Any]


class NumberRange(click.FloatRange):
    """Numbers of a range; refuses "nan", which no bound of `click.FloatRange` does."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Numbers(click.ParamType[Any]):
    """Whole numbers of 1 or more, with commas between."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Return the numbers."""
        found = positive_numbers(value)
        if not found:
            self.fail(f"{value} is no list such as 4,8 of whole numbers from 1.", param, ctx)
        return found


TRACES = "TRACE|CONFIG.toml..."
RULES = click.Choice(["error", "zero", "sample"])
TOOL_RULES = (
    "Tool seconds that the trace lacks: error, zero, sample, typical (of the kind of tool), 1.5, "
    "or bash=2,search=1.4 [error]"
)

CLUSTER: Sequence[tuple[str, str, Any, str]] = (
    ("--model", "cluster.model", str, "Model; its profile must exist [qwen3-14b]"),
    ("--gpu", "cluster.gpu", str, "GPU class [h100]"),
    ("--gpus", "cluster.gpus", int, "GPUs in all, those of the engines of --tp [8]"),
    (
        "--pool",
        "cluster.pool",
        str,
        "GPUs of a class, as h800:96 or h20:32:tp=2, in place of --gpu and --gpus; repeat it for "
        "each class",
    ),
    (
        "--tag",
        "policy.tags",
        str,
        "GPU class of a task, as swe=h800, for policies with tags; may be repeated [none]",
    ),
    ("--tp", "cluster.tp", str, "TP degree of every engine, or one for each as 4,2,1,1 [1]"),
    (
        "--expert-parallel",
        "cluster.expert_parallel",
        click.Choice(["auto", "on", "off"]),
        "Spread the experts of a layer over all GPUs of an engine [auto: as the profile]",
    ),
    ("--roles", "cluster.roles", str, "GPUs by role, prefill=2,decode=6 [all engines do both]"),
    (
        "--prefill-threshold",
        "cluster.prefill_threshold",
        int,
        "With --roles: most new tokens that a decode engine prefills [2048]",
    ),
    ("--attention-dp", "cluster.attention_dp", int, "Attention data-parallel ranks [1]"),
    ("--max-running", "cluster.max_running", int, "Steps that an engine runs at once [100]"),
    ("--tool-capacity", "cluster.tool_capacity", int, "Tool calls at once [no limit]"),
    (
        "--tool-pool",
        "cluster.tool_pools",
        str,
        "Pool of a tool, as bash=64 or search=elastic:cold=0.3; may be repeated [--tool-capacity]",
    ),
    (
        "--env-latency",
        "cluster.env_latency",
        str,
        "Seconds added to every tool call: 2, or MEAN,SIGMA as 10,5, normal and cut at 0 [none]",
    ),
    ("--engine-start-s", "cluster.engine_start_s", float, "Start of an engine [profile's, or 60]"),
    ("--standby-tp", "cluster.standby_tp", Numbers(), "TP degrees of engines asleep, 4,8 [none]"),
    (
        "--host-kv",
        "cluster.host_kv",
        click.Choice(["none", "engine", "cluster"]),
        "KV in host memory: for each engine, or one store for all [none]",
    ),
    ("--failures", "cluster.failures", str, "Engines that die, as e0@120,e3@300 [none]"),
    ("--prediction-s", "cluster.prediction_s", float, "Latency of a prediction service [0.1]"),
    (
        "--predictor-model",
        "predictor_model",
        str,
        "Model file of learned predictors, or shipped [shipped]",
    ),
    ("--history", "history", str, "Trace of earlier rollouts, prior, prior:WORKLOAD, none [prior]"),
    (
        "--over-capacity",
        "cluster.over_capacity",
        click.Choice(["error", "drop"]),
        "Trajectories that exceed an engine's KV cache: refuse, or leave out and count [error]",
    ),
    ("--missing-tool-s", "missing.tool_s", str, TOOL_RULES),
    ("--missing-tool-tokens", "missing.tool_tokens", RULES, "Same for tool tokens [error]"),
    ("--missing-prompt-tokens", "missing.prompt_tokens", RULES, "Same for first prompts [error]"),
    (
        "--missing-output-tokens",
        "missing.output_tokens",
        click.Choice(["error", "sample"]),
        "Same for generated tokens [error]",
    ),
    ("--cap-tool-s", "missing.cap_tool_s", float, "Cut longer tool calls to this [as recorded]"),
    ("--price", "prices", str, "Dollars of a GPU and hour, as h100=2.1 [those of `heddle prices`]"),
)
_REPEATED = ("--pool", "--tag", "--tool-pool", "--price")
_KEYS = {flag.lstrip("-").replace("-", "_"): key for flag, key, _, _ in CLUSTER}


PLANNED = (
    "--model",
    "--pool",
    "--expert-parallel",
    "--prefill-threshold",
    "--attention-dp",
    "--max-running",
    "--predictor-model",
    "--history",
    "--price",
)
"""Options of `CLUSTER` that matter to a plan, beside those for values that the trace lacks."""


_NOT_LOOPED = ("--failures", "--max-running", "--pool", "--tag", "--tp")

objective = click.option(
    "--objective",
    type=click.Choice(["makespan", "cost"]),
    default="makespan",
    show_default=True,
    help="What is best: the least time, or the fewest dollars",
)
"""Of verbs that compare or choose."""

executor = click.option(
    "--executor",
    type=click.Choice(["processes", "ray"]),
    default="processes",
    show_default=True,
    help="Runs are processes here, or tasks of a Ray cluster: that of RAY_ADDRESS, else of this "
    "machine",
)
"""Of verbs with many runs."""

launcher = click.option(
    "--launcher",
    type=click.Choice(["local", "ray"]),
    help="Where engines start: here, or on the nodes of a Ray cluster (RAY_ADDRESS) [local]",
)
"""Of verbs that start engines."""


def replayed(verb: Verb, *, but: Sequence[str] = ()) -> Verb:
    """Add the SOURCES argument and the options of `CLUSTER`, `--set` and `--out` to a verb."""
    return _taking(_with_out(verb), [flag for flag, *_ in CLUSTER if flag not in but])


def _with_out(verb: Verb) -> Verb:
    return click.option(
        "--out",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="Folder for run directories",
    )(verb)


SERVED = (
    "--model",
    "--gpu",
    "--max-running",
    "--engine-start-s",
    "--host-kv",
    "--failures",
    "--prediction-s",
    "--predictor-model",
    "--history",
    "--price",
)
"""Options of `CLUSTER` that matter to a gateway."""


def served(verb: Verb) -> Verb:
    """Add TOML files, the options that matter to a gateway, `--set` and `--out` to a verb."""
    return _taking(_with_out(verb), SERVED, "[CONFIG.toml]...")


def planned(verb: Verb, *, also: Sequence[str] = (), metavar: str = TRACES) -> Verb:
    """Add the SOURCES argument, the options that matter to a plan, and `--set` to a verb.

    Not `--gpu` and `--gpus`, of which a plan takes several.
    """
    gaps = [flag for flag, key, *_ in CLUSTER if key.startswith("missing.")]
    return _taking(verb, [*PLANNED, *gaps, *also], metavar)


def looped(verb: Verb) -> Verb:
    """Add the SOURCES argument, `--set` and most options of `CLUSTER` to a verb."""
    return _taking(verb, [flag for flag, *_ in CLUSTER if flag not in _NOT_LOOPED])


def _taking(verb: Verb, flags: Sequence[str], metavar: str = TRACES) -> Verb:
    verb = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any key of the configuration, such as cluster.report_interval_s=1",
    )(verb)
    for flag, _, kind, text in reversed(CLUSTER):
        if flag in flags:
            many = flag in _REPEATED
            verb = click.option(flag, type=kind, default=None, multiple=many, help=text)(verb)
    needed = not metavar.startswith("[")
    return click.argument("sources", nargs=-1, required=needed, metavar=metavar)(verb)


def price(text: str) -> "ConfigSource":
    """Read one `--price`: CLASS=DOLLARS.

    Raises:
        ConfigError: it is something else.
    """
    from heddle.config_files import ConfigError, ConfigSource

    gpu, _, dollars = (part.strip() for part in text.rpartition("="))
    try:
        if gpu and "=" not in gpu:
            return ConfigSource(f"--price {text}", {"prices": {gpu: float(dollars)}})
    except ValueError:
        pass
    raise ConfigError(
        f"--price {text}: write GPU class and dollars of a GPU and hour, such as h100=2.1"
    )


def _pool(text: str) -> dict[str, Any]:
    """Read a `--pool`.

    Raises:
        ConfigError: it is none.
    """
    from heddle.cluster.gpu_pools import read_pool
    from heddle.config_files import ConfigError

    try:
        return read_pool(text)
    except ValueError as error:
        raise ConfigError(f"--pool {error}") from None


def take_config(
    sources: Sequence[str],
    options: dict[str, Any],
    settings: Sequence[str],
    *,
    usual: Mapping[str, Any] = MappingProxyType({}),
    engines: "Sequence[ConfigSource]" = (),
    roles_tried: bool = False,
    **more: Any,
) -> "tuple[RunConfig, str | None]":
    """Make the configuration of a run, and the text of its TOML files if there are any.

    Later wins: defaults, `usual` by configuration key, TOML files from left to right, the trace,
    options, `--set`. `engines` is of `engines_of`. `roles_tried`: roles are chosen later. `more`
    are options by their configuration key with "__" for ".".

    Raises:
        ConfigError: a value does not fit; the message names its source and the remedy.
    """
    from heddle.cluster.config import check_role_settings
    from heddle.config_files import ConfigError, option_value, read_toml, resolve, setting

    tomls = [Path(s) for s in sources if s.endswith(".toml")]
    traces = [s for s in sources if not s.endswith(".toml")]
    if len(traces) > 1:
        raise ConfigError(f"one trace at a time, not {len(traces)}: {', '.join(traces)}")
    values = [option_value(key, value, key) for key, value in usual.items()]
    values += [read_toml(path) for path in tomls]
    values += [option_value("trace", trace, trace) for trace in traces]
    tps = options.get("tp")
    if tps is not None:
        for key, value in tp_degrees(tps).items():
            values.append(option_value(f"cluster.{key}", value, f"--tp {tps}"))
    values += engines
    values += map(price, options.get("price") or ())
    named = {name: value for name, value in options.items() if name not in ("tp", "price")}
    given = {_KEYS[name]: (name, value) for name, value in named.items() if value not in (None, ())}
    given |= {k.replace("__", "."): (k, v) for k, v in more.items() if v is not None}
    for key, (name, value) in given.items():
        flag = "--" + name.rpartition("__")[2].replace("_", "-").replace("preset", "policy")
        listed = " ".join(value) if isinstance(value, tuple) else value
        taken = [_pool(text) for text in value] if key == "cluster.pool" else value
        values.append(option_value(key, taken, f"{flag} {listed}"))
    values += [setting(text) for text in settings]
    text = "\n".join(f"# {p}\n{p.read_text(encoding='utf-8')}" for p in tomls) if tomls else None
    config = resolve(values)
    if options.get("gpu") is not None:
        check_file_is_of(config.cluster.model, config.cluster.gpu)
    if not roles_tried:
        check_role_settings(config.cluster)
    return config, text


def check_file_is_of(model: str, gpu: str) -> None:
    """Refuse `--gpu` beside a profile file of another class, which has the times of its own.

    Raises:
        ConfigError: the classes differ.
    """
    from heddle.config_files import ConfigError
    from heddle_sim.profile_files import load_profile

    if not model.endswith(".json"):
        return
    profile = load_profile(model)
    if profile.gpu.lower() != gpu.lower():
        raise ConfigError(
            f"--gpu {gpu}: {model} is a profile of {profile.gpu}: leave --gpu out, or give a "
            f"profile of {gpu}"
        )
