"""The configuration of a run: small frozen values, one docstring per field.

This module reads no file and imports no policy; `heddle.config_files` makes these values from TOML
and options. Each part of a run receives only the value that it needs, never a `RunConfig`.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from heddle.failures import faults_of
from heddle.pools import latency_of, tool_pools_of
from heddle.roles import RoleGpus, check_role_gpus, roles_of
from heddle_core.defaults import REPORT_INTERVAL_S
from heddle_sim.services import ServiceConfig, ToolServices

MissingRule: TypeAlias = Literal["error", "zero", "sample"]
OverCapacityRule: TypeAlias = Literal["error", "drop"]
HostKvScope: TypeAlias = Literal["none", "engine", "cluster"]

MAX_GPUS = 100_000
"""More than any cluster; a larger number is a typing error and would exhaust memory."""
MAX_RUNNING = 8192
MAX_RANKS = 1024
"""Tokens that one iteration of an engine carries: each running step needs one of them."""
PREFILL_THRESHOLD = 2048
"""Tokens; measured in docs/results/roles.md."""
MIN_REPORT_INTERVAL_S = 0.01
"""Shorter than an iteration; more reports have no information and fill the journal."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingConfig:
    """Rule for values that the trace lacks: refuse, take zero, or draw from its records."""

    tool_s: MissingRule = "error"
    """Seconds of a tool call; `sample` draws from the same tool's recorded times."""
    tool_tokens: MissingRule = "error"
    """Tokens that a tool's answer appended to the context."""
    prompt_tokens: MissingRule = "error"
    """Tokens of a trajectory's first prompt."""
    output_tokens: Literal["error", "sample"] = "error"
    """Tokens that a step generated; a generation of zero tokens is none."""
    cap_tool_s: float | None = None
    """Longest tool call to replay, in seconds; longer ones are cut to it. None: as recorded."""

    def __post_init__(self) -> None:
        cap = self.cap_tool_s
        _require(cap is None or 0.0 < cap < 1e9, "cap_tool_s must be more than 0 seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The simulated cluster: one GPU class, one model, engines of one TP degree unless planned."""

    model: str = "qwen3-14b"
    """Model that the engines serve; `heddle policies` lists those with a profile."""
    gpu: str = "h100"
    """GPU class of every engine."""
    gpus: int = 8
    """GPUs in all; a multiple of `tp`."""
    tp: int = 1
    """TP degree of the engines of policies that do not plan resources."""
    tp_choices: tuple[int, ...] | None = None
    """TP degrees that a planning policy may mix. None: those of the profile, up to `gpus`, whose
    engines hold the trace's largest context."""
    mix: tuple[int, ...] = ()
    """TP degrees of those engines, one for each, where they are not all `tp`; their sum, times
    `attention_dp`, is `gpus`."""
    expert_parallel: Literal["auto", "on", "off"] = "auto"
    """Whether engines spread the experts of a mixture-of-experts model over all their GPUs, as
    vLLM's `--enable-expert-parallel`. auto: as the model's profile has it."""
    attention_dp: int = 1
    """Attention data-parallel ranks of an engine, as vLLM's `--data-parallel-size`: it has so many
    times `tp` GPUs."""
    roles: str = ""
    """GPUs of engines that prefill and of those that decode, as ``prefill=2,decode=6``: together
    all. `tp`, `mix` and planners are of engines that decode. Empty: every engine does both."""
    prefill_tp: int | None = None
    """TP degree of engines that prefill. None: `tp`."""
    prefill_threshold: int = PREFILL_THRESHOLD
    """A step with at most so many tokens beyond the KV on its decode engine is prefilled there;
    0: none is. With `roles` only."""
    handover_fixed_s: float | None = None
    """Seconds of a copy of KV from or to an engine that prefills, beside its bytes. None: those of
    a migration in the profile."""
    max_running: int = 100
    """Steps that one engine runs at once."""
    tool_capacity: int | None = None
    """Tool calls that run at once in the whole cluster; more wait. None: no limit."""
    tool_pools: tuple[str, ...] = ()
    """Pools of single tools, as ``bash=64`` or ``search=elastic:cold=0.3``; see docs/cli.md. Calls
    of the other tools count against `tool_capacity`."""
    env_latency: str = ""
    """Added to every tool call, in seconds: ``2``, or ``10,5`` for a normal distribution of mean 10
    and standard deviation 5, cut at 0."""
    report_interval_s: float = REPORT_INTERVAL_S
    """Seconds between two reports of an engine's counters to the policy."""
    engine_start_s: float | None = None
    """Seconds from the start of an engine until it is ready, while a rollout runs. None: the
    measured time of the profile, or 60 without one.

    Engines that are started before the first dispatch take no time of the run.
    """
    standby_tp: tuple[int, ...] = ()
    """TP degrees of engines that are asleep on the GPUs of the others, to take their place."""
    standby_start_s: float | None = None
    """Seconds until an engine that was asleep is ready. None: 2.5, see docs/cli.md."""
    standby_gib: float = 2.4
    """GiB of a GPU that an engine asleep on it keeps, and that KV has not."""
    host_kv: HostKvScope = "none"
    """Host memory as a tier behind the GPUs' KV: `engine`, a tier for each engine, as vLLM's
    OffloadingConnector; `cluster`, one store for all engines, as MooncakeStoreConnector."""
    host_kv_gib: float = 64.0
    """GiB of host memory for KV, for each GPU."""
    host_kv_gb_per_s: float | None = None
    """GB/s of a load from host memory, for each GPU of an engine. None: 41.7 for `engine`, 10.8
    for `cluster`: published figures, see docs/cli.md."""
    prediction_s: float = 0.1
    """Response time of a prediction service, in seconds; for `served` predictors only.

    The Heddle paper measured 0.10 (coding), 0.15 (search) and 0.27 (math); arXiv 2603.28101,
    Table 1.
    """
    failures: str = ""
    """Engines that die, as ``ENGINE@SECONDS`` with commas between: ``e0@120,e3@300``. Each is
    started again under a new name, ``e0+1``, three times at most."""
    over_capacity: OverCapacityRule = "error"
    """Rule for a trajectory whose context exceeds an engine's KV: refuse all, or drop it."""

    def __post_init__(self) -> None:
        _require(1 <= self.gpus <= MAX_GPUS, f"gpus must be from 1 to {MAX_GPUS:,}")
        _require(self.tp >= 1, "tp must be 1 or more")
        _require(1 <= self.attention_dp <= MAX_RANKS, f"attention_dp must be from 1 to {MAX_RANKS}")
        try:
            check_role_gpus(self.role_gpus, (self.prefill_tp or self.tp) * self.attention_dp)
        except ValueError as error:
            raise ValueError(f"roles: {error}") from None
        _require(self.prefill_tp is None or self.prefill_tp >= 1, "prefill_tp must be 1 or more")
        _require(self.prefill_threshold >= 0, "prefill_threshold must be 0 or more tokens")
        fixed_s = self.handover_fixed_s
        _require(
            fixed_s is None or 0.0 <= fixed_s < 1e9, "handover_fixed_s must be from 0 to below 1e9"
        )
        used = sum(self.mix) * self.attention_dp
        gpus, of = self.home_gpus, "gpus" if not self.roles else "roles: decode"
        _require(
            not self.mix or (min(self.mix) >= 1 and used == gpus),
            f"mix = {list(self.mix)} names engines of {used} GPUs in all, not of "
            f"{of} = {gpus}: take {of} = {used} or other TP degrees",
        )
        each = self.engine_gpus
        _require(
            bool(self.mix) or gpus % each == 0,
            f"{of} = {gpus} is not divisible by "
            + (f"tp = {self.tp}" if self.attention_dp == 1 else f"tp * attention_dp = {each}")
            + f": take {of} = {max(gpus // each, 1) * each} or another tp",
        )
        _require(
            1 <= self.max_running <= MAX_RUNNING, f"max_running must be from 1 to {MAX_RUNNING:,}"
        )
        _require(
            self.tool_capacity is None or self.tool_capacity >= 1,
            "tool_capacity must be 1 or more; leave it out for no limit",
        )
        self.tool_services()
        _require(
            MIN_REPORT_INTERVAL_S <= self.report_interval_s < 1e9,
            f"report_interval_s must be {MIN_REPORT_INTERVAL_S} seconds or more",
        )
        start_s = self.engine_start_s
        _require(
            start_s is None or 0.0 <= start_s < 1e9, "engine_start_s must be from 0 to below 1e9"
        )
        _require(0.0 <= self.prediction_s < 1e9, "prediction_s must be from 0 to below 1e9")
        standby = self.standby_tp
        _require(
            all(1 <= tp <= self.gpus for tp in standby) and len(set(standby)) == len(standby),
            f"standby_tp = {list(standby)} must list TP degrees from 1 to gpus = {self.gpus}, "
            "each once",
        )
        start_s = self.standby_start_s
        _require(
            start_s is None or 0.0 <= start_s < 1e9, "standby_start_s must be from 0 to below 1e9"
        )
        _require(0.0 <= self.standby_gib < 1e6, "standby_gib must be from 0 to below 1e6")
        _require(0.0 < self.host_kv_gib < 1e6, "host_kv_gib must be more than 0 and below 1e6")
        speed = self.host_kv_gb_per_s
        _require(
            speed is None or 0.001 <= speed < 1e6,
            "host_kv_gb_per_s must be from 0.001 to below 1e6",
        )
        self.faults()
        choices = self.tp_choices
        _require(
            choices is None or (len(choices) > 0 and all(1 <= c <= self.gpus for c in choices)),
            "tp_choices must list degrees from 1 to gpus",
        )

    @property
    def role_gpus(self) -> RoleGpus | None:
        """`roles` as numbers; None where every engine does both.

        Raises:
            ValueError: they are no roles.
        """
        return roles_of(self.roles)

    @property
    def prefill_tps(self) -> tuple[int, ...]:
        """TP degrees of engines that prefill, one for each."""
        roles, tp = self.role_gpus, self.prefill_tp or self.tp
        return () if roles is None else (tp,) * (roles.prefill // (tp * self.attention_dp))

    @property
    def home_gpus(self) -> int:
        """GPUs of the engines that decode, which trajectories have as homes."""
        roles = self.role_gpus
        return self.gpus if roles is None else roles.decode

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine of degree `tp`."""
        return self.tp * self.attention_dp

    @property
    def engines(self) -> int:
        """Engines of degree `tp` that the GPUs suffice for, those that only prefill left out."""
        return self.home_gpus // self.engine_gpus

    @property
    def tps(self) -> str:
        """TP degrees of engines that are not planned, for people: `1`, or one for each engine."""
        return ", ".join(map(str, self.mix or (self.tp,)))

    def tool_services(self) -> ToolServices | None:
        """`tool_pools` and `env_latency`; None without either.

        Raises:
            ValueError: an entry is no pool, or no distribution.
        """
        try:
            pools = tool_pools_of(self.tool_pools)
        except ValueError as error:
            raise ValueError(f"tool_pools: {error}") from None
        try:
            latency = latency_of(self.env_latency) if self.env_latency.strip() else None
        except ValueError as error:
            raise ValueError(f"env_latency: {error}") from None
        if not pools and latency is None:
            return None
        others = ServiceConfig(capacity=self.tool_capacity)
        return ToolServices(pools=pools, others=others, latency=latency)

    def faults(self) -> tuple[tuple[float, str], ...]:
        """`failures` as (time_s, engine), in order of time.

        Raises:
            ValueError: an entry is not ENGINE@SECONDS.
        """
        return faults_of(self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Real engines; only `heddle run` reads this."""

    engine: Literal["fake", "vllm"] = "fake"
    """`fake`: engines that keep time as the profile says and make no tokens."""
    model_dir: str = ""
    """Folder of the model that vLLM serves."""
    time_scale: float = 1.0
    """Real seconds for a recorded one: of tool calls, and of everything with fake engines."""
    tool_limit_s: float | None = None
    """Tool calls are cut after this many seconds. None: no limit."""
    kv_transfer: Literal["none", "nixl"] = "none"
    """Transport of KV between engines; `none`: a migrated context is prefilled again."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. Only float32 gives the same tokens for any batch."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights of the model's shapes, for timing."""
    max_context: int | None = None
    """Longest prompt and output together. None: the limit of the model."""
    max_batched_tokens: int = 2048
    """Tokens that one iteration of an engine may process."""
    kv_mib: int | None = None
    """KV space of an engine on each of its GPUs. None: 512 MiB on CPU, vLLM's choice on a GPU."""
    gpu_memory_share: float = 0.9
    """Of a GPU, for one engine."""
    engines_per_gpu: int = 1
    """Engines that share one card, each with its `gpu_memory_share`."""
    pin_cores: bool = True
    """On CPU: each engine runs on cores of its own, as far as there are enough."""
    pin_s: float = 0.0
    """Seconds that an engine holds a trajectory's KV after a step, for short tool calls; 0: only
    the prefix cache keeps it."""
    start_limit_s: float = 600.0
    """An engine that is not ready after this time is ended and started again."""
    temperature: float = 0.0
    """Of live agents' sampling; replays are greedy."""
    allow_unknown_vllm: bool = False
    """Run with a release of vLLM that was not tested."""

    def __post_init__(self) -> None:
        _require(0.0 < self.time_scale <= 1e6, "time_scale must be more than 0")
        limit = self.tool_limit_s
        _require(limit is None or limit > 0.0, "tool_limit_s must be more than 0 seconds")
        _require(self.kv_mib is None or self.kv_mib >= 1, "kv_mib must be 1 or more")
        _require(0.0 < self.gpu_memory_share <= 1.0, "gpu_memory_share must be above 0, at most 1")
        _require(self.engines_per_gpu >= 1, "engines_per_gpu must be 1 or more")
        _require(self.pin_s >= 0.0, "pin_s must be 0 or more seconds")
        _require(self.start_limit_s > 0.0, "start_limit_s must be more than 0 seconds")
        _require(self.temperature >= 0.0, "temperature must be 0 or more")
        _require(
            self.engine != "vllm" or bool(self.model_dir),
            "model_dir must name the folder of a model for engine = vllm (--model-dir)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConfig:
    """Live agents instead of a replay; only `heddle run` reads this. See docs/live-agents.md."""

    agents: bool = False
    """Whether `trace` is a file of tasks, and agents with a Python sandbox work on them."""
    samples: int = 1
    """Trajectories for each task."""
    steps: int = 16
    """Generations of a trajectory."""
    step_tokens: int = 2048
    """Tokens of one generation."""
    observation_tokens: int = 2048
    """Tokens of a program's output in the model's context."""
    context_tokens: int = 32_768
    """Tokens of prompt, generations and observations together."""
    tool_s: float = 30.0
    """Seconds after which a program is cut."""
    tool_cpu_s: int = 10
    """CPU seconds of a program."""
    tool_memory_mib: int = 512
    """Address space of a program."""

    def __post_init__(self) -> None:
        _require(self.samples >= 1, "samples must be 1 or more")
        for name in ("steps", "step_tokens", "observation_tokens", "context_tokens"):
            _require(getattr(self, name) >= 1, f"{name} must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The policy of a run."""

    preset: str = "verl"
    """Name of a preset, of an installed policy, or ``package.module:factory``; ``+PART`` after it
    puts a part in place of its own, as in ``verl+lpt+oracle``."""

    def __post_init__(self) -> None:
        _require(bool(self.preset.strip()), "preset must name a policy; see `heddle policies`")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All inputs of a run; equal values give equal journals."""

    trace: str
    """Path of the trace to replay, from the working directory."""
    seed: int = 0
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
    live: LiveConfig = field(default_factory=LiveConfig)
    """Live agents of `heddle run`."""

    def __post_init__(self) -> None:
        _require(bool(self.trace.strip()), "trace must be the path of a trace file")
        _require(
            bool(self.history.strip()), "history must be a path, prior, prior:WORKLOAD or none"
        )
        _require(bool(self.predictor_model.strip()), "predictor_model must be a path, or shipped")
        for name in ("trace", "history", "predictor_model"):
            _require(
                "\0" not in getattr(self, name), f"{name} is no path: it has a NUL character in it"
            )
        _require(0 <= self.seed < 2**32, "seed must be from 0 to 4294967295")
