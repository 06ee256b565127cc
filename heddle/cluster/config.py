"""The configuration of a cluster: GPUs, engines, tools and what goes wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from heddle.bounds import check_bounds
from heddle.cluster.failures import faults_of
from heddle.cluster.gpu_pools import EnginePool, PoolConfig, check_pools, engine_keys
from heddle.cluster.roles import RoleGpus, check_role_gpus, roles_of
from heddle.cluster.tool_pools import latency_of, tool_pools_of
from heddle.config_error import ConfigError, require
from heddle_core.bounds import Bounds
from heddle_core.defaults import REPORT_INTERVAL_S
from heddle_core.plans import RestartLimit
from heddle_rollout.speculation import Speculation, SpeculationError, read_speculation
from heddle_sim.model_shape import KvDtype
from heddle_sim.services import ServiceConfig, ToolServices

OverCapacityRule: TypeAlias = Literal["error", "drop"]
HostKvScope: TypeAlias = Literal["none", "engine", "cluster"]

NO_SPECULATION = "off"
AUTO = "auto"
"""A number of running steps that KV decides."""
AUTO_RUNNING = 256
"""The most of them: the largest batch that the profiles of GPUs were measured at."""
MAX_GPUS = 100_000
"""More than any cluster; a larger number is a typing error and would exhaust memory."""
MAX_RUNNING = 8192
"""Tokens that one iteration of an engine carries: each running step needs one of them."""
MAX_RANKS = 1024
"""More than any engine has; a larger number is a typing error."""
PREFILL_THRESHOLD = 2048
"""Tokens; measured in docs/results.md."""
MIN_REPORT_S = 0.01
"""Shorter than an iteration; more reports have no information and fill the journal."""


_OF_ONE_CLASS = {
    "mix": "give each pool its own TP degree, as tp = 2",
    "standby_tp": "leave it out",
    "roles": "leave it out, or give --gpu and --gpus in place of cluster.pool",
}
"""Settings that do not go with pools, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The simulated cluster: one model, and engines of one TP degree unless planned."""

    model: str = "qwen3-14b"
    """Model that the engines serve; `heddle policies list` lists those with a profile."""
    gpu: str = "h100"
    """GPU class of every engine."""
    gpus: Annotated[int, Bounds(1, MAX_GPUS)] = 8
    """GPUs in all; a multiple of `tp`."""
    engines: tuple[EnginePool, ...] = ()
    """Engines as a list of pools, `[[cluster.engines]]` with `gpu`, `gpus` or `count`, `tp`,
    `role`, in place of `gpu`, `gpus`, `tp` and the keys that name the same of each kind of
    cluster: `pool`, `mix`, `roles`, `prefill_tp`, which have it then."""
    pool: tuple[PoolConfig, ...] = ()
    """Pools of GPUs of several classes, in place of `gpu` and `gpus`: these are then the first
    class and the sum."""
    tp: Annotated[int, Bounds(1)] = 1
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
    attention_dp: Annotated[int, Bounds(1, MAX_RANKS)] = 1
    """Attention data-parallel ranks of an engine, as vLLM's `--data-parallel-size`: it has so many
    times `tp` GPUs."""
    engine: Literal["vllm", "sglang"] = "vllm"
    """Engine whose scheduler, limits and times count."""
    engine_version: str = ""
    """Release whose host time counts, or the nearest that was measured; empty: the newest, of
    SGLang the mean."""
    kv_dtype: KvDtype = "auto"
    """Of the KV. auto: by repository, else by profile."""
    roles: str = ""
    """GPUs of engines that prefill and of those that decode, as ``prefill=2,decode=6``: together
    all. `tp`, `mix` and planners are of engines that decode. Empty: every engine does both."""
    prefill_tp: Annotated[int | None, Bounds(1)] = None
    """TP degree of engines that prefill. None: `tp`."""
    prefill_threshold: Annotated[int, Bounds(0)] = PREFILL_THRESHOLD
    """A step with at most so many tokens beyond the KV on its decode engine is prefilled there;
    0: none is. With `roles` only."""
    handover_fixed_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Seconds of a copy of KV from or to an engine that prefills, beside its bytes. None: those of
    a migration in the profile."""
    max_running: Annotated[int, Bounds(1, MAX_RUNNING)] = 100
    """Steps that one engine runs at once. ``"auto"`` in a file: `adaptive`, at most 256."""
    adaptive: bool = False
    """Whether any policy runs as many of these steps as KV allows (`+adaptive`)."""
    speculation: str = NO_SPECULATION
    """Speculative decoding of every engine: `off`, or ``METHOD:DRAFTS[:ACCEPTANCE]`` as
    ``mtp:3:0.886/0.770/0.663``; see docs/speculation.md."""
    acceptance_decay: Annotated[float, Bounds(0, below=1)] = 0.0
    """Share of the acceptance that a loop loses with each version of the weights, where the drafter
    is frozen. 0 as published for steps 0 to 36 (marin#9114); elsewhere it falls."""
    tool_capacity: Annotated[int | None, Bounds(1, 1_000_000_000, none="no limit")] = None
    """Tool calls that run at once in the whole cluster; more wait. None: no limit."""
    tool_pools: tuple[str, ...] = ()
    """Pools of single tools, as ``bash=64`` or ``search=elastic:cold=0.3``; see docs/cluster.md.
    Calls of the other tools count against `tool_capacity`."""
    env_latency: str = ""
    """Added to every tool call, in seconds: ``2``, or ``10,5`` for a normal distribution of mean 10
    and standard deviation 5, cut at 0."""
    report_interval_s: Annotated[float, Bounds(MIN_REPORT_S, below=1e9)] = REPORT_INTERVAL_S
    """Seconds between two reports of an engine's counters to the policy."""
    engine_start_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Seconds until an engine that starts during a rollout is ready. None: as the profile measured,
    or 60. Those that start before the first dispatch take no time."""
    standby_tp: tuple[int, ...] = ()
    """TP degrees of engines that are asleep on the GPUs of the others, to take their place."""
    standby_start_s: Annotated[float | None, Bounds(0, below=1e9)] = None
    """Seconds until an engine that was asleep is ready. None: 2.5, see docs/cluster.md."""
    standby_gib: Annotated[float, Bounds(0, below=1e6)] = 2.4
    """GiB of a GPU that an engine asleep on it keeps, and that KV has not."""
    host_kv: HostKvScope = "none"
    """Host memory as a tier behind the GPUs' KV: `engine`, a tier for each engine, as vLLM's
    OffloadingConnector; `cluster`, one store for all engines, as MooncakeStoreConnector."""
    host_kv_gib: Annotated[float, Bounds(above=0, below=1e6)] = 64.0
    """GiB of host memory for KV, for each GPU."""
    host_kv_gb_per_s: Annotated[float | None, Bounds(0.001, below=1e6)] = None
    """GB/s of a load from host memory, for each GPU of an engine. None: 41.7 for `engine`, 10.8
    for `cluster`: published figures, see docs/cluster.md."""
    prediction_s: Annotated[float, Bounds(0, below=1e9)] = 0.1
    """Response time of a prediction service, in seconds; for `served` predictors only.

    The Heddle paper measured 0.10 (coding), 0.15 (search) and 0.27 (math); arXiv 2603.28101,
    Table 1.
    """
    failures: str = ""
    """Engines that die, as ``ENGINE@SECONDS`` with commas between: ``e0@120,e3@300``. Each is
    started again under a new name, ``e0+1``."""
    restarts: Annotated[int, Bounds(0, 1_000_000)] = 3
    """How often a failed engine is started again within `restart_window_s`; then it is given up."""
    restart_window_s: Annotated[float, Bounds(above=0, below=1e9)] = 600.0
    """Seconds for which a restart of an engine counts."""
    over_capacity: OverCapacityRule = "error"
    """Rule for a trajectory whose context exceeds an engine's KV: refuse all, or drop it."""

    def __post_init__(self) -> None:
        self._take_engines()
        self._take_pools()
        check_bounds(self)
        try:
            check_role_gpus(self.role_gpus, (self.prefill_tp or self.tp) * self.attention_dp)
        except ValueError as error:
            raise ConfigError(f"roles: {error}") from None
        used = sum(self.mix) * self.attention_dp
        gpus, of = self.home_gpus, "gpus" if not self.roles else "roles: decode"
        require(
            not self.mix or (min(self.mix) >= 1 and used == gpus),
            f"mix = {list(self.mix)} names engines of {used} GPUs in all, not of "
            f"{of} = {gpus}: take {of} = {used} or other TP degrees",
        )
        each = self.engine_gpus
        require(
            bool(self.mix or self.pool) or gpus % each == 0,
            f"{of} = {gpus} is not divisible by "
            + (f"tp = {self.tp}" if self.attention_dp == 1 else f"tp * attention_dp = {each}")
            + f": take {of} = {max(gpus // each, 1) * each} or another tp",
        )
        self.drafts()
        self.tool_services()
        standby = self.standby_tp
        require(
            all(1 <= tp <= self.gpus for tp in standby) and len(set(standby)) == len(standby),
            f"standby_tp = {list(standby)} must list TP degrees from 1 to gpus = {self.gpus}, "
            "each once",
        )
        self.faults()
        choices = self.tp_choices
        require(
            choices is None or (len(choices) > 0 and all(1 <= c <= self.gpus for c in choices)),
            f"tp_choices = {list(choices or ())} must list TP degrees from 1 to gpus = "
            f"{self.gpus}, or be left out",
        )

    @property
    def restart_limit(self) -> RestartLimit:
        return RestartLimit(restarts=self.restarts, window_s=self.restart_window_s)

    def _take_engines(self) -> None:
        """Make other keys what `engines` says."""
        if not self.engines:
            return
        require(
            not (self.pool or self.mix or self.roles or self.prefill_tp),
            "engines says what pool, mix, roles and prefill_tp say: leave these out",
        )
        said = engine_keys(self.engines, self.tp, self.attention_dp)
        if "roles" in said and self.gpus > said["gpus"]:
            del said["gpus"]  # A loop: its trainer has the others.
        for key, value in said.items():
            object.__setattr__(self, key, value)
        object.__setattr__(self, "engines", ())

    def _take_pools(self) -> None:
        """Check the pools, and make `gpu` and `gpus` what they say."""
        if not self.pool:
            return
        check_pools(self.pool)
        object.__setattr__(self, "gpu", self.pool[0].gpu)
        object.__setattr__(self, "gpus", sum(pool.gpus for pool in self.pool))
        for name, remedy in _OF_ONE_CLASS.items():
            require(
                not getattr(self, name),
                f"{name} names engines of one GPU class, and there are pools: {remedy}",
            )
        choices = self.tp_choices
        for pool in self.pool:
            require(
                not choices or min(choices) <= pool.gpus,
                f"tp_choices = {list(choices or ())} has no TP degree for the {pool.gpus} GPUs of "
                f"the pool of {pool.gpu}: add one from 1 to {pool.gpus}, or leave the pool out",
            )
        for pool in self.pool:
            try:
                self._class_of(pool)
            except ValueError as error:
                raise ConfigError(f"pool of {pool.gpu}: {error}") from None

    def _class_of(self, pool: PoolConfig) -> "ClusterConfig":
        choices = self.tp_choices
        return replace(
            self,
            pool=(),
            model=pool.profile or self.model,
            gpu=pool.gpu,
            gpus=pool.gpus,
            tp=self.tp if pool.tp is None else pool.tp,
            tp_choices=choices and tuple(tp for tp in choices if tp <= pool.gpus),
        )

    @property
    def classes(self) -> "tuple[ClusterConfig, ...]":
        """The GPUs of each class as a cluster of their own."""
        return tuple(map(self._class_of, self.pool)) or (self,)

    @property
    def pools(self) -> Mapping[str, int]:
        """GPUs of each class."""
        return {pool.gpu: pool.gpus for pool in self.pool} or {self.gpu: self.gpus}

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

    def divides_into(self, tp: int) -> bool:
        """Whether engines of degree `tp` use all GPUs, of those that prefill and that decode."""
        roles, each = self.role_gpus, tp * self.attention_dp
        prefill = 0 if roles is None or self.prefill_tp else roles.prefill
        return self.home_gpus % each == 0 and prefill % each == 0

    @property
    def engine_gpus(self) -> int:
        """GPUs of an engine of degree `tp`."""
        return self.tp * self.attention_dp

    @property
    def engine_count(self) -> int:
        """Engines that are not planned, those that only prefill left out."""
        return sum(each.home_gpus // each.engine_gpus for each in self.classes)

    @property
    def running(self) -> str:
        """`max_running` as options and files have it."""
        return AUTO if self.adaptive else str(self.max_running)

    @property
    def tps(self) -> str:
        """TP degrees of unplanned engines, for people: `1`, `4, 2, 2`, `2 (h800), 1 (h20)`."""
        if self.pool:
            return ", ".join(f"{each.tp} ({each.gpu})" for each in self.classes)
        return ", ".join(map(str, self.mix or (self.tp,)))

    def tool_services(self) -> ToolServices | None:
        """`tool_pools` and `env_latency`; None without either.

        Raises:
            ValueError: an entry is no pool, or no distribution.
        """
        try:
            pools = tool_pools_of(self.tool_pools)
        except ValueError as error:
            raise ConfigError(f"tool_pools: {error}") from None
        try:
            latency = latency_of(self.env_latency) if self.env_latency.strip() else None
        except ValueError as error:
            raise ConfigError(f"env_latency: {error}") from None
        if not pools and latency is None:
            return None
        others = ServiceConfig(capacity=self.tool_capacity)
        return ToolServices(pools=pools, others=others, latency=latency)

    def drafts(self) -> Speculation | None:
        """`speculation`; None for `off`.

        Raises:
            ConfigError: it is no setting.
        """
        if self.speculation.strip() == NO_SPECULATION:
            return None
        if "best" in self.speculation.split(":")[:2]:
            raise ConfigError(
                f"speculation = {self.speculation}: is found by --speculation {self.speculation}, "
                "an option of compare, plan and loop: give METHOD:DRAFTS here"
            )
        try:
            return read_speculation(self.speculation)
        except SpeculationError as error:
            raise ConfigError(f"speculation: {error}") from None

    def faults(self) -> tuple[tuple[float, str], ...]:
        """`failures` as (time_s, engine), in order of time.

        Raises:
            ValueError: an entry is not ENGINE@SECONDS.
        """
        return faults_of(self.failures)


_OF_ROLES = (
    ("prefill_threshold", "cluster.prefill_threshold", PREFILL_THRESHOLD),
    ("prefill_tp", "cluster.prefill_tp", None),
    ("handover_fixed_s", "cluster.handover_fixed_s", None),
)


def check_role_settings(cluster: ClusterConfig) -> None:
    """Refuse settings of prefill and decode engines where there are none.

    Raises:
        ConfigError: one differs from its default.
    """
    for name, option, default in _OF_ROLES:
        require(
            bool(cluster.roles) or getattr(cluster, name) == default,
            f"{option} = {getattr(cluster, name)} has no effect without prefill and decode "
            "engines: set cluster.roles = prefill=GPUS,decode=GPUS, or leave it out",
        )
