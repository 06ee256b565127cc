"""A gateway's configuration, checked and set up before anything starts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from heddle.cluster.profiles import load_profiles
from heddle.config import RunConfig
from heddle.config_files import ConfigError
from heddle.gateway.arrivals import with_arrivals
from heddle.gateway.config import GatewayConfig, check
from heddle.setup import RunSetup, prepare
from heddle.workload import ReplayedTrace, Workload
from heddle_gateway.app import raise_file_limit
from heddle_gateway.fake_engines import CONTEXT_TOKENS
from heddle_runtime.vllm.checks import read_model

TRACE = "gateway"
"""In place of the trace's name: what trajectories do is up to the clients."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")
"""Files of a model's folder, any of which is a tokenizer."""
MOST_RESTARTS = 1_000_000


def prepared(config: RunConfig, gateway: GatewayConfig) -> tuple[RunSetup, GatewayConfig, int]:
    """Check and set up a gateway; return the tokens of the longest context too.

    Raises:
        ValueError: one of the packages' errors for bad input.
    """
    check(config, gateway)
    config = with_arrivals(config)
    context_tokens = _context_tokens(config)
    if config.runtime.launcher == "ray" and config.runtime.engine == "vllm":
        # Started on the nodes, they are engines by URL.
        config = replace(config, runtime=replace(config.runtime, engine="http"))
        gateway = replace(gateway, engine_tps=config.cluster.mix)
    tp = gateway.engine_tp or config.cluster.tp
    gateway = replace(gateway, engine_tp=tp)
    config = _with_engines_that_join(with_tokenizer(config), (tp, *gateway.engine_tps))
    raise_file_limit(gateway.front.max_open)
    largest = min(context_tokens, 1 << 20)
    work = Workload(trace=ReplayedTrace(TRACE), trajectories=0, largest_tokens=largest)
    return prepare(config, workload=work), gateway, context_tokens


def with_tokenizer(config: RunConfig) -> RunConfig:
    """The same with vLLM's tokenizer if the model has one: clients may set stop strings."""
    runtime = config.runtime
    folder = Path(runtime.model_dir)
    found = runtime.engine == "vllm" and any((folder / name).exists() for name in _TOKENIZERS)
    return replace(config, runtime=replace(runtime, tokenizer=True)) if found else config


def _with_engines_that_join(config: RunConfig, tps: Sequence[int]) -> RunConfig:
    """The same for engines by URL: they are no part of a plan, and have any TP degree.

    Raises:
        ConfigError: the profile has none of `tps`.
    """
    if config.runtime.engine != "http":
        return config
    cluster = replace(config.cluster, mix=(), tp_choices=None)
    profile, *others = (each.profile for each in load_profiles(cluster).classes)
    for tp in (tp for tp in tps if tp not in profile.tps):
        raise ConfigError(
            f"--tp {tp}: the profile of {profile.model} on {profile.gpu} has TP "
            f"{', '.join(map(str, profile.tps))}: give one of these, or a profile that has it"
        )
    of_all = [tp for tp in profile.tps if all(tp in other.tps for other in others)]
    if not of_all:
        text = "cluster.engines: the profiles of these types have no TP degree in common"
        raise ConfigError(text)
    gpus = max(of_all) * cluster.attention_dp
    pool = tuple(replace(each, gpus=gpus, tp=None) for each in cluster.pool)
    cluster = replace(cluster, gpus=gpus, pool=pool, tp=min(of_all), tp_choices=tuple(of_all))
    # Those that others started come back by themselves, however often they fail.
    cluster = replace(cluster, restarts=MOST_RESTARTS)
    policy = replace(config.policy, preset=f"{config.policy.preset}+given+keep_engines")
    return replace(config, cluster=cluster, policy=policy)


def _context_tokens(config: RunConfig) -> int:
    """The longest context: as configured, as the model has it, or as engines will say."""
    runtime = config.runtime
    if runtime.max_context is not None:
        return runtime.max_context
    if runtime.engine == "vllm":
        return read_model(runtime.model_dir, weights=False).max_context
    return CONTEXT_TOKENS if runtime.engine == "fake" else 1 << 20
