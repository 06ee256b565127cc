"""The configuration of a run: small frozen values, one docstring per field.

This module reads no file and imports no policy; `heddle.config_files` makes these values from TOML
and options. Each part of a run receives only the value that it needs, never a `RunConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from heddle.bounds import check_bounds
from heddle.cluster.config import ClusterConfig
from heddle.cluster.gpu_pools import read_tags
from heddle.config_error import ConfigError, require
from heddle.loops.settings import LoopSettings
from heddle_core.bounds import Bounds
from heddle_core.defaults import HANG_S
from heddle_trace.errors import TraceError
from heddle_trace.tool_rules import read_tool_rule

MissingRule: TypeAlias = Literal["error", "zero", "sample"]

_MOST_S = 31_536_000
"""Seconds of a year: no limit of a run is longer, nor infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingConfig:
    """Rule for values that the trace lacks: refuse, take zero, or draw from its records."""

    tool_s: str | float = "error"
    """Seconds of a tool call; `sample` draws from the same tool's recorded times, `typical` from
    shipped times of tools of its kind. Or seconds: `1.5`, or `bash=2,search=1.4` for some tools."""
    tool_tokens: MissingRule = "error"
    """Tokens that a tool's answer appended to the context."""
    prompt_tokens: MissingRule = "error"
    """Tokens of a trajectory's first prompt."""
    output_tokens: Literal["error", "sample"] = "error"
    """Tokens that a step generated; a generation of zero tokens is none."""
    cap_tool_s: Annotated[float | None, Bounds(above=0, below=1e9)] = None
    """Longest tool call to replay, in seconds; longer ones are cut to it. None: as recorded."""

    def __post_init__(self) -> None:
        try:
            read_tool_rule(str(self.tool_s))
        except TraceError as error:
            raise ConfigError(str(error)) from None
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Real engines, of `heddle run` and `heddle serve`, and what computes simulations."""

    engine: Literal["fake", "vllm", "http"] = "fake"
    """`fake`: engines that keep time as the profile says and make no tokens; `http`: engines that
    run already, by URL, for `heddle serve`."""
    executor: Literal["processes", "ray"] = "processes"
    """Where simulations run: in processes here, or as tasks of a Ray cluster, that of RAY_ADDRESS
    or this machine."""
    launcher: Literal["local", "ray"] = "local"
    """Where engines are started: `local`, on this machine; `ray`, on nodes of a Ray cluster."""
    drafter: str = ""
    """Folder of the head or model that makes drafts, for cluster.speculation of `eagle3` or
    `draft_model`."""
    text: str = ""
    """File of text (*.gz too) for prompts of `heddle run`, in place of drawn tokens: by the model's
    tokenizer, or as bytes."""
    model_dir: str = ""
    """Folder of the model that vLLM serves."""
    time_scale: Annotated[float, Bounds(above=0, most=1e6)] = 1.0
    """Real seconds for a recorded one: of tool calls, and of everything with fake engines."""
    tool_limit_s: Annotated[float | None, Bounds(above=0, most=_MOST_S)] = None
    """Tool calls are cut after this many seconds. None: no limit."""
    kv_transfer: Literal["none", "nixl"] = "none"
    """Transport of KV between engines; `none`: a migrated context is prefilled again."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. Only float32 gives the same tokens for any batch."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights of the model's shapes, for timing."""
    max_context: Annotated[int | None, Bounds(1, 1 << 30)] = None
    """Longest prompt and output together; of `prime-rl`'s first limit. None: that of the model."""
    max_batched_tokens: Annotated[int, Bounds(1, 1 << 30)] = 2048
    """Tokens that one iteration of an engine may process."""
    kv_mib: Annotated[int | None, Bounds(1, 1 << 30)] = None
    """KV space of an engine on each of its GPUs. None: 512 MiB on CPU, vLLM's choice on a GPU."""
    gpu_memory_share: Annotated[float, Bounds(above=0, most=1)] = 0.9
    """Of a GPU, for one engine."""
    engines_per_gpu: Annotated[int, Bounds(1, 64)] = 1
    """Engines that share one card, each with its `gpu_memory_share`."""
    pin_cores: bool = True
    """On CPU: each engine runs on cores of its own, as far as there are enough."""
    pin_s: Annotated[float, Bounds(0, _MOST_S)] = 0.0
    """Seconds that an engine holds a trajectory's KV after a step, for short tool calls; 0: only
    the prefix cache keeps it."""
    start_limit_s: Annotated[float, Bounds(above=0, most=_MOST_S)] = 600.0
    """An engine that is not ready after this time, or computes for so long without a message, is
    started again."""
    hang_s: Annotated[float, Bounds(above=0, most=_MOST_S)] = HANG_S
    """A ready engine that neither answers nor computes for so many seconds is started again. Of
    engines by URL: one that does not answer `/health`."""
    tokenizer: bool = False
    """Load the model's tokenizer into engines: clients of a gateway may then set stop strings, bad
    words and structured outputs."""
    temperature: Annotated[float, Bounds(0, 100)] = 0.0
    """Above 0, engines on a CPU prefill whole prompts, as a client's `seed` needs."""
    allow_unknown_vllm: bool = False
    """Run with a release of vLLM that was not tested."""

    def __post_init__(self) -> None:
        check_bounds(self)
        require(
            self.engine != "vllm" or bool(self.model_dir),
            "model_dir must name the folder of a model for engine = vllm (--model-dir)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Clients of a gateway; only `heddle serve` reads this."""

    arrivals: Literal["auto", "batch", "open"] = "auto"
    """How trajectories come, for the policy `heddle`: `batch`, at once, and the last end counts;
    `open`, at any time, and their mean time counts; `auto`, as is observed meanwhile."""
    max_open: Annotated[int | None, Bounds(1, 1_000_000)] = None
    """Requests at once; more get status 429. None: 65,536, or what the limit on files permits."""
    idle_s: Annotated[float, Bounds(0, 1e9)] = 1800.0
    """A trajectory without a request for so many seconds is cancelled."""
    keep_answer_s: Annotated[float, Bounds(0, 1e9)] = 60.0
    """Seconds for which an answer is kept for a client that sends the same again."""
    engine_wait_s: Annotated[float, Bounds(0, 1e9)] = 300.0
    """Longest time for which steps wait while there is no engine."""
    user_is_session: bool = False
    """The body's `user` names a session."""
    list_itself: bool = False
    """GET /workers has the gateway alone: for vime, which aborts at the URLs listed."""
    render_options: tuple[str, ...] = ()
    """Options of vLLM's renderer, as ``--tool-call-parser=hermes``; with engine = vllm."""
    names: tuple[str, ...] = ()
    """Names that requests may give for the model. Empty: the engines' own."""
    keys: str = ""
    """TOML file of clients' keys, with limits and priorities."""
    workers: tuple[str, ...] = ()
    """URLs of engines beside those of ``--worker``; read again at SIGHUP or POST /reload."""
    drain_s: Annotated[float, Bounds(0, 1e9)] = 30.0
    """At SIGTERM or POST /drain, longest time for steps under way."""
    state: str = ""
    """SQLite file of sessions and kept answers, for a gateway that is started again."""
    access_log: str = ""
    """File that gets a line of JSON for each request."""
    models: tuple[str, ...] = ()
    """Further models, as ``NAME=URL``: requests for them go to that server as they are."""
    epoch_file: str = ""
    """File that gets the output tokens of each trajectory by prompt, for samplers."""
    open_to_all: bool = False
    """Without an API key on an address that others reach: every client that can connect may use it
    and control its engines."""
    fake_tokens: Annotated[int, Bounds(1)] = 128
    """Mean length of a generation of fake engines."""
    fake_replies: str = ""
    """Path of JSON lines that fake engines say: reply n of a trajectory is line n, a message."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The policy of a run."""

    preset: str = "verl"
    """Name of a preset, of an installed policy, or ``package.module:factory``; ``+PART`` after it
    puts a part in place of its own, as in ``verl+lpt+oracle``."""

    tags: tuple[str, ...] = ()
    """GPU classes of tasks, as ``swe=h800``, for policies that place tasks by tags."""

    def __post_init__(self) -> None:
        require(bool(self.preset.strip()), "preset must name a policy; see `heddle policies list`")
        self.tagged()

    def tagged(self) -> Mapping[str, str]:
        """`tags` as GPU class by task.

        Raises:
            ValueError: an entry is no tag, or two are of one task.
        """
        return read_tags(self.tags)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All inputs of a run; equal values give equal journals."""

    trace: str
    """Path of the trace to replay, from the working directory."""
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0
    """Seeds what is drawn: missing values, and the order in which groups arrive."""
    missing: MissingConfig = field(default_factory=MissingConfig)
    """Rules for values that the trace lacks."""
    history: str = "prior"
    """History of earlier rollouts for policies: the path of their trace; ``prior:WORKLOAD``, a
    shipped history; ``prior``, the shipped one of the trace's workload if there is one; or
    ``none``."""
    predictor_model: str = "shipped"
    """Model of a `learned` predictor: the path of a model file, or ``shipped``."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The cluster that the trace is replayed on."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """The policy under test."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    """The engines of `heddle run`."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    """Clients of `heddle serve`."""
    loop: LoopSettings = field(default_factory=LoopSettings)
    """An RL loop around the rollout, of `heddle loop` and `heddle plan --regimes`."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Dollars of a GPU and hour by GPU class, in place of those that `heddle prices` lists."""

    def __post_init__(self) -> None:
        require(bool(self.trace.strip()), "trace must be the path of a trace file")
        require(bool(self.history.strip()), "history must be a path, prior, prior:WORKLOAD or none")
        require(bool(self.predictor_model.strip()), "predictor_model must be a path, or shipped")
        for name in ("trace", "history", "predictor_model"):
            require(
                "\0" not in getattr(self, name), f"{name} is no path: it has a NUL character in it"
            )
        check_bounds(self)
