"""`python -m tools.profiles scorecard`: one page of every error that is known, with what fails.

TPOT and TTFT of published runs by model and GPU type, KV capacity, makespans of real engines,
training and weight updates. Each line has its target; those beyond it are listed again.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import click
import numpy as np

from heddle_calibrate.roofline.gpu_classes import GPU_CLASSES
from heddle_calibrate.roofline.missing_layouts import with_layouts
from heddle_calibrate.roofline.pairs import shape_of
from heddle_calibrate.roofline.profile import RooflineError, profile_from_shape
from heddle_calibrate.roofline.slower_layouts import shown_seconds
from heddle_calibrate.serving.errors import (
    ServingReport,
    by_profile,
    predict_rows,
    shipped_profiles,
)
from heddle_calibrate.serving.published_rows import PublishedRowsError
from heddle_calibrate.serving.rows import ENGINES, read_serving_rows
from heddle_calibrate.serving.samples import samples
from heddle_core.ids import EngineShape
from heddle_sim.profile_files import Profile, read_layout
from heddle_sim.training_files import TRAINING_FILE
from tools.profiles.kv_sizes import FAULTY, kv_sizes
from tools.profiles.serving import (
    FittedServing,
    errors_of_groups,
    fit_rows,
    left_out_errors,
)
from tools.profiles.serving_fit import left_out_runs
from tools.profiles.serving_floor import floors

ROOT = Path(__file__).resolve().parents[2]
MAKESPANS = ROOT / "experiments" / "real_cpu" / "results.json"
SERVING = ("measured_serving.csv", "measured_hopper_dense.csv", "measured_serving_2026_11.csv")
TPOT_PCT = {"vllm": 10.0, "sglang": 10.0}
TTFT_PCT = {"vllm": 10.0, "sglang": 25.0}
UNSEEN_PCT = {"TPOT median": 4.0, "TPOT P90": 10.0, "TTFT median": 10.0}
FAR_PCT = 15.0
_MINIMAX = "TP 4 ran with 0.16.0 and TP 8 with 0.18.0: release and layout are left out together"
_B300 = (
    "0.5.10.post1 on B300 takes six to twelve times B200's time for prompts of DeepSeek, by TPOT "
    "and TTFT alike; no other layout of its model and GPU type tells"
)
REASONS = {
    ("vllm", "kimi-k2.5 h200 TP 8"): (
        "the only layout of the model and of int4 experts: without it they have the factors of "
        "others"
    ),
    **{("vllm", f"minimax-m2.5 h200 TP {tp}"): _MINIMAX for tp in (4, 8)},
    ("sglang", "deepseek-v3 h200 TP 8"): (
        "its kernel times are vLLM's, whose FP8 blocks the source has too slow on Hopper"
    ),
    ("sglang", "deepseek-v3 b300 TP 4"): _B300,
    ("sglang", "deepseek-v3-nvfp4 b300 TP 4"): _B300,
    ("sglang", "qwen3-235b-a22b-fp8 h200 TP 2"): (
        "the only layout of the model; its runs have 2 to 4 clients, where constants of others "
        "give a sixth less"
    ),
}
"""Of layouts left out that are more than `FAR_PCT` off."""
KV_PCT, MAKESPAN_PCT = 5.0, 10.0
FEW_CLIENTS, NODE_GPUS = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreLine:
    """One figure of a section, and whether it is beyond its target."""

    cells: Sequence[str]
    fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table of the page."""

    title: str
    target: str
    columns: Sequence[str]
    lines: Sequence[ScoreLine]
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def failing(self) -> list[ScoreLine]:
        """Lines beyond the target."""
        return [line for line in self.lines if line.fails]


