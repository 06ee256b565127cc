"""`heddle compare`: several policies on one trace and cluster."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from heddle.cli.options import executor, objective, positive_numbers, replayed, take_config

if TYPE_CHECKING:
    from heddle.cost.objective import Objective
    from heddle.executor_choice import ExecutorKind
    from heddle.tuning import Choice

BEST: Final = "best"


@click.command()
@click.option(
    "--policies",
    required=True,
    help="PRESET[+PART...], separated by commas; the first is the reference",
)
@click.option("--seeds", type=int, default=1, show_default=True, help="Runs of each policy")
@click.option("--seed", type=int, default=None, help="The first seed [0]")
@click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]")
@executor
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table")
@click.option(
    "--tp",
    default=None,
    help="TP degree of all engines of policies that do not plan; 1,2,4,8 tries each, best all "
    "that fit [1]",
)
@click.option(
    "--max-running",
    default=None,
    help="Steps that an engine runs at once; 100,200 tries each with policies that do not plan, "
    "best several up to the profile's largest batch [100]",
)
@objective
@click.option(
    "--roles",
    default=None,
    help="GPUs by role, prefill=2,decode=6; best tries some splits beside engines that do both "
    "[all engines do both]",
)
@partial(replayed, but=("--tp", "--max-running", "--roles"))
def compare(
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    policies: str,
    seeds: int,
    seed: int | None,
    jobs: int | None,
    executor: "ExecutorKind",
    tp: str | None,
    max_running: str | None,
    objective: "Objective",
    roles: str | None,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace under several policies on the same cluster and put the results side by side.

    A seed draws values that the trace lacks and permutes the order of its groups, alike for every
    policy. With several seeds, the spread is the 95 % confidence interval of the mean.

    With several --tp or --max-running, or best, each policy that does not plan its engines runs at
    every combination, and the table has its best by --objective: found on the trace that it is
    compared on, so the hindsight is the baselines'. Policies with a planner run once, with the most
    steps that are tried. Engines of several TP degrees are --set cluster.mix=[4,2,1,1].

    With --roles best every policy also runs with engines that prefill and engines that decode, on
    the same GPUs, at up to three splits for each setting; the best split is a row of its own.

    A policy is a preset, an installed policy or package.module:factory. PRESET+PART puts a part in
    place of the preset's own, any number of times: heddle+never, verl+lpt+progressive;
    `heddle policies` lists both. A part of your own is +package.module:factory. The parts oracle,
    noisy-oracle:SIGMA and paper_quality know the trace: no result, and their runs say so.
    """
    from heddle.cli.progress import progress, running
    from heddle.cli.show import comparison
    from heddle.comparison import compare as compared

    names = [name.strip() for name in policies.split(",") if name.strip()]
    tps, slots = _tried("--tp", tp), _tried("--max-running", max_running)
    best_roles = roles is not None and roles.strip() == BEST
    options["roles"] = None if best_roles else roles
    options["tp"] = tp if tps is None else None
    options["max_running"] = int(max_running) if max_running and slots is None else None
    config, text = take_config(sources, options, settings, seed=seed, roles_tried=best_roles)
    with progress("reading", "trajectories") as bar:

        def show(every: Sequence[str], done: Sequence[int], each: int) -> None:
            over = sum(n >= each for n in done)
            bar.now(f"{running(every, done, each)} ({over} of {len(every)} runs done)")
            bar.at(sum(done), each * len(every))

        result = compared(
            config,
            names,
            tps=tps,
            slots=slots,
            objective=objective,
            roles=best_roles,
            seeds=seeds,
            out=out,
            jobs=jobs,
            executor=executor,
            config_text=text,
            on_progress=show if bar.seen else None,
        )
    if as_json:
        click.echo(json.dumps(result.plain(), allow_nan=False))
    else:
        comparison(result)


def _tried(flag: str, text: str | None) -> "Choice":
    """Read the value of an option: `best`, several numbers, or one, which is nothing to try.

    Raises:
        ConfigError: it is none of them.
    """
    from heddle.config_files import ConfigError

    if text is None:
        return None
    if text.strip() == BEST:
        return BEST
    numbers = positive_numbers(text)
    if not numbers:
        raise ConfigError(
            f"{flag} {text}: write a number, several to try as 1,2,4, or {BEST}; "
            "all must be 1 or more"
        )
    return numbers if len(numbers) > 1 else None
