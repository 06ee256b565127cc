// Reference against best: the verdict, rows by policy, what the last trajectory spent its time on.

const PART_NAMES = {
  arrival: "before its arrival", waiting: "waiting", prefill: "prefill", decode: "decode", tool: "in tools", lost: "lost with engines", rest: "rest",
};
const STEP_NAMES = { ...PART_NAMES, tokens: "decode: tokens", tpot: "decode: ms per token" };
const PART_COLOURS = {
  arrival: "--lost", waiting: "--waiting", prefill: "--prefill", decode: "--decode", tool: "--tool", lost: "--preempted", rest: "--soft",
};

const rowColour = (page, row) => runColour(page.runs[row.runs[0]]);
const rowName = (row) => `${row.label}${row.runs.length > 1 ? `, ${row.runs.length} seeds` : ""}`;
const rowDash = (page, row) => runDash(page.runs[row.runs[0]]);
const rowsWithLast = (page) => page.why.rows.filter((row) => row.last !== null);
const partsOf = (page) => Object.keys(PART_NAMES).filter((part) => ["waiting", "prefill", "decode", "tool"].includes(part)
  || rowsWithLast(page).some((row) => Math.abs(row.last.seconds[part]) >= 0.05));

function drawWhy(page) {
  drawCompared(page);
  byId("answer").textContent = page.compared && page.compared.seeds > 1 && page.compared.shown === 1
    ? `Of the first seed alone: ${page.why.verdict}` : page.why.verdict;
  const some = rowsWithLast(page).length > 0;
  for (const id of ["last", "parts"]) byId(id).closest("figure").hidden = !some;
  byId("waterfall").closest("figure").hidden = !page.why.waterfall;
  if (some) {
    drawLast(page);
    drawParts(page);
  }
  if (page.why.waterfall) drawWaterfall(page);
  drawUse(page);
}

// What the comparison of these runs says, over all of its seeds.
function drawCompared(page) {
  const found = page.compared;
  if (!found) {
    byId("compared")?.remove();
    return;
  }
  byId("said").hidden = byId("compared").hidden = false;
  byId("said").textContent = found.verdict;
  const least = Math.min(...found.rows.map((row) => row.mean));
  byId("policies").replaceChildren(
    el("thead", {}, el("tr", {}, head("policy", "row"), head("makespan s", "makespan_s"), head("from", "interval_ends"), head("to", "interval_ends"),
      head("over the least", "over_least"))),
    el("tbody", {}, ...found.rows.map((row) => el("tr", {}, el("td", { class: "name" }, row.policy), valued(row.mean, tenths), valued(row.low, tenths),
      valued(row.high, tenths), valued(row.mean / least, (ratio) => ratio.toFixed(2))))));
}

// A row for each run, and one of means where a policy ran under several seeds.
function drawLast(page) {
  const parts = partsOf(page);
  const line = (row, label, last, at) => el("tr", { class: at === null ? "mean" : null },
    el("td", {}, el("span", { class: "swatch", style: `background:${rowColour(page, row)}` }), label),
    el("td", { class: "name" }, last.name === null ? "" : el("button", { type: "button", onclick: () => page.follow(page.names.indexOf(last.name)) }, last.name)),
    valued(last.total, tenths),
    ...parts.flatMap((part) => (part === "decode"
      ? [valued(last.seconds.decode, tenths), valued(last.intervals, number), valued(last.intervals ? (1000 * last.seconds.decode) / last.intervals : null, tenths)]
      : [valued(last.seconds[part], tenths)])));
  const total = (last) => ({ ...last, total: Object.values(last.seconds).reduce((sum, s) => sum + s, 0) });
  const lines = rowsWithLast(page).flatMap((row) => [
    ...row.runs.map((at, i) => line(row, page.runs[at].label, total(row.last.each[i]), at)),
    ...(row.runs.length > 1 ? [line(row, `mean of ${row.label}`, total({ ...row.last, name: null }), null)] : []),
  ]);
  const heads = [head("run", "row"), head("ends last", "last"), head("makespan s", "makespan_s"),
    ...parts.flatMap((part) => (part === "decode" ? [head("decode s", "decode"), head("tokens", "tokens_made"), head("ms per token", "tpot")] : [head(`${PART_NAMES[part]} s`, part)]))];
  byId("last").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...lines));
}

