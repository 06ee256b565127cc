// The run in view over time: what trajectories did, how full engines were, what ran in each slot.
// All is computed for the stretch of time in view, so zooming in shows finer detail, not larger dots.

const BINS = 520;
const MEASURES = [["running", "running"], ["waiting", "waiting"], ["kv", "KV cache in use"]];
const STATES = [["waiting", "waiting"], ["prefill", "prefill"], ["decode", "decode"], ["tool", "in a tool"]];
const timeline = { of: null, range: null, measure: "running", engine: 0, cells: null, grid: null, soon: 0 };

const span = (run) => timeline.range ?? [0, run.end_s];

// Another run in view: all of its time, and the engine whose last step ends last.
function enter(page) {
  const run = page.run;
  if (timeline.of === run) return;
  const last = run.drawn.map((e) => run.ofEngine[e].reduce((end, i) => Math.max(end, run.dispatches.ended[i]), -1));
  Object.assign(timeline, { of: run, range: null, engine: run.drawn[Math.max(last.indexOf(Math.max(...last)), 0)] });
  membership.chosen = run.lengths.planned === undefined ? "ended" : "planned";
  run.opened = { engine: run.engines[timeline.engine]?.name ?? "", lengths: membership.chosen, time: "" };
}

function drawTimeline(page) {
  const run = page.run;
  enter(page);
  byId("engine").replaceChildren(...run.drawn.map((e) => el("option", { value: e }, engineLabel(run.engines[e]))));
  byId("engine").onchange = (event) => pickEngine(page, Number(event.target.value));
  byId("all").onclick = () => view(page, null);
  byId("all").hidden = timeline.range === null;
  choice("measure", MEASURES, timeline.measure, (value) => {
    timeline.measure = value;
    drawTimeline(page);
  });
  legend("doing-legend", STATES.map(([name, text]) => [text, css(`--${name}`)]));
  legend("slots-legend", [
    ["queued in the engine", css("--waiting")], ["prefill", css("--prefill")], ["decode", css("--decode")],
    ["lost with its engine", css("--lost")], ["preempted", css("--preempted"), "×"], ["came by migration", css("--migration"), "◆"],
  ]);
  for (const id of ["engines", "slots"]) byId(id).closest("figure").hidden = !run.drawn.length;
  drawStretch(page);
}

function drawStretch(page) {
  drawDoing(page);
  drawLoop(page);
  if (!page.run.drawn.length) return;
  drawEngines(page);
  drawSlots(page);
}

function pickEngine(page, engine) {
  timeline.engine = engine;
  drawEngines(page);
  drawSlots(page);
  remember(page);
}

function zoomed(page, change) {
  const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (from === undefined && !change["xaxis.autorange"]) return;
  const end = page.run.end_s;
  const range = from === undefined || (from <= 0 && to >= end) ? null : [Math.max(from, 0), Math.min(to, end)];
  if (String(range) !== String(timeline.range)) view(page, range && range[1] > range[0] ? range : null);
}

// Show a stretch of time, or all of it.
function view(page, range) {
  timeline.range = range;
  byId("all").hidden = range === null;
  drawStretch(page);
  remember(page);
}

const engineLabel = (engine) => `${engine.name.length > 24 ? `…${engine.name.slice(-23)}` : engine.name} · ${engine.label}`;

// Margins that hold the longest name of an engine, and are the same for all that zooms together.
function room(run) {
  const longest = Math.max(0, ...run.drawn.map((e) => engineLabel(run.engines[e]).length));
  return { l: Math.max(60, 24 + 6.6 * longest), r: 84, t: 6, b: 36 };
}

const timeAxis = (run, more = {}) => axis("time (s)", { range: [...span(run)], autorange: false, showgrid: false, ...more });
const inView = (page) => ({
  plotly_relayout: (change) => zoomed(page, change),
  plotly_doubleclick: () => {
    clearTimeout(timeline.soon);
    view(page, null);
  },
});

function drawDoing(page) {
  const run = page.run;
  const [from, to] = span(run);
  const { at, of } = run.activity ? counted(run, from, to) : recounted(run, from, to);
  const traces = STATES.map(([name, text]) => ({
    type: "scatter", mode: "lines", stackgroup: "all", name: text, x: at, y: of(name),
    line: { width: 0, color: css(`--${name}`) }, fillcolor: css(`--${name}`), hovertemplate: "%{y:,.1f} %{fullData.name}<extra></extra>",
  }));
  plot("doing", traces, {
    height: 210, hovermode: "x unified", margin: room(run),
    xaxis: timeAxis(run, { hoverformat: ",.1f", unifiedhovertitle: { text: "at %{x:,.1f} s" } }), yaxis: axis("trajectories", { rangemode: "tozero", fixedrange: true, automargin: false }),
  }, inView(page));
}

// Counts of all trajectories, which came with the page: not all of their steps did.
function counted(run, from, to) {
  const n = run.activity.waiting.length;
  const at = Array.from({ length: n }, (_, i) => ((i + 0.5) * run.end_s) / n);
  const seen = at.map((s) => s >= from && s <= to);
  return { at: at.filter((_, i) => seen[i]), of: (name) => run.activity[name].filter((_, i) => seen[i]) };
}

