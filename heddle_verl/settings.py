"""The YAML file that verl's `router_config_path` names, and a run's set-up from it."""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec

from heddle.bounds import check_bounds
from heddle.cluster.config import MAX_RUNNING, ClusterConfig
from heddle.config import PolicyConfig, RunConfig
from heddle.config_error import ConfigError
from heddle.policy_inputs import needs_oracle
from heddle.setup import RunSetup, prepare
from heddle.workload import ReplayedTrace, Workload
from heddle_calibrate.roofline.by_name import profile_by_name
from heddle_core.bounds import Bounds
from heddle_sim.profile_files import Profile

PLACE = "router_config_path"
"""verl's key for the file, which messages name: the router gets its contents only."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of the file; docs/frameworks.md describes them."""

    router_class: str = "heddle_verl.Router"
    model: str
    """Profile of the model: its name, or the path of a profile file."""
    gpu: str = ""
    """GPU class of the profile; not needed beside a profile file."""
    policy: str = "heddle"
    history: str = "none"
    predictor_model: str = "shipped"
    task: str = "verl"
    """Task of every trajectory, where no agent loop manager gives another."""
    seed: int = 0
    tp: Annotated[int | None, Bounds(1, none="what engines report")] = None
    """GPUs of an engine. None: what it reports."""
    max_running: Annotated[int | None, Bounds(1, none="what engines report")] = None
    """Steps that an engine runs at once. None: what it reports."""
    max_context: Annotated[int | None, Bounds(1, none="what engines report")] = None
    """Tokens of prompt and output together. None: what the engine reports."""
    kv_tokens: Annotated[int | None, Bounds(1, none="those of the profile")] = None
    """Tokens of KV of an engine. None: those of the profile."""
    proxy: bool = True
    """Whether steps go through a proxy that can preempt them and counts their tokens."""
    ends: Literal["announced", "unknown"] = "unknown"
    """Whether a Heddle agent loop manager announces the ends of trajectories."""
    idle_s: Annotated[float, Bounds(above=0, below=1e9)] = 60.0
    """Seconds without a request after which a trajectory counts as ended."""
    out: str = ""
    """Folder for a run directory with the journal; "": none is written."""
    epoch_file: str = ""
    """File that gets the lengths of samples, for `heddle_verl.epochs`; "": none is written."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine of verl reports of itself; None for what it does not."""

    tp: int | None = None
    max_running: int | None = None
    max_context: int | None = None
    prompt_tokens: int | None = None
    """verl's `prompt_length`."""
    response_tokens: int | None = None
    """verl's `response_length`."""
    by_priority: bool = False
    """Whether its scheduling policy is by priority."""

    @staticmethod
    def of(config: Any) -> "EngineFacts":
        """Read verl's `RolloutConfig`, or a mapping with its fields."""

        def read(name: str) -> Any:
            is_mapping = isinstance(config, Mapping)
            return config.get(name) if is_mapping else getattr(config, name, None)

        def number(name: str) -> int | None:
            found = read(name)
            return found if isinstance(found, int) and found > 0 else None

        return EngineFacts(
            tp=number("tensor_model_parallel_size"),
            max_running=number("max_num_seqs"),
            max_context=number("max_model_len"),
            prompt_tokens=number("prompt_length"),
            response_tokens=number("response_length"),
            by_priority=read("scheduling_policy") == "priority",
        )


