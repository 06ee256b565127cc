"""What commands and options of 0.1 are now, for the message where they are still written."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import rich_click as click
from click.exceptions import NoSuchCommand, NoSuchOption

KEYS: Final[Mapping[str, str]] = {
    "--pool": 'cluster.engines = [{gpu = "h100", gpus = 8}, {gpu = "l40s", gpus = 4, tp = 2}]',
    "--tag": 'policy.tags = ["swe=h800"]',
    "--expert-parallel": 'cluster.expert_parallel = "on"',
    "--prefill-threshold": "cluster.prefill_threshold = 2048",
    "--attention-dp": "cluster.attention_dp = 2",
    "--tool-capacity": "cluster.tool_capacity = 64",
    "--tool-pool": 'cluster.tool_pools = ["bash=64"]',
    "--env-latency": 'cluster.env_latency = "10,5"',
    "--seed": "seed = 3",
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
    "--roles": 'cluster.engines = [{role = "prefill", gpus = 2}, {role = "decode", gpus = 6}]',
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
    "--executor": 'runtime.executor = "ray"',
    "--objective": 'plan.objective = "cost"',
    "--figure": 'report.figure = "figure.svg"',
    "--report": "report.page = true",
    "--no-report": "report.page = false",
    "--open-to-all": "serve.open_to_all = true",
    "--format": 'logs.format = "otel"',
    "--skip-bad": "logs.skip_bad = true",
    "--tokenizer": 'logs.tokenizer = "tokenizer.json"',
    "--chars-per-token": "logs.chars_per_token = 3.6",
    "--workload": 'logs.workload = "coding"',
    "--drift": "synth.drift = 1.5",
    "--shrink": "synth.shrink = 4",
    "--ep": 'cluster.expert_parallel = "on"',
    "--precision": 'profile.precision = "fp8"',
    "--kv-precision": 'profile.kv_precision = "fp8"',
    "--source": 'profile.source = "roofline"',
    "--max-error": "profile.max_fit_error = 25",
    "--max-makespan-error": "profile.max_makespan_error = 5",
    "--max-p99-error": "profile.max_p99_error = 5",
    "--max-tpot-error": "profile.max_tpot_error = 5",
    "--min-finish-order": "profile.min_finish_order = 0.9",
    "--same-ranking": "profile.same_ranking = true",
    "--tie": "profile.tie = 1",
    "profile from-config --name": 'profile.name = "mine"',
    "policies check --gpus": "cluster.gpus = 8",
    "policies check --max-running": "cluster.max_running = 64",
    "profile measure --sweep": 'profile.sweep = "quick"',
    "profile measure --max-context": "profile.max_context = 2048",
    "profile measure --seed": "seed = 1",
    "serve --seed": "seed = 1",
    "serve --history": 'history = "prior"',
    "run --history": 'history = "prior"',
    "run --over-capacity": 'cluster.over_capacity = "drop"',
    "run --missing-tool-s": 'missing.tool_s = "typical"',
    "loop --over-capacity": 'cluster.over_capacity = "drop"',
    "serve --name": 'serve.names = ["mine"]',
    "trace synth --steps": "synth.batches = 4",
    "trace synth --env-start-s": "synth.env_start_s = 8",
    "trace synth --reward-s": "synth.reward_s = 3",
}
"""Keys that took the place of options, each with a value as TOML. An option of one command has its
name before it."""


GONE: Final[Mapping[str, str]] = {
    "--live": "agents of others come in through `heddle serve`; `make demo-agents` shows it",
    "compare --policy": "give --policies, which may be one",
    "--waterfall": "give --sweep policy.parts=waterfall, and --set report.figure=FILE to draw it",
    "--estimate-only": "leave it out: a plan is searched by simulation",
    "--planner": "leave it out: a plan is searched by simulation",
    "--cost": "leave it out: a plan is searched by simulation",
    "--predictor": "name it in the policy, as heddle+oracle",
    "--simulate": "leave it out: loops are searched by simulation",
    "--loop": "give --regimes best, or the regimes to choose from",
    "--perfetto": "the name of the file says it: -o run.json.gz",
    "--limit": "give the number after TRACE",
    "--samples-per-group": "it is --samples",
    "--profile": "it is --model",
    "--engine-key": "set HEDDLE_ENGINE_KEY in the environment",
    "--admin-key": "set HEDDLE_ADMIN_KEY in the environment",
    "--output": "it is --out",
    "--force": "remove the file, or name another",
    "trace resample --groups": "give the numbers after TRACE: GROUPS SAMPLES",
    "trace resample --samples": "give the numbers after TRACE: GROUPS SAMPLES",
    "profile fit --name": "it is --model",
    "trace extract --unfinished": "leave it out: what has ended of such a run is extracted",
    "runs --trace": "a WORD that is in the names of its runs finds them",
    "runs --policy": "a WORD that is the policy finds them",
    "runs --status": "a WORD that is the status finds them",
    "runs --open": "--page opens it on a terminal",
    "regimes check --config": "the regime is one of heddle.toml in the working folder",
}
"""Options of which another form took the place, or nothing, and what to do."""
VERBS: Final[Mapping[str, str]] = {
    "train": "python -m experiments real_training, in a checkout of Heddle",
    "simulate": "heddle compare TRACE --policies POLICY",
    "try": "heddle compare LOGS --tp best, and heddle plan LOGS",
    "calibrate": "heddle profile measure, heddle profile fit, heddle profile check",
    "trace validate": "heddle trace check TRACE",
    "predict describe": "heddle predict evaluate MODEL, without a trace",
}
"""Commands of 0.1, and what takes their place."""
SWEPT: Final[Mapping[str, str]] = {
    "--gpus": "cluster.gpus",
    "--max-running": "cluster.max_running",
}
"""Options of one value that took several to try, and their keys."""
SEVERAL: Final = re.compile(r"'([^']*,[^']*|best)'")


@contextmanager
def new_forms_named() -> Iterator[None]:
    """Let the error of a command or an option of 0.1 name what took its place.

    Raises:
        UsageError: in place of a `NoSuchCommand` of `VERBS`, a `NoSuchOption` of `KEYS` or `GONE`,
            or a `BadParameter` of `SWEPT` with several values.
    """
    try:
        yield
    except NoSuchCommand as error:
        name = _named(error.ctx, error.command_name)
        if name not in VERBS:
            raise
        said = f"`heddle {name}` is no command any more: {VERBS[name]}"
        raise click.UsageError(said, ctx=error.ctx) from None
    except NoSuchOption as error:
        said = _said(error.ctx, error.option_name)
        if not said:
            raise
        raise click.UsageError(said, ctx=error.ctx) from None
    except click.BadParameter as error:
        flag = error.param.opts[-1] if error.param is not None else ""
        several = SEVERAL.search(error.message)
        if flag not in SWEPT or several is None:
            raise
        said = f"{flag} takes one number: to try several, give --sweep {SWEPT[flag]}={several[1]}"
        raise click.UsageError(said, ctx=error.ctx) from None


def _named(context: click.Context | None, name: str) -> str:
    """A command or an option with the command that it is of, without the program."""
    path = "" if context is None else context.command_path.partition(" ")[2]
    return f"{path} {name}".strip()


def _said(context: click.Context | None, flag: str) -> str:
    """What took the place of an option; empty if it never was one."""
    names = (_named(context, flag), flag)
    gone = next((GONE[name] for name in names if name in GONE), None)
    line = next((KEYS[name] for name in names if name in KEYS), None)
    if names[0] in GONE or line is None:
        return "" if gone is None else f"{flag} went: {gone}"
    return (
        f"{flag} is a key of the configuration now: write {line} into heddle.toml, or give --set "
        f"'{line.replace(' = ', '=', 1)}'."
    )
