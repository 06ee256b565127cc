"""`heddle try`: from logs to a comparison, a plan and a page, in one folder."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from heddle.cli.compare import written_page
from heddle.cli.engine_options import tp_degrees
from heddle.cli.given_options import given_options
from heddle.cli.options import planned, take_config
from heddle.cli.sweeps import BEST
from heddle.cli.trace_import import log_options

if TYPE_CHECKING:
    from heddle.comparison.tuning import Choice
    from heddle.config import MissingConfig, RunConfig
    from heddle_trace import Trace

SCHEMA: Final = "heddle.try/1"
ROLLOUT: Final = 256
"""Trajectories of a rollout whose groups are not named."""

PAGE: Final = "report.html"
MOST_SAMPLES: Final = 16
LONGEST_WAIT_S: Final = 300.0
USUAL: Final = {
    "missing.tool_s": "typical",
    "missing.cap_tool_s": LONGEST_WAIT_S,
    "cluster.over_capacity": "drop",
}
"""Rules for what logs of people and services have and a rollout has not."""


@click.command("try")
@log_options
@click.option(
    "--groups",
    type=click.IntRange(1, 100_000),
    default=None,
    help=f"Groups of the rollout [as many as make {ROLLOUT} trajectories]",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 10_000),
    default=None,
    help=f"Trajectories of each group [those of the logs' median group, at most {MOST_SAMPLES}]",
)
@click.option(
    "--policies",
    default="verl,slime,heddle",
    show_default=True,
    help="PRESET[+PART...], separated by commas; the first is the reference",
)
@click.option(
    "--tp",
    default="best",
    show_default=True,
    help="TP degrees of engines of policies that do not plan: 1, or 1,2,4,8, or best",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all that is drawn")
@click.option("--jobs", type=int, default=None, help="Worker processes [as many as pay]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder for trace, rollout, runs and page; new or empty [try-NAME of the first log]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
@click.pass_context
@partial(planned, also=["--over-capacity"], metavar="LOGS...")
def try_logs(
    context: click.Context,
    sources: tuple[str, ...],
    settings: tuple[str, ...],
    format_: str,
    skip_bad: bool,
    tokenizer: str | None,
    chars_per_token: float,
    groups: int | None,
    samples: int | None,
    policies: str,
    tp: str,
    seed: int,
    jobs: int | None,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Import LOGS, draw a rollout from them, and find which policy finishes it first.

    LOGS are files or folders of one format (`heddle trace import` lists them), or a trace. One
    folder then has the trace, the rollout, all runs and a page. Recorded values stay as they are.
    Other defaults here than elsewhere: --missing-tool-s typical, missing.tool_tokens and
    missing.prompt_tokens sample or zero, missing.cap_tool_s 300, --over-capacity drop. The output
    counts what they change.
    """
    logs = list(sources)
    folder = _free_folder(out or Path(f"try-{_stem(logs[0])}"))
    trace, rollout = folder / "trace.jsonl.gz", folder / "rollout.jsonl.gz"
    config, text = take_config([str(rollout)], options, settings, usual=USUAL, seed=seed)
    degrees: Choice = BEST if tp == BEST else tp_degrees(tp)["mix"] or [tp_degrees(tp)["tp"]]
    given = {"format": format_, "skip_bad": skip_bad, "tokenizer": tokenizer}
    answer: dict[str, Any] = {"schema": SCHEMA}
    made, answer["import"], answer["trace"] = _imported(
        logs, trace, {**given, "chars_per_token": chars_per_token}, as_json
    )
    answer["rollout"] = _drawn(made, rollout, groups, samples, seed, as_json)
    config = replace(config, missing=_rules(made, config.missing))
    names = [name.strip() for name in policies.split(",") if name.strip()]
    answer["comparison"], page = _compared(config, text, names, degrees, jobs, folder, as_json)
    answer["plan"] = _planned(config, as_json)
    answer["page"] = None if page is None else str(page)
    if as_json:
        click.echo(json.dumps(answer, allow_nan=False))
    else:
        _next(context, config, page)


def _stem(log: str) -> str:
    path = Path(log)
    return (path.resolve().name or "logs").split(".")[0] or "logs"


def _free_folder(folder: Path) -> Path:
    """Check that a folder is new, or empty.

    Raises:
        OutputError: it is a file, or has something in it.
    """
    from heddle.cli.outputs import OutputError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder}: exists and is not empty; name another folder with --out")
    return folder


def _imported(
    logs: list[str], trace: Path, given: dict[str, Any], as_json: bool
) -> "tuple[Trace, dict[str, Any] | None, dict[str, Any]]":
    """The trace of the logs, the import and the description as JSON.

    A single trace is taken as it is: no import.
    """
    from heddle.cli.progress import progress
    from heddle.cli.trace import show_description
    from heddle.cli.trace_import import import_lines
    from heddle.raw_logs import is_trace
    from heddle_trace import describe, read_trace
    from heddle_trace.importers import import_trace

    with progress("importing") as bar:
        if len(logs) == 1 and is_trace(Path(logs[0])):
            trace, report = Path(logs[0]), None
            made = read_trace(trace)
        else:

            def on_progress(read: int, written: int) -> None:
                if bar.seen and written % 100 == 0:
                    bar.now(f"importing: {read:,} records read, {written:,} trajectories written")

            with _folder_of(trace):
                report = import_trace(logs, trace, on_progress=on_progress, **given)
            made = read_trace(trace)
        bar.now("describing")
        stats = describe(made)
    if not as_json:
        lines = [] if report is None else import_lines(report, trace)
        click.echo("\n".join(["1. import", *lines, "", "2. describe"]))
        show_description(stats)
    imported = None if report is None else {"trace": str(trace), **asdict(report)}
    return made, imported, {"trace": str(trace), **asdict(stats)}