def read_settings(values: Mapping[str, Any]) -> RouterSettings:
    """Check the contents of the file.

    Raises:
        ConfigError: a key is missing, unknown, or of another type; with the remedy.
    """
    known = RouterSettings.__struct_fields__
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"{PLACE}: {key} is no key of a Heddle router. {hint}")
    if not values.get("model"):
        raise ConfigError(
            f"{PLACE}: model is missing: name the profile of the model that verl serves, as in "
            "model: qwen3-14b, with gpu: h100, or the path of a profile file"
        )
    if not values.get("gpu") and not str(values["model"]).endswith(".json"):
        raise ConfigError(
            f"{PLACE}: gpu is missing: name the GPU class of the profile, as in gpu: h100"
        )
    if values.get("ends", "unknown") not in ("announced", "unknown"):
        raise ConfigError(f"{PLACE}: ends is {values['ends']!r}: write announced or unknown")
    try:
        settings = msgspec.convert(values, RouterSettings)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise ConfigError(f"{PLACE}: {place.rstrip('`') or 'the file'}: {what}") from None
    check_bounds(settings, f"{PLACE}: ")
    if settings.epoch_file and not (settings.proxy and settings.ends == "announced"):
        raise ConfigError(
            f"{PLACE}: epoch_file needs counted tokens and known ends: set proxy: true, ends: "
            "announced, and Heddle's agent_loop_manager_class; or leave epoch_file out"
        )
    if needs_oracle(settings.policy):
        raise ConfigError(
            f"{PLACE}: policy: {settings.policy} knows the future, which only a replay has; take "
            "a policy without an oracle, such as heddle"
        )
    return settings


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A router's set-up, once it knows its engines."""

    settings: RouterSettings
    facts: EngineFacts
    setup: RunSetup

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV of an engine."""
        context = self.setup.context
        return self.settings.kv_tokens or context.cost.by_shape[context.shape].kv_capacity_tokens


def prepare_router(settings: RouterSettings, facts: EngineFacts, engines: int) -> Prepared:
    """Load profile, history and policy for so many engines.

    Raises:
        ConfigError: what the engines must report is neither reported nor in the file.
        ValueError: one of the packages' errors for bad input, with the remedy.
    """
    profile = _profile(settings)
    tp = _given("tp", settings.tp, facts.tp, "tensor_model_parallel_size")
    running = _given("max_running", settings.max_running, facts.max_running, "max_num_seqs")
    if tp not in profile.tps:
        raise ConfigError(
            f"{PLACE}: the profile of {profile.model} on {profile.gpu} has no TP {tp}, but "
            f"{', '.join(map(str, profile.tps))}: take a profile that has it, or give tp"
        )
    # The planner is of no use: verl starts the engines, and all of them alike.
    policy = f"{settings.policy}+given+keep_engines"
    config = RunConfig(
        trace=settings.task,
        seed=settings.seed,
        history=settings.history,
        predictor_model=settings.predictor_model,
        cluster=ClusterConfig(
            model=settings.model,
            gpu=profile.gpu,
            gpus=tp * max(engines, 1),
            tp=tp,
            tp_choices=(tp,),
            max_running=min(running, MAX_RUNNING),
        ),
        policy=PolicyConfig(preset=policy),
    )
    largest = settings.max_context or facts.max_context or 0
    workload = Workload(trace=ReplayedTrace(settings.task), trajectories=0, largest_tokens=largest)
    setup = prepare(config, workload=workload)
    admission = setup.policy.admission
    for_ever = admission.keeps_kv and getattr(admission, "keep_kv_s", None) is None
    if settings.ends == "unknown" and for_ever:
        # KV of trajectories that have ended would count as in use until they are idle too long.
        config = replace(config, policy=PolicyConfig(preset=f"{policy}+fitting"))
        setup = prepare(config, workload=workload)
    return Prepared(settings=settings, facts=facts, setup=setup)


def check(values: Mapping[str, Any]) -> RouterSettings:
    """Check a file as far as that can be done before an engine has reported.

    Raises:
        ValueError: one of the packages' errors for bad input, with the remedy.
    """
    settings = read_settings(values)
    assumed = EngineFacts(tp=min(_profile(settings).tps), max_running=1)
    prepare_router(settings, assumed, 1)
    return settings


def _profile(settings: RouterSettings) -> Profile:
    return profile_by_name(settings.model, settings.gpu)


def _given(key: str, given: int | None, reported: int | None, of_verl: str) -> int:
    found = given or reported
    if found is None:
        raise ConfigError(
            f"{PLACE}: {key} is missing, and these engines do not report it: give {key}, which is "
            f"rollout.{of_verl} of verl's configuration"
        )
    return found
