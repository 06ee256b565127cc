"""What options of 0.1 are now, for the message where they are still written."""

import re
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
    "--launcher": 'runtime.launcher = "ray"',
    "--time-scale": "runtime.time_scale = 0.1",
    "--tool-limit-s": "runtime.tool_limit_s = 60",
    "--kv-transfer": 'runtime.kv_transfer = "nixl"',
    "--max-context": "runtime.max_context = 8192",
    "--max-open": "serve.max_open = 1000",
    "--idle-s": "serve.idle_s = 1800",
    "--keep-answer-s": "serve.keep_answer_s = 60",
    "--engine-wait-s": "serve.engine_wait_s = 300",
    "--user-is-session": "serve.user_is_session = true",
    "--list-itself": "serve.list_itself = true",
    "--render-option": 'serve.render_options = ["--tool-call-parser=hermes"]',
    "--fake-tokens": "serve.fake_tokens = 128",
    "--fake-replies": 'serve.fake_replies = "replies.jsonl"',
    "--train-gpus": "loop.train_gpus = 8",
    "--colocated": "loop.colocated = true",
    "--steps": "loop.batches = 10",
    "--groups": "loop.groups = 32",
    "--samples": "loop.samples = 16",
    "--repeat": "loop.repeat = true",
    "--train-backend": 'loop.train_backend = "fsdp"',
    "--train-tp": "loop.train_tp = 4",
    "--train-pp": "loop.train_pp = 2",
    "--optimizer-steps": "loop.optimizer_steps = 1",
    "--logprob-passes": "loop.logprob_passes = 1",
    "--update-method": 'loop.update_method = "nccl"',
    "--env-start-s": 'loop.env_start_s = "10,5"',
    "--env-capacity": "loop.env_capacity = 64",
    "--environments": "loop.environments = 256",
    "--env-failure-rate": "loop.env_failure_rate = 0.1",
    "--env-timeout-s": "loop.env_timeout_s = 60",
    "--env-retries": "loop.env_retries = 1",
    "--reward-s": 'loop.reward_s = "5,1"',
    "--reward-gpus": "loop.reward_gpus = 2",
    "--reward-per-gpu": "loop.reward_per_gpu = 8",
    "--reward-capacity": "loop.reward_capacity = 64",
    "--reward-cold-start-s": "loop.reward_cold_start_s = 10",
    "--reward-keep-alive-s": "loop.reward_keep_alive_s = 60",
    "--reward-failure-rate": "loop.reward_failure_rate = 0.1",
    "--reward-timeout-s": "loop.reward_timeout_s = 60",
    "--reward-retries": "loop.reward_retries = 1",
    "--switch-failure-rate": "loop.switch_failure_rate = 0.1",
    "--switch-timeout-s": "loop.switch_timeout_s = 180",
}
"""Keys that took the place of options, each with a value as TOML."""


GONE: Final[Mapping[str, str]] = {
    "--live": "agents of others come in through `heddle serve`; `make demo-agents` shows it",
}
"""Options that nothing takes the place of, and what to do."""
SWEPT: Final[Mapping[str, str]] = {
    "--gpus": "cluster.gpus",
    "--max-running": "cluster.max_running",
}
"""Options of one value that took several to try, and their keys."""
SEVERAL: Final = re.compile(r"'([^']*,[^']*|best)'")


@contextmanager
def new_forms_named() -> Iterator[None]:
    """Let the error of an option of 0.1 name what took its place.

    Raises:
        UsageError: in place of a `NoSuchOption` of `KEYS` or `GONE`, or of a `BadParameter` of
            `SWEPT` with several values.
    """
    try:
        yield
    except click.BadParameter as error:
        flag = error.param.opts[-1] if error.param is not None else ""
        several = SEVERAL.search(error.message)
        if flag not in SWEPT or several is None:
            raise
        said = f"{flag} takes one number: to try several, give --sweep {SWEPT[flag]}={several[1]}"
        raise click.UsageError(said, ctx=error.ctx) from None
    except NoSuchOption as error:
        if error.option_name in GONE:
            said = f"{error.option_name} went: {GONE[error.option_name]}"
            raise click.UsageError(said, ctx=error.ctx) from None
        line = KEYS.get(error.option_name)
        if line is None:
            raise
        raise click.UsageError(
            f"{error.option_name} is a key of the configuration now: write {line} into "
            f"heddle.toml, or give --set '{line.replace(' = ', '=', 1)}'.",
            ctx=error.ctx,
        ) from None