def _drawn(
    trace: "Trace",
    rollout: Path,
    groups: int | None,
    samples: int | None,
    seed: int,
    as_json: bool,
) -> dict[str, Any]:
    from statistics import median_low

    from heddle.cli.progress import progress
    from heddle.cli.trace_make import drawn_lines
    from heddle_trace import write_trace
    from heddle_trace.resample import resample
    from heddle_trace.table import Records

    sizes = [len(v) for v in Records.of(trace.records).trajectory("group_id").occurring().values()]
    each = samples or min(MOST_SAMPLES, median_low(sizes))
    count = groups or -(-ROLLOUT // each)
    if count * each > 1_000_000:
        raise click.UsageError(f"{count:,} x {each:,} trajectories; draw 1,000,000 at most")
    with progress("drawing a rollout"), _folder_of(rollout):
        records, report = resample(trace, groups=count, samples=each, seed=seed)
        written = write_trace(rollout, records)
    if not as_json:
        click.echo("\n".join(["", "3. resample", *drawn_lines(report, rollout, written.sha256)]))
    return {"trace": str(rollout), "seed": seed, "sha256": written.sha256, **asdict(report)}


def _rules(trace: "Trace", given: "MissingConfig") -> "MissingConfig":
    """Rules for missing sizes: as given, else drawn from recorded ones, else 0."""
    from heddle_trace.table import Records

    records = Records.of(trace.records)
    prompts = records.trajectory("prompt_tokens").known.any()
    sizes = records.step("tool_tokens").known.any()
    found = replace(given)
    if given.prompt_tokens == "error":
        found = replace(found, prompt_tokens="sample" if prompts else "zero")
    if given.tool_tokens == "error":
        found = replace(found, tool_tokens="sample" if sizes else "zero")
    return replace(found, output_tokens="sample")


def _compared(
    config: "RunConfig",
    text: str | None,
    policies: list[str],
    degrees: "Choice",
    jobs: int | None,
    folder: Path,
    as_json: bool,
) -> tuple[dict[str, Any], Path | None]:
    """Compare, and write the page; None without one."""
    from heddle.cli.progress import progress, running
    from heddle.cli.show import comparison
    from heddle.comparison.compare import compare
    from heddle.runs.comparison_folder import write_index

    if not as_json:
        click.echo("\n4. compare")
    with progress("comparing", "trajectories") as bar:

        def show(every: Any, done: Any, each: int) -> None:
            bar.now(running(every, done, each))
            bar.at(sum(done), each * len(every))

        result = compare(
            config,
            policies,
            tps=degrees,
            out=folder / "runs",
            jobs=jobs,
            config_text=text,
            on_progress=show if bar.seen else None,
        )
    plain = result.plain()
    write_index(folder / "runs", plain)
    if not as_json:
        comparison(result)
    best = [run.path for row in result.best for run in row.runs]
    return plain, written_page(best, folder / PAGE)


def _planned(config: "RunConfig", as_json: bool) -> dict[str, Any]:
    from heddle.cli.progress import progress
    from heddle.cli.show_plan import show_plan
    from heddle.planning.plan import plan
    from heddle.planning.simulation import replayed
    from heddle.setup import Workspace

    if not as_json:
        click.echo("\n5. plan")
    shared = Workspace()
    with progress("planning"):
        found = replayed(plan(config, workspace=shared), shared)
    if not as_json:
        show_plan(found)
    return found.plain()


def _next(context: click.Context, config: "RunConfig", page: Path | None) -> None:
    rules = asdict(config.missing)
    flags = {
        "--policies": context.params["policies"],
        "--tp": context.params["tp"],
        "--missing-tool-s": rules.pop("tool_s"),
        "--over-capacity": config.cluster.over_capacity,
    }
    named = {flag.lstrip("-").replace("-", "_") for flag in flags}
    words = [
        *(config.trace, "--seeds", "3"),
        *given_options(context, but={*_OWN, *named}),
        *(str(word) for pair in flags.items() for word in pair),
    ]
    for key, value in rules.items():
        words += ["--set", f"missing.{key}={value}"]
    click.echo("" if page is None else f"\nnext: open {page} in a browser")
    click.echo(f"next: heddle compare {shlex.join(words)}")
    click.echo("next: heddle policies, which lists more policies and parts to compare")


_OWN: Final = (
    "sources",
    "format_",
    "skip_bad",
    "tokenizer",
    "chars_per_token",
    "groups",
    "samples",
    "jobs",
    "out",
    "as_json",
)
"""Parameters that `heddle compare` does not have, or that are of these runs."""


@contextmanager
def _folder_of(file: Path) -> Iterator[None]:
    """Make the folder of a file; without it again if nothing came of the file."""
    new = not file.parent.exists()
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if new:
            with suppress(OSError):
                file.parent.rmdir()
        raise
