// Curves of all runs over each other: active, completed, waiting, queueing.

function drawOverlays(page) {
  legend("legend", page.runs.map((run) => [run.label, runColour(run)]));
  const lines = (name, more, text) => page.runs.map((run, at) => ({
    type: "scatter", mode: "lines", name: plain(run.label), x: run.curves[name].x, y: run.curves[name].y,
    line: { color: runColour(run), dash: runDash(run), shape: "hv", width: Math.max(3 - 0.6 * at, 1.4) },
    hovertemplate: `${text}<extra>%{fullData.name}</extra>`, ...more,
  }));
  const end = Math.max(...page.runs.map((run) => run.end_s), 1e-9);
  const time = () => axis("time (s)", { range: [0, end], hoverformat: ",.1f" });
  const room = { height: 270, hovermode: "x" };
  plot("active", lines("active", {}, "%{y:,} active at %{x:,.1f} s"),
    { ...room, xaxis: time(), yaxis: axis("trajectories", { rangemode: "tozero" }) });
  plot("completion", lines("completion", {}, "%{y:.1%} by %{x:,.1f} s"),
    { ...room, xaxis: time(), yaxis: axis("share", { range: [0, 1.03], tickformat: ".0%" }) });
  plot("waiting", lines("waiting", {}, "%{y:,} waiting at %{x:,.1f} s"),
    { ...room, xaxis: time(), yaxis: axis("steps", { rangemode: "tozero" }) });
  // Logarithmic from a millisecond on: what waited less is drawn there.
  const late = lines("queueing", {}, "%{y:.2%} wait %{x:,.3f} s or longer").map((line) => ({
    ...line, x: line.x.map((s) => Math.max(s, 0.001)),
  }));
  plot("queueing", late, {
    ...room,
    xaxis: axis("queueing delay (s)", { type: "log", hoverformat: ",.3f", tickvals: [0.001, 0.01, 0.1, 1, 10, 100, 1000, 1e4], ticktext: ["≤ 0.001", "0.01", "0.1", "1", "10", "100", "1,000", "10,000"] }),
    yaxis: axis("share of steps", { type: "log", tickvals: [1e-5, 1e-4, 0.001, 0.01, 0.1, 1], ticktext: ["0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"] }),
  });
}
