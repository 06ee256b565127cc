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
    "--tool-pool": 'cluster.tool_pools = ["bash=64"]',
    "--price": "prices.h100 = 2.1",
    "--roles": 'cluster.engines = [{role = "prefill", gpus = 2}, {role = "decode", gpus = 6}]',
    "--max-context": "runtime.max_context = 8192",
    "--render-option": 'serve.render_options = ["--tool-call-parser=hermes"]',
    "--steps": "loop.batches = 10",
    "--groups": "loop.groups = 32",
    "--samples": "loop.samples = 16",
    "--env-start-s": 'loop.env_start_s = "10,5"',
    "--reward-s": 'loop.reward_s = "5,1"',
    "--report": "report.page = true",
    "--no-report": "report.page = false",
    "--tokenizer": 'logs.tokenizer = "tokenizer.json"',
    "--ep": 'cluster.expert_parallel = "on"',
    "--max-error": "profile.max_fit_error = 25",
    "profile measure --max-context": "profile.max_context = 2048",
    "serve --name": 'serve.names = ["mine"]',
    "trace synth --steps": "synth.batches = 4",
    "trace synth --env-start-s": "synth.env_start_s = 8",
    "trace synth --reward-s": "synth.reward_s = 3",
}
"""Keys that took the place of options with other names, or with one that several sections have, and
a value of each as TOML. An option of one command has its name before it."""


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
    lines = [KEYS[name] for name in names if name in KEYS][:1]
    keys = [] if lines or gone else _keys_named(flag)
    if names[0] in GONE or not (lines or keys):
        return "" if gone is None else f"{flag} went: {gone}"
    more = f" `heddle config explain {keys[0]}` says what it takes." if keys else ""
    lines = lines or [f"{key} = VALUE" for key in keys]
    settings = " or ".join(f"'{line.replace(' = ', '=', 1)}'" for line in lines)
    return (
        f"{flag} is a key of the configuration now: write {' or '.join(lines)} into heddle.toml, "
        f"or give --set {settings}.{more}"
    )


def _keys_named(flag: str) -> list[str]:
    """Keys of which an option has the name, with the section or without."""
    from heddle.config_reference import reference

    name = flag.lstrip("-").replace("-", "_")
    return [
        key.name
        for key in reference()
        if name in (key.name.rpartition(".")[2], key.name.replace(".", "_"))
    ]
