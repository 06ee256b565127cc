"""All keys of `heddle.toml`: those of a run, and those that only commands read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from heddle.bounds import check_bounds
from heddle.config import RunConfig
from heddle_core.bounds import Bounds

Percent: TypeAlias = Annotated[float, Bounds(0, below=1e9)]
FrameworkName: TypeAlias = Literal[
    "verl", "skyrl", "slime", "vime", "prime-rl", "nemo-rl", "vllm", "sglang", "heddle"
]
Limit: TypeAlias = Annotated[float | None, Bounds(0, below=1e9)]
"""Percent that is allowed."""
Scalar: TypeAlias = bool | int | float | str
OwnRegime: TypeAlias = Mapping[str, Scalar | Mapping[str, Scalar]]
"""A section `[regimes.NAME]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How the best is chosen; `heddle plan`, `heddle compare` and `heddle loop` read this."""

    objective: Literal["makespan", "cost"] | None = None
    """What is best: `makespan`, the least time, or `cost`, the fewest dollars. None: `makespan`;
    with a deadline the fewest dollars."""
    budget_s: Limit = None
    """Seconds after which a search runs no simulations, but the least that it needs."""
    framework: FrameworkName | None = None
    """Runs what is recommended; its settings are printed. None: that of the recommended policy."""

    def __post_init__(self) -> None:
        check_bounds(self, "plan.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What `heddle compare`, `heddle loop` and `heddle plan` draw."""

    page: bool | None = None
    """`heddle compare` writes report.html beside the runs. None: with a table, not with --json."""
    figure: str = ""
    """File to draw, *.png, *.svg or *.pdf: what each part of a policy adds (`--sweep
    policy.parts=waterfall`), samples a second over staleness (`heddle loop`), or makespan against
    dollars of clusters (`heddle plan`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How logs are read where a trace may stand, and what of them is replayed."""

    format: str = "auto"
    """What the files are; `auto` looks into them. `heddle trace import --help` lists formats."""
    skip_bad: bool = False
    """Leave damaged records out, and count them."""
    tokenizer: str | None = None
    """Counts tokens where the log does not: a tokenizer.json, a *.tiktoken, or an encoding."""
    chars_per_token: float = 3.6
    """Without a tokenizer: characters that are taken for a token."""
    workload: str | None = None
    """Name of the task, in place of the format's own."""
    groups: Annotated[int | None, Bounds(1, 100_000)] = None
    """Groups of a rollout that is drawn from the logs. None: all are replayed as they are; with
    `samples`, as many as make 256 trajectories."""
    samples: Annotated[int | None, Bounds(1, 10_000)] = None
    """Trajectories of each of these. None: those of the median group of the logs, at most 16."""

    def __post_init__(self) -> None:
        check_bounds(self, "logs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseSettings:
    """How `heddle diagnose` finds remedies and follows logs, and what it keeps."""

    budget_s: Annotated[float, Bounds(0, below=1e9)] = 20.0
    """Seconds after which its search starts nothing more; 0: none."""
    observed: str = ""
    """File, *.jsonl or *.jsonl.gz, of the measured steps as `heddle.observed/1`."""
    follow_s: Annotated[float, Bounds(0, below=1e9)] = 5.0
    """Seconds between looks of `--follow`; 20 times those of reading, if longer."""
    follow_moved: Annotated[float, Bounds(0, below=1e9)] = 0.2
    """Change of parts, lengths or tool times at which `--follow` searches again."""

    def __post_init__(self) -> None:
        check_bounds(self, "diagnose.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthSettings:
    """What `heddle trace synth` makes besides lengths and tools."""

    drift: float = 1.0
    """Output tokens of the last prompt over the first, growing evenly, as lengths grow while a
    model learns."""
    batches: int | None = None
    """Batches of training to record it in. None: not recorded, as the two that follow."""
    env_start_s: float | None = None
    """Median start of an environment, in seconds."""
    reward_s: float | None = None
    """Median time of a reward, in seconds."""
    shrink: float = 1.0
    """Token counts are divided by this, for slow engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """How `heddle profile` makes, measures, fits and checks profiles."""

    name: str | None = None
    """from-config: of the model. None: its folder's, or the part of its id after the slash."""
    head: str | None = None
    """from-config: config.json, folder or id of an EAGLE-3 head, for its drafts."""
    precision: Literal["bf16", "fp8", "mxfp4", "nvfp4", "int4"] | None = None
    """from-config: of the linear layers. None: the configuration's."""
    kv_precision: Literal["bf16", "fp8"] = "bf16"
    """from-config: of KV."""
    source: Literal["auto", "aiconfigurator", "roofline"] = "auto"
    """from-config: `auto`, AIConfigurator's kernel times where installed, else the roofline."""
    sweep: Literal["quick", "small", "full"] = "small"
    """measure: how much is measured."""
    share: str = ""
    """measure: also run closed loops of clients, and write them to this new ROWS.csv, which names
    no host, path or person."""
    max_context: int | None = None
    """measure: the longest context. None: 2048; on GPUs 16384."""
    max_fit_error: Percent = 25.0
    """fit: refuse when the fit itself is off by more percent (median)."""
    max_makespan_error: Limit = None
    """check: exit status 1 where the makespan is off by more percent."""
    max_p99_error: Limit = None
    """check: the same for P99 completion."""
    max_tpot_error: Limit = None
    """check: the same for TPOT."""
    min_finish_order: Annotated[float | None, Bounds(-1, 1)] = None
    """check: exit status 1 where the rank correlation of ends is below."""
    same_ranking: bool = False
    """check: exit status 1 unless policies are ranked alike."""
    tie: Percent = 1.0
    """check: percent that rank nothing."""

    def __post_init__(self) -> None:
        check_bounds(self, "profile.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(RunConfig):
    """All keys of `heddle.toml`. A run keeps those of `RunConfig`."""

    plan: PlanSettings = field(default_factory=PlanSettings)
    """How the best is chosen."""
    report: ReportSettings = field(default_factory=ReportSettings)
    """What is drawn."""
    logs: LogSettings = field(default_factory=LogSettings)
    """How logs are read where a trace may stand."""
    diagnose: DiagnoseSettings = field(default_factory=DiagnoseSettings)
    """How remedies of measured steps are found."""
    synth: SynthSettings = field(default_factory=SynthSettings)
    """What `heddle trace synth` makes."""
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    """How profiles are made and checked."""
    regimes: Mapping[str, OwnRegime] = field(default_factory=dict)
    """Regimes of your own by name, each with the `regime` that it is of, its parameters, and fields
    of its parts: ``[regimes.tight]``, ``regime = "areal"``, ``staleness.late = "drop"``."""


def plan_settings(config: RunConfig) -> PlanSettings:
    """How the best is chosen, by a configuration that may have no `[plan]`."""
    return config.plan if isinstance(config, Config) else PlanSettings()
