"""The page about published serving runs: measured beside predicted, in one HTML file."""

import html
import json
from collections.abc import Sequence
from typing import Any

from heddle.reports.colours import SHADES
from heddle.reports.plotly_script import plotly_script
from heddle_calibrate.serving.errors import (
    PartError,
    PredictedRun,
    ServingReport,
    by_clients,
    by_profile,
    by_tp,
    median_of_groups,
)

STYLE = """
:root { color-scheme: light; --text: #1c2330; --soft: #5b6675; --line: #dfe3e8; }
body { margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem; color: var(--text);
  font: 14px/1.45 system-ui, sans-serif; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p, caption { color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem; }
.plot { height: 38rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
"""
SCRIPT = """
const small = {size: 12};
for (const plot of DATA) {
  const lo = plot.range[0], hi = plot.range[1];
  const line = {x: [lo, hi], y: [lo, hi], mode: "lines", line: {color: "#8d95a1", width: 1},
    hoverinfo: "skip", showlegend: false};
  const axis = (title) => ({title: {text: title}, type: "log", gridcolor: "#e9ecf0",
    range: [Math.log10(lo), Math.log10(hi)]});
  Plotly.newPlot(plot.id, [line, ...plot.traces], {
    title: {text: plot.title, font: {size: 15}}, font: small, margin: {l: 60, r: 10, t: 40, b: 50},
    xaxis: axis("measured, ms"), yaxis: axis("predicted, ms"), legend: {orientation: "h", y: -0.2},
  }, {responsive: true, displaylogo: false});
}
"""


def serving_page(report: ServingReport, unseen: ServingReport) -> bytes:
    """Make the page: a scatter of TPOT and TTFT and the tables of errors for each engine.

    `unseen` has the same runs by fits without their group.
    """
    plots: list[dict[str, Any]] = []
    body: list[str] = []
    for engine in report.engines:
        own = [run for run in report.runs if run.row.engine == engine]
        seen, without = (median_of_groups(each, engine) for each in (report, unseen))
        body.append(
            f"<h2>{html.escape(engine)}: {len(own)} runs</h2>"
            f"<p>Mean absolute error of TPOT, median over groups: {seen:.1f} %, without the group "
            f"in the fit {without:.1f} %.</p>"
            '<div class="plots">'
        )
        for name, title in (("tpot", "TPOT"), ("ttft", "TTFT")):
            plots.append(_plot(f"{engine}-{name}", title, own, name))
            body.append(f'<div class="plot" id="{engine}-{name}"></div>')
        body.append("</div>")
        for name, of in (
            ("model and GPU class", by_profile),
            ("TP degree", by_tp),
            ("concurrency", by_clients),
        ):
            body.append(_table(name, report.parts(of, engine), unseen.parts(of, engine)))
        body.append(_worst(report.worst(engine, 20)))
    text = "".join(body)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Serving runs</title><style>{STYLE}</style></head><body>"
        "<h1>Published serving runs beside predicted ones</h1>"
        "<p>Each point is a run. On the line, it is predicted as measured.</p>"
        f"{text}<script>{plotly_script()}</script>"
        f"<script>const DATA = {_script(plots)};{SCRIPT}</script></body></html>"
    ).encode()


def _script(value: object) -> str:
    return json.dumps(value, allow_nan=False).replace("</", "<\\/")


def _plot(place: str, title: str, runs: Sequence[PredictedRun], name: str) -> dict[str, Any]:
    measured = {id(run): getattr(run.row, f"{name}_s") * 1e3 for run in runs}
    predicted = {id(run): getattr(run, f"{name}_s") * 1e3 for run in runs}
    every = [*measured.values(), *predicted.values()]
    traces = []
    for k, part in enumerate(sorted({by_profile(run) for run in runs})):
        own = [run for run in runs if by_profile(run) == part]
        traces.append(
            {
                "name": part,
                "x": [measured[id(run)] for run in own],
                "y": [predicted[id(run)] for run in own],
                "text": [_words(run) for run in own],
                "hovertemplate": "%{text}<br>%{x:.4g} ms, predicted %{y:.4g} ms",
                "mode": "markers",
                "marker": {"size": 6, "opacity": 0.7, "color": SHADES[k % len(SHADES)].light},
            }
        )
    return {
        "id": place,
        "title": title,
        "traces": traces,
        "range": [0.8 * min(every), 1.25 * max(every)],
    }


def _words(run: PredictedRun) -> str:
    row = run.row
    ranks = f", {row.dp} ranks" if row.dp > 1 else ""
    version = f", {row.version}" if row.version else ""
    return html.escape(
        f"TP {row.tp}{ranks}{version}: {row.input_tokens} in, {row.output_tokens} out, "
        f"{row.concurrency} clients"
    )


def _rows(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><caption>{html.escape(caption)}</caption>'
        f"<tr>{cells}</tr>{lines}</table></div>"
    )


def _table(name: str, parts: Sequence[PartError], unseen: Sequence[PartError]) -> str:
    head = ["", "runs", "TPOT", "TPOT, signed", "worst", "TTFT", "TPOT without", "TTFT without"]
    return _rows(
        f"Errors in percent by {name}: means of absolute values; without: by fits that lack the "
        "group of the run",
        head,
        [
            [
                part.part,
                str(part.runs),
                f"{part.tpot:.1f}",
                f"{part.bias:+.1f}",
                f"{part.worst:.0f}",
                f"{part.ttft:.0f}",
                f"{without.tpot:.1f}",
                f"{without.ttft:.0f}",
            ]
            for part, without in zip(parts, unseen, strict=True)
        ],
    )


def _worst(runs: Sequence[PredictedRun]) -> str:
    return _rows(
        "Largest errors of TPOT",
        ["", "TPOT ms", "predicted", "error %", "TTFT ms", "predicted", "error %"],
        [
            [
                f"{by_profile(run)} {html.unescape(_words(run))}",
                f"{run.row.tpot_s * 1e3:.2f}",
                f"{run.tpot_s * 1e3:.2f}",
                f"{run.tpot * 100:+.0f}",
                f"{run.row.ttft_s * 1e3:.0f}",
                f"{run.ttft_s * 1e3:.0f}",
                f"{run.ttft * 100:+.0f}",
            ]
            for run in runs
        ],
    )