function drawParts(page) {
  const rows = rowsWithLast(page);
  const parts = partsOf(page);
  legend("parts-legend", parts.map((part) => [PART_NAMES[part], css(PART_COLOURS[part])]));
  plot("parts", parts.map((part) => ({
    type: "bar", orientation: "h", name: PART_NAMES[part], y: rows.map((_, i) => i), x: rows.map((row) => row.last.seconds[part]), width: 0.6,
    marker: { color: css(PART_COLOURS[part]), line: { width: 0 } },
    customdata: rows.map((row) => [plain(row.label), row.last.tpot_ms === null ? "" : `<br>${number(row.last.intervals)} tokens at ${tenths(row.last.tpot_ms)} ms`]),
    hovertemplate: `%{customdata[0]}: %{x:,.1f} s ${PART_NAMES[part]}${part === "decode" ? "%{customdata[1]}" : ""}<extra></extra>`,
  })), {
    height: 62 + 34 * rows.length, barmode: "stack", margin: { l: 150, r: 14, t: 6, b: 40 },
    xaxis: axis("seconds", { rangemode: "tozero" }),
    yaxis: axis("", { range: [rows.length - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, tickvals: rows.map((_, i) => i), ticktext: rows.map((row) => plain(row.label)) }),
  });
}

function drawWaterfall(page) {
  const [from, to] = [page.why.rows[0], page.why.rows[page.why.best]];
  const steps = page.why.waterfall.filter(({ seconds: s }) => Math.abs(s) >= 0.05);
  const names = [from.label, ...steps.map(({ part }) => STEP_NAMES[part]), to.label];
  const values = [from.mean_s, ...steps.map(({ seconds: s }) => s), to.mean_s];
  const measure = ["absolute", ...steps.map(() => "relative"), "total"];
  // From zero, changes of some seconds are too thin to see.
  let level = from.mean_s;
  const levels = [level, to.mean_s, ...steps.map(({ seconds: s }) => (level += s))];
  const [low, high] = [Math.min(...levels), Math.max(...levels)];
  const room = Math.max(high - low, 0.01 * high, 1e-9);
  const base = Math.max(0, low - 0.8 * room);
  byId("waterfall-note").textContent = `The makespans are sums of these parts of the trajectory that ends last in either, so the steps add up to the whole difference. ${base > 0 ? "The axis does not begin at zero. " : ""}`;
  plot("waterfall", [{
    type: "waterfall", x: names.map((_, i) => i), y: values, measure, text: values.map((value, i) => (measure[i] === "relative" ? signed(value) : tenths(value))), textposition: "outside", cliponaxis: false,
    increasing: { marker: { color: css("--loss") } }, decreasing: { marker: { color: css("--gain") } }, totals: { marker: { color: css("--decode") } },
    connector: { line: { color: css("--soft"), width: 1, dash: "dot" } }, textfont: { color: css("--text") },
    customdata: names.map(plain), hovertemplate: "%{customdata}: %{text} s<extra></extra>",
  }], {
    height: 320, margin: { l: 62, r: 14, t: 24, b: 60 },
    xaxis: axis("", { tickvals: names.map((_, i) => i), ticktext: names.map((name) => plain(name).replace(/: /g, ":<br>").replace(/, /g, ",<br>")), showgrid: false, fixedrange: true }),
    yaxis: axis("seconds", { range: [base, high + 0.18 * room], autorange: false }),
  });
}

// GPUs in use and the time per token over time, one line for each row.
function drawUse(page) {
  const { rows, curves } = page.why;
  legend("use-legend", rows.map((row) => [rowName(row), rowColour(page, row)]));
  const lines = (values, text) => rows.map((row, at) => ({
    type: "scatter", mode: "lines", name: plain(row.label), x: curves.at, y: values[at], connectgaps: false,
    line: { color: rowColour(page, row), dash: rowDash(page, row), shape: "hvh", width: Math.max(2.6 - 0.5 * at, 1.3) },
    hovertemplate: `${text}<extra>%{fullData.name}</extra>`,
  }));
  const end = Math.max(...page.runs.map((run) => run.end_s), 1e-9);
  const time = () => axis("time (s)", { range: [0, end], hoverformat: ",.1f" });
  const layout = { height: 270, hovermode: "x" };
  plot("busy", lines(curves.gpus, "%{y:.2f} GPUs busy at %{x:,.1f} s"), { ...layout, xaxis: time(), yaxis: axis("GPUs", { rangemode: "tozero" }) });
  plot("pace", lines(curves.tpot_ms, "%{y:.2f} ms per token at %{x:,.1f} s"), { ...layout, xaxis: time(), yaxis: axis("ms per token", { rangemode: "tozero" }) });
}