def serving_section(tables: Iterable[Path]) -> Iterator[Section]:
    """Published serving runs as the shipped profiles predict them, and by fits without a part."""
    paths = list(tables)
    report = predict_rows(paths, shipped_profiles())
    rules = Counter(left.rule for left in report.left_out)
    for engine in report.engines:
        lines = [
            ScoreLine(
                cells=(
                    part.part,
                    str(part.runs),
                    *(f"{x:.1f}" for x in (part.tpot, part.bias, part.worst, part.ttft)),
                ),
                fails=part.tpot > TPOT_PCT[engine] or part.ttft > TTFT_PCT[engine],
            )
            for part in report.parts(by_profile, engine)
        ]
        yield Section(
            title=f"TPOT and TTFT, {engine}",
            target=f"TPOT {TPOT_PCT[engine]:g} %, TTFT {TTFT_PCT[engine]:g} %, in the mean",
            columns=("model and GPU", "runs", "TPOT %", "signed %", "worst %", "TTFT %"),
            lines=lines,
            notes=[f"{number} rows left out: {rule}" for rule, number in rules.most_common()],
        )
        rules = Counter()
    fit = fit_rows(paths, shipped_profiles(), from_scratch=True)
    fitted = left_out_errors(fit)
    columns = ("part", "engine", "groups", "TPOT median", "TPOT P90", "TPOT worst", "TTFT median")
    yield Section(
        title="TPOT and TTFT by what the fit has not seen",
        target="of a layout left out: TPOT 4 % in the median, 10 % in nine of ten, TTFT 10 %",
        columns=columns,
        lines=[
            ScoreLine(
                cells=[str(row[name]) for name in columns],
                fails=row["part"] == "layout"
                and any(float(row[k]) > v for k, v in UNSEEN_PCT.items()),
            )
            for row in [*fitted, *without_rules(paths)]
        ],
    )
    apart = [(e, part) for e in fit.seen.engines for part in fit.unseen["layout"].groups(e)]
    yield Section(
        title=f"Layouts left out that are more than {FAR_PCT:g} % off",
        target="a reason for each",
        columns=("layout", "engine", "runs", "TPOT %", "TTFT %", "reason"),
        lines=[
            ScoreLine(
                cells=(
                    part.part,
                    engine,
                    str(part.runs),
                    f"{part.tpot:.1f}",
                    f"{part.ttft:.1f}",
                    REASONS.get((engine, part.part), ""),
                ),
                fails=(engine, part.part) not in REASONS,
            )
            for engine, part in apart
            if part.tpot > FAR_PCT
        ],
    )
    yield floor_section(fit)


def without_rules(tables: Sequence[Path]) -> list[dict[str, str | float]]:
    """Errors of layouts left out where no run is left out of the count by a rule."""
    rows, _ = read_serving_rows(tables, every=True)
    found, _ = samples(rows, shipped_profiles(), every=True)
    runs = [
        run
        for engine in ENGINES
        for run in left_out_runs([sample for sample in found if sample.row.engine == engine])
    ]
    of = ", ".join(f"{sum(r.row.engine == engine for r in runs)} {engine}" for engine in ENGINES)
    part = f"layout, without rules ({of} runs)"
    return errors_of_groups(part, ServingReport(runs=runs, left_out=()))


def floor_section(fit: FittedServing) -> Section:
    """Noise of published runs and constants in hindsight."""
    return Section(
        title="TPOT and TTFT, noise and hindsight",
        target="none: an error of a layout left out is beside these",
        columns=("what", "engine", "TPOT median", "TPOT P90", "TTFT median", "TTFT P90"),
        lines=[
            ScoreLine(cells=(floor.name, engine, *floor.cells()))
            for engine in fit.seen.engines
            for floor in floors([s for s in fit.samples if s.row.engine == engine])
        ],
    )


def kv_section() -> Section:
    """Sizes of the KV cache that engines printed."""
    lines = []
    for size in kv_sizes():
        roofline, shipped = size.errors_pct
        worst = max(abs(roofline), abs(shipped or 0.0))
        why = f" ({FAULTY[size.source]})" if size.source in FAULTY else ""
        lines.append(
            ScoreLine(
                cells=(
                    f"{size.model} {size.engine.gpu} TP {size.engine.tp}{why}",
                    size.version,
                    f"{size.published:,}",
                    f"{roofline:+.1f}",
                    "" if shipped is None else f"{shipped:+.1f}",
                ),
                fails=worst > KV_PCT,
            )
        )
    return Section(
        title="KV capacity",
        target=f"{KV_PCT:g} % of each printed size",
        columns=("engine", "vLLM", "tokens", "roofline %", "shipped %"),
        lines=lines,
    )