function recounted(run, from, to) {
  const all = Array.from({ length: run.dispatches.step.length }, (_, i) => phases(run, i));
  const parts = {
    waiting: (add) => {
      all.forEach((p) => add(p.runnable, p.began));
      for (const since of run.trajectories.pending) if (since !== NONE) add(since * run.tick_s, run.end_s);
    },
    prefill: (add) => all.forEach((p) => add(p.began, p.decoding)),
    decode: (add) => all.forEach((p) => add(p.decoding, p.ended)),
    tool: (add) => all.forEach((p, i) => add(p.ended, toolUntil(run, i))),
  };
  const at = Array.from({ length: BINS }, (_, i) => from + ((i + 0.5) * (to - from)) / BINS);
  return { at, of: (name) => binned(BINS, from, to, parts[name]) };
}

// What the engines are drawn by: BINS values for each that is drawn, empty where there was no engine.
function rows(run, measure, [from, to] = span(run)) {
  const width = (to - from) / BINS;
  return run.drawn.map((e) => {
    const engine = run.engines[e];
    const row = measure === "kv" ? reported(run, e, from, width) : binned(BINS, from, to, (add) => {
      for (const i of run.ofEngine[e]) {
        const p = phases(run, i);
        if (measure === "running") add(p.began, p.ended);
        else add(p.runnable, p.began);
      }
    });
    if (measure !== "waiting") {
      const alive = (i) => from + (i + 1) * width > engine.ready_s && (engine.gone_s === null || from + i * width < engine.gone_s);
      row.forEach((_, i) => { if (!alive(i)) row[i] = NaN; });
    }
    return row;
  });
}

// The latest report of each time as a share of the engine's KV cache.
function reported(run, e, from, width) {
  if (!run.reportsOf) {
    run.reportsOf = run.engines.map(() => []);
    run.reports.engine.forEach((engine, i) => run.reportsOf[engine].push(i));
  }
  const mine = run.reportsOf[e];
  const row = new Float64Array(BINS);
  for (let i = 0, next = 0, share = 0; i < BINS; i += 1) {
    while (next < mine.length && run.reports.time[mine[next]] * run.tick_s <= from + (i + 1) * width) {
      share = run.reports.kv[mine[next]] / run.engines[e].kv_capacity_tokens;
      next += 1;
    }
    row[i] = share;
  }
  return row;
}

// The top of the colour scale: that of the whole run, so that colours mean the same when zoomed.
function peak(run, measure) {
  if (measure === "kv") return 1;
  run.peaks ??= {};
  run.peaks[measure] ??= rows(run, measure, [0, run.end_s]).flatMap((row) => [...row]).reduce((most, value) => (value > most ? value : most), 1);
  return run.peaks[measure];
}

function drawEngines(page) {
  const run = page.run;
  const { measure } = timeline;
  const [from, to] = span(run);
  const count = run.drawn.length;
  timeline.grid = { running: null, waiting: null, kv: null };
  const row = (name, at) => (timeline.grid[name] ??= rows(run, name))[at];
  const shade = { running: "", waiting: "-waiting", kv: "-kv" }[measure];
  const every = Math.ceil(count / 32);
  const shown = run.drawn.map((_, at) => at).filter((at) => at % every === 0);
  const width = (to - from) / BINS;
  const trace = {
    type: "heatmap", z: run.drawn.map((_, at) => row(measure, at)), x0: from + width / 2, dx: width, y0: 0, dy: 1,
    colorscale: [[0, css(`--low${shade}`)], [0.5, css(`--mid${shade}`)], [1, css(`--high${shade}`)]], zmin: 0, zmax: peak(run, measure), hoverinfo: "none", hoverongaps: false,
    colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 11, color: css("--soft") }, tickformat: measure === "kv" ? ".0%" : "", x: 1.01 },
  };
  const place = run.drawn.indexOf(timeline.engine);
  const chosen = {
    type: "rect", xref: "paper", x0: 0, x1: 1, y0: place - 0.5, y1: place + 0.5, line: { color: css("--accent"), width: 2 },
  };
  const gone = run.drawn.flatMap((e, at) => (run.engines[e].failed ? [{
    x: run.engines[e].gone_s, y: at, text: "✕", showarrow: false, font: { color: css("--preempted"), size: 15 },
  }] : []));
  plot("engines", [trace], {
    height: Math.min(Math.max(count * 20, 90), 520) + 50, margin: room(run), shapes: [chosen], annotations: gone,
    xaxis: timeAxis(run),
    yaxis: axis("", { automargin: false, range: [count - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, tickvals: shown, ticktext: shown.map((at) => plain(engineLabel(run.engines[run.drawn[at]]))) }),
  }, {
    ...inView(page),
    plotly_click: ({ points }) => pickEngine(page, page.run.drawn[points[0].pointNumber[0]]),
    plotly_hover: ({ event, points }) => {
      const [e, i] = points[0].pointNumber;
      const now = page.run.engines[page.run.drawn[e]];
      const [start, end] = span(page.run);
      const at = start + ((i + 0.5) * (end - start)) / BINS;
      const cell = (name) => (timeline.grid[name] ??= rows(page.run, name))[e][i];
      tip(event, `${now.name}, ${now.label}, at ${seconds(at)}`, [
        `${number(cell("running"))} running, ${number(cell("waiting"))} waiting for it`,
        `${(100 * cell("kv")).toFixed(0)} % of ${number(now.kv_capacity_tokens)} tokens of KV cache in use`,
        ...(now.failed ? [`failed at ${seconds(now.gone_s)}`] : []),
      ]);
    },
  });
}
