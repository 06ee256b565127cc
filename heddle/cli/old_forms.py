"""What options of 0.1 are now, for the message to who still writes them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import rich_click as click
from click.exceptions import NoSuchOption

KEYS: Final[Mapping[str, str]] = {
    "--pool": 'cluster.pool = ["h100:8", "l40s:4:tp=2"]',
    "--tag": 'policy.tags = ["swe=h800"]',
    "--expert-parallel": 'cluster.expert_parallel = "on"',
    "--prefill-threshold": "cluster.prefill_threshold = 2048",
    "--attention-dp": "cluster.attention_dp = 2",
    "--tool-capacity": "cluster.tool_capacity = 64",
    "--tool-pool": 'cluster.tool_pools = ["bash=64"]',
    "--env-latency": 'cluster.env_latency = "10,5"',
    "--engine-start-s": "cluster.engine_start_s = 60",
    "--standby-tp": "cluster.standby_tp = [4, 8]",
    "--host-kv": 'cluster.host_kv = "engine"',
    "--failures": 'cluster.failures = "e0@120"',
    "--prediction-s": "cluster.prediction_s = 0.1",
    "--predictor-model": 'predictor_model = "own.heddle"',
    "--missing-tool-tokens": 'missing.tool_tokens = "sample"',
    "--missing-prompt-tokens": 'missing.prompt_tokens = "sample"',
    "--missing-output-tokens": 'missing.output_tokens = "sample"',
    "--cap-tool-s": "missing.cap_tool_s = 300",
    "--price": "prices.h100 = 2.1",
    "--roles": 'cluster.roles = "prefill=2,decode=6"',
}
"""Keys that took the place of options, each with a value as TOML."""


@contextmanager
def new_forms_named() -> Iterator[None]:
    """Let the error of an option of 0.1 name the key that took its place.

    Raises:
        UsageError: in place of a `NoSuchOption` of `KEYS`.
    """
    try:
        yield
    except NoSuchOption as error:
        line = KEYS.get(error.option_name)
        if line is None:
            raise
        raise click.UsageError(
            f"{error.option_name} is a key of the configuration now: write {line} into "
            f"heddle.toml, or give --set '{line.replace(' = ', '=', 1)}'.",
            ctx=error.ctx,
        ) from None
