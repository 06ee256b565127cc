"""`heddle predict`: fit a length predictor on traces, evaluate it on others, describe it."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from heddle_predict.artefact import Artefact
    from heddle_predict.corpus import Source
    from heddle_predict.evaluate import ByStep

_PATH = click.Path(path_type=Path)
_TRACES = click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=_PATH)


class NumberRange(click.FloatRange):
    """Numbers of a range; refuses "nan", which no bound of `click.FloatRange` does."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value} is not a number.", param, ctx)
        return number


@click.group()
def predict() -> None:
    """Learn from traces how many tokens a trajectory still has to generate."""


@predict.command()
@_TRACES
@click.option("-o", "--out", "output", metavar="MODEL.heddle", required=True, type=_PATH)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def fit(traces: tuple[Path, ...], output: Path, seed: int) -> None:
    """Learn from every TRACE and write MODEL.heddle; nothing is written when that fails."""
    from heddle.cli.progress import progress
    from heddle_predict.artefact import SUFFIX, write_artefact
    from heddle_predict.corpus import read_source
    from heddle_predict.fit import fit as fitted

    if output.suffix != SUFFIX or not output.absolute().parent.is_dir():
        raise click.UsageError(f"-o {output}: name a *{SUFFIX} file in a folder that exists")
    sources = [read_source(path) for path in traces]
    names = [path.name for path in traces]
    command = shlex.join(
        ["heddle", "predict", "fit", *names, "-o", output.name, "--seed", str(seed)]
    )
    with progress("fitting trees"):
        artefact = fitted(sources, seed=seed, command=command)
        sha256 = write_artefact(output, artefact)
    for source in sources:
        if source.dropped:
            click.echo(f"{source.name}: left out {source.dropped:,} of unknown length", err=True)
    click.echo(
        f"{output}: trees, {artefact.header.examples:,} examples of "
        f"{sum(len(s.scripts) for s in sources):,} trajectories, error {artefact.header.error:.3f} "
        f"(natural log, groups left out), sha256 {sha256[:16]}"
    )