def configuration_section(tables: Iterable[Path], profiles: Iterable[Profile]) -> Section:
    """Published runs of models with experts by the roofline alone, as of a config.json."""
    made = dict(_by_configuration(profiles))
    runs = [
        run
        for run in predict_rows(tables, made).runs
        if (run.model, run.row.gpu) in made and run.row.engine == "vllm"
    ]
    few = [run for run in runs if run.row.concurrency <= FEW_CLIENTS]
    lines = []
    for part, of in (("all", runs), (f"{FEW_CLIENTS} clients or fewer", few)):
        groups = ServingReport(runs=of, left_out=()).groups("vllm")
        tpot = [group.tpot for group in groups]
        figures = (median(tpot), np.quantile(tpot, 0.9), median(group.ttft for group in groups))
        cells = (part, str(len(of)), str(len(groups)), *(f"{x:.0f}" for x in figures))
        lines.append(ScoreLine(cells=cells))
    return Section(
        title="Models with experts from a configuration, vllm",
        target="none: host time and factors of the roofline are fitted on 577 of these runs",
        columns=("part", "runs", "layouts", "TPOT median %", "TPOT P90 %", "TTFT median %"),
        lines=lines,
    )


def _by_configuration(
    profiles: Iterable[Profile],
) -> Iterator[tuple[tuple[str, str], Profile]]:
    """Rooflines of models with experts, in the layouts of their tables on one node."""
    for whole in profiles:
        model, gpu = shape_of(whole), GPU_CLASSES.get(whole.gpu)
        if not whole.experts or model is None or gpu is None:
            continue
        layouts = [read_layout(name) for name in whole.tables]
        shapes = [
            EngineShape(whole.gpu, tp, dp=ranks, ep=spread)
            for tp, ranks, spread in layouts
            if tp * ranks <= NODE_GPUS
        ]
        with suppress(RooflineError):
            yield (whole.model, whole.gpu), profile_from_shape(model, gpu, shapes)


def layout_section(profiles: Iterable[Profile]) -> Section:
    """Layouts of models with experts by the roofline, beside kernel tables that have them."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for whole in profiles:
        for name in whole.tables if not whole.derived else ():
            _, ranks, spread = read_layout(name)
            if ranks == spread == 1:
                continue
            rest = {each: table for each, table in whole.tables.items() if each != name}
            made = with_layouts(
                replace(whole, tables=rest), expert_parallel=spread > 1, attention_dp=ranks
            )
            if name in made.tables:
                pairs = zip(shown_seconds(made, name), shown_seconds(whole, name), strict=True)
                off = [100.0 * abs(ours / tables - 1.0) for ours, tables in pairs]
                for part in ("all", "ranks" if ranks > 1 else "experts spread alone"):
                    found[part].append(off)
    lines = []
    for part, each in sorted(found.items()):
        steps = [off for *decode, _ in each for off in decode]
        figures = (median(steps), np.quantile(steps, 0.9), median(prompt for *_, prompt in each))
        lines.append(ScoreLine(cells=(part, str(len(each)), *(f"{x:.0f}" for x in figures))))
    return Section(
        title="Layouts that tables lack, by the roofline",
        target="none: the layout's table is left out",
        columns=("part", "layouts", "decode step median %", "P90 %", "prompt median %"),
        lines=lines,
    )


def makespan_section() -> Section:
    """Makespans of vLLM on CPUs, by workload and policy."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in json.loads(MAKESPANS.read_text(encoding="utf-8")).values():
        found[run["workload"], run["policy"]].append(run["makespan_s"]["error_pct"])
    return Section(
        title="Makespan, vLLM on CPUs",
        target=f"{MAKESPAN_PCT:g} % of each run",
        columns=("workload", "policy", "runs", "median %", "worst %"),
        lines=[
            ScoreLine(
                cells=(*names, str(len(e)), f"{median(e):+.1f}", f"{max(e, key=abs):+.1f}"),
                fails=max(map(abs, e)) > MAKESPAN_PCT,
            )
            for names, e in sorted(found.items())
        ],
    )