@predict.command()
@click.argument("model", metavar="MODEL", type=_PATH)
@click.argument("traces", metavar="[TRACE...]", nargs=-1, type=_PATH)
@click.option(
    "--slots",
    type=NumberRange(0.0, 1.0, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of a trace's trajectories that run at once",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables")
def evaluate(model: Path, traces: tuple[Path, ...], slots: float, as_json: bool) -> None:
    """Evaluate MODEL on every TRACE, played as a rollout that it has not seen.

    Recall is that of the longest 20 %; columns are steps that a trajectory has finished. Without a
    TRACE, MODEL's kind, inputs and training data are shown.
    """
    if not traces:
        _describe(model, as_json)
        return
    from heddle.cli.progress import progress
    from heddle_predict.artefact import read_artefact
    from heddle_predict.corpus import read_source
    from heddle_predict.evaluate import judge_model, untrained
    from heddle_predict.models import model_from
    from heddle_predict.play import Pace

    artefact = read_artefact(model)
    loaded = model_from(artefact, model)
    sources = [read_source(path) for path in traces]
    pace = Pace(slots=slots)
    found: dict[str, dict[str, ByStep]] = {}
    with progress(f"evaluating on {len(sources)} traces"):
        for source in sources:
            judged = judge_model(loaded, source, pace)
            found[source.name] = {artefact.header.kind: judged, **untrained(source, pace)}
    known = [trained.sha256 for trained in artefact.header.trained_on]
    for source in sources:
        if source.sha256 in known:
            click.echo(f"{source.name}: the model was trained on this trace", err=True)
        tasks = dict.fromkeys(script.task for script in source.scripts)
        strange = [repr(task) for task in tasks if task not in artefact.header.tasks]
        if strange:
            note = f"the model has not met {', '.join(strange)}, for which runs use progressive"
            click.echo(f"{source.name}: {note}", err=True)
    if as_json:
        click.echo(json.dumps(_plain(model, artefact, sources, found), allow_nan=False))
        return
    from heddle.cli.tables import show_rows

    for source in sources:
        head = (
            f"{source.name}: {len(source.scripts):,} trajectories, {len(source.groups()):,} groups"
        )
        click.echo(click.style(head, bold=True))
        show_rows(_judged(found[source.name]))
        show_rows(_calibrated(found[source.name][artefact.header.kind], artefact.header.levels))


def _describe(model: Path, as_json: bool) -> None:
    from textwrap import fill

    from rich.table import Table

    from heddle.cli.tables import show
    from heddle_predict.artefact import read_artefact

    artefact = read_artefact(model)
    header = artefact.header
    if as_json:
        import msgspec

        plain = msgspec.to_builtins(header) | {"sha256": artefact.sha256}
        click.echo(json.dumps(plain))
        return
    table = Table(box=None, show_header=False)
    settings = ", ".join(f"{k} {v}" for k, v in header.settings.items())
    rows = [
        ("kind", f"{header.kind} ({settings})" if settings else header.kind),
        ("schema", f"{header.schema}, written by Heddle {header.heddle}"),
        ("sha256", artefact.sha256),
        ("command", header.command),
        ("seed", str(header.seed)),
        ("examples", f"{header.examples:,}"),
        ("error", f"{header.error:.3f} (natural log, on groups left out of training)"),
        ("quantiles", ", ".join(f"{level:g}" for level in header.levels)),
        ("features", f"{len(header.features)}: {', '.join(header.features)}"),
        ("tools", ", ".join(header.tools) or "none by name"),
        ("size", f"{sum(a.size for a in artefact.arrays.values()):,} numbers"),
    ]
    for name, text in rows:
        table.add_row(name, fill(text, 100))
    for trained in header.trained_on:
        table.add_row(
            "trained on",
            f"{trained.name}: {trained.trajectories:,} trajectories, {trained.groups:,} groups, "
            f"sha256 {trained.sha256[:16]}",
        )
    for task, levels in header.tasks.items():
        table.add_row(
            "task",
            f"{task}: {levels.total_tokens:,.0f} output tokens a trajectory, "
            f"{levels.step_tokens:,.0f} a step, {levels.payload_tokens:,.0f} a tool answer",
        )
    show(table)


_FIGURES: Final = {
    "recall": ("recall", ".2f"),
    "pearson": ("Pearson", ".2f"),
    "spearman": ("Spearman", ".2f"),
    "median_error_tokens": ("median error, tokens", ",.0f"),
}


def _judged(found: Mapping[str, ByStep]) -> list[dict[str, str]]:
    first = next(iter(found.values()))
    rows = [{"": "trajectories", "predictor": "", **_cells(first, "trajectories", "d")}]
    for key, (title, form) in _FIGURES.items():
        for name, judged in found.items():
            rows.append({"": title, "predictor": name, **_cells(judged, key, form)})
            title = ""
    return rows


def _cells(judged: ByStep, key: str, form: str) -> dict[str, str]:
    return {f"{at} steps": f"{getattr(f, key):{form}}" if f else "-" for at, f in judged.items()}


def _calibrated(judged: ByStep, levels: Sequence[float]) -> list[dict[str, str]]:
    return [
        {
            "at or below quantile": f"{level:g}",
            **{f"{at} steps": f"{f.coverage[i]:.2f}" if f else "-" for at, f in judged.items()},
        }
        for i, level in enumerate(levels)
    ]


def _plain(
    path: Path,
    artefact: Artefact,
    sources: Sequence[Source],
    found: Mapping[str, Mapping[str, ByStep]],
) -> dict[str, Any]:
    traces = [
        {
            "trace": source.name,
            "sha256": source.sha256,
            "trajectories": len(source.scripts),
            "groups": len(source.groups()),
            "dropped": source.dropped,
            "predictors": {
                name: {str(step): asdict(f) if f else None for step, f in judged.items()}
                for name, judged in found[source.name].items()
            },
        }
        for source in sources
    ]
    return {
        "schema": "heddle.predict.evaluate/1",
        "model": str(path),
        "sha256": artefact.sha256,
        "kind": artefact.header.kind,
        "levels": artefact.header.levels,
        "traces": traces,
    }