def training_sections() -> Iterator[Section]:
    """Training steps and weight updates, by class of rows; unseen: by fits without a document."""
    file = json.loads(TRAINING_FILE.read_text(encoding="utf-8"))
    training, update = file["training"]["errors"], file["weight_update"]["errors"]
    target, groups = training["target_pct"], training["groups"]
    columns = ("class", "rows", "median %", "P90 %", "median % unseen", "P90 % unseen")
    yield Section(
        title="Training steps",
        target=", ".join(f"{name} {limit:g} %" for name, limit in target.items()),
        columns=columns,
        lines=[
            ScoreLine(
                cells=(
                    name,
                    str(of["rows"]),
                    *(str(of[k][f]) for k in ("seen", "unseen") for f in ("median", "p90")),
                ),
                fails=of["unseen"]["median"] > _limit(name, target),
            )
            for name, of in groups.items()
        ],
    )
    yield Section(
        title="Weight updates",
        target=f"{update['target_share']:.0%} within a factor of 1.5, of documents left out",
        columns=("method", "rows", "seen", "row left out", "document left out"),
        lines=[
            ScoreLine(
                cells=(
                    name,
                    str(of["rows"]),
                    *(f"{of[k]:.0%}" for k in ("seen", "row_unseen", "document_unseen")),
                ),
                fails=of["document_unseen"] < update["target_share"],
            )
            for name, of in update["groups"].items()
        ],
    )


def _limit(name: str, target: dict[str, float]) -> float:
    """Target of a class of rows by the words of its name; none for other groups of rows."""
    return next((target[word] for word in ("FP8", "MoE", "dense") if word in name), float("inf"))


def page(sections: Sequence[Section]) -> str:
    """Return the page in Markdown: what fails first, then every section."""
    text = ["# Scorecard", "", "Made by `make scorecard`; errors in percent unless stated.", ""]
    text += ["| section | lines | beyond the target |", "|---|---|---|"]
    text += [f"| {s.title} | {len(s.lines)} | {len(s.failing)} |" for s in sections]
    text += ["", "## What fails", ""]
    for s in sections:
        text += [f"- {s.title}: {', '.join(filter(None, line.cells))}" for line in s.failing]
    for s in sections:
        text += ["", f"## {s.title}", "", f"Target: {s.target}.", ""]
        text += [f"| {' | '.join((*s.columns, ''))} |", "|---" * (len(s.columns) + 1) + "|"]
        text += [f"| {' | '.join((*x.cells, 'fails' if x.fails else ''))} |" for x in s.lines]
        text += ["", *(f"- {note}" for note in s.notes)] if s.notes else []
    return "\n".join(text) + "\n"


@click.command("scorecard")
@click.option(
    "--perf",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=ROOT.parent / "shared" / "perf",
    help="Folder of the tables [../shared/perf]",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Markdown page")
def command(perf: Path, out: Path) -> None:
    """Write the scorecard: each known error beside its target."""
    try:
        serving = list(serving_section(perf / name for name in SERVING))
    except PublishedRowsError as e:
        raise click.ClickException(str(e)) from e
    shipped = list(shipped_profiles().values())
    sections = [
        *serving,
        configuration_section((perf / name for name in SERVING), shipped),
        layout_section(shipped),
        kv_section(),
        makespan_section(),
        *training_sections(),
    ]
    out.write_text(page(sections), encoding="utf-8")
    failing = sum(len(section.failing) for section in sections)
    click.echo(f"{out}: {sum(len(s.lines) for s in sections)} lines, {failing} beyond their target")
