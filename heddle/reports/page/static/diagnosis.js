// Where the time of measured steps went: parts, what trajectories and engines did, and remedies.

const PART = {
  tail: ["tail: wait for the longest", "--run-11"], stalled: ["stalled: no request, though some wait", "--loss"],
  queue: ["queue", "--waiting"], prefill: ["prefill", "--prefill"], prefill_moved: ["prefill, another engine had it", "--run-9"],
  prefill_again: ["prefill, dropped before", "--run-10"], decode: ["decode", "--decode"], llm: ["generation", "--run-0"],
  lost: ["lost with engines", "--run-7"], tool: ["tools", "--tool"], env_start: ["environment start", "--run-8"],
  reward: ["rewards", "--run-24"], training: ["training", "--run-2"], update: ["weight update", "--migration"],
  other: ["validation, checkpoints", "--run-14"], rollout: ["rollout", "--run-0"], idle: ["no trajectory", "--line"], no_request: ["no request", "--line"],
  arrival: ["before its arrival", "--line"], unaccounted: ["unaccounted", "--soft"],
};
const title = (part) => PART[part][0];
const tint = (part) => css(PART[part][1]);
const MOST_ENGINES = 64;
const LABELS = 24;
const MEASURES = [["batch", "running"], ["waiting", "waiting"]];
const viewed = { range: null, measure: "batch" };
let page = null;

const inOrder = (parts) => Object.keys(PART).filter((part) => parts.has(part));
const legendOf = (id, parts) => legend(id, inOrder(parts).map((part) => [title(part), tint(part)]));
const cut = (name) => (name.length > 28 ? `…${name.slice(-27)}` : name);
const shortened = (name) => plain(cut(name));
// Margins that hold the longest name, and are the same for all that zooms together.
const room = () => ({ l: Math.max(60, ...[...page.names, ...page.engines.map((each) => each.engine), ...page.longest.map((path) => path.trajectory)].map((name) => 24 + 6.6 * cut(name).length)), r: 84, t: 6, b: 36 });
const span = () => viewed.range ?? [0, page.end_s];
const section = (id, shown) => { byId(id).hidden = document.querySelector(`nav a[href="#${id}"]`).hidden = !shown; };
const show = (id, shown) => { byId(id).closest("figure").hidden = !shown; };
const tableOf = (id, heads, lines) => byId(id).replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...lines));
const spaced = (all, most) => all.filter((_, i) => i % Math.ceil(all.length / most) === 0);
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function drawHead() {
  const several = page.steps.length > 1 ? `${number(page.steps.length)} steps, ` : "";
  byId("about").textContent = `${page.source}: ${several}${page.trajectories ? `${number(page.trajectories)} trajectories` : `${number(page.engines.length)} engines`}, ${seconds(page.measured_s)}${page.alone ? " in all" : ""}`;
  const over = page.steps.reduce((sum, step) => sum + step.running_over, 0);
  const absent = page.not_recorded.map((part) => title(part)).join(", ");
  byId("notes").replaceChildren(...[
    ...(over ? [`${number(over)} trajectories ran over the end of a step, and count in both.`] : []),
    ...(absent ? [`Not recorded, so part of others or unaccounted: ${absent}.`] : []),
  ].map((note) => el("p", { class: "note" }, note)));
}

function drawSummary() {
  byId("answer").textContent = page.verdict;
  const several = page.steps.length > 1;
  const line = ({ part, seconds: s, share }, named) => el("tr", named ? {} : { class: "mean" },
    el("td", {}, ...(named ? [el("span", { class: "swatch", style: `background:${tint(part)}` }), el("span", { "data-says": meaningOf(part), tabindex: 0 }, title(part))] : ["measured"])),
    valued(s, tenths), ...(several ? [valued(s / page.steps.length, tenths)] : []), valued(share, percent));
  tableOf("parts", ["part", "seconds", ...(several ? ["seconds a step"] : []), "share"].map((text) => el("th", { scope: "col" }, text)),
    [...page.parts.map((each) => line(each, true)), line({ seconds: page.measured_s, share: 1 }, false)]);
  show("steps", several);
  if (!several) return;
  const parts = new Set(page.parts.filter((each) => each.share >= 0.0005).map((each) => each.part));
  legendOf("steps-legend", parts);
  const labels = page.steps.map((step, at) => step.label ?? at + 1);
  plot("steps", inOrder(parts).map((part) => ({
    type: "bar", name: title(part), x: labels, y: page.steps.map((step) => Math.max(step.parts[part] ?? 0, 0)),
    marker: { color: tint(part), line: { width: 0 } }, hovertemplate: "step %{x}: %{y:,.1f} s %{fullData.name}<extra></extra>",
  })), { height: 260, barmode: "stack", xaxis: axis("step", { tickformat: "d", dtick: labels.length < 20 ? 1 : null, showgrid: false }), yaxis: axis("seconds", { rangemode: "tozero" }) });
}

const timeAxis = () => axis(page.alone ? "seconds since its start" : "time (s)", { range: span(), autorange: false, showgrid: false });
const zooms = {
  plotly_relayout: (change) => {
    const [from, to] = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (from === undefined) return;
    const range = [Math.max(from, 0), Math.min(to, page.end_s)];
    if (String(range) !== String(span())) zoom(range[1] > range[0] ? range : null);
  },
  plotly_doubleclick: () => zoom(null),
};

function zoom(range) {
  viewed.range = range;
  drawTimeline();
}

function drawTimeline() {
  const { trajectories, names, longest_drawn: longest } = page;
  section("timeline", names.length || page.engines.length);
  const shown = new Set([...Object.keys(page.did), ...page.runs[0].intervals.part.map((part) => part)].map((part) => page.kinds[part] ?? part));
  page.phases.forEach(([phase]) => shown.add(phase));
  if (tails().length) shown.add("tail");
  legendOf("timeline-legend", shown);
  byId("timeline-legend").hidden = !shown.size;
  byId("sampled").textContent = `Drag to zoom in on a time, double-click to see all again. ${names.length < trajectories
    ? `${number(names.length)} of ${number(trajectories)} trajectories are drawn: the ${number(longest)} longest, the others at random; counts are of all.` : ""}${
    page.engines.length > MOST_ENGINES ? ` ${number(spaced(page.engines, MOST_ENGINES).length)} of ${number(page.engines.length)} engines are drawn.` : ""}`;
  drawDid();
  drawEach();
  drawEngines();
}

const tails = () => (page.alone ? [] : page.steps.filter((step) => step.tail).map(({ tail }) => tail.map((at) => at - page.begin_s)));
const shades = () => tails().map(([x0, x1]) => ({ type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, fillcolor: tint("tail"), opacity: 0.13, line: { width: 0 }, layer: "above" }));

function drawDid() {
  const parts = Object.keys(page.did);
  show("did", parts.length > 0);
  if (!parts.length) return;
  const n = page.did[parts[0]].length;
  const at = Array.from({ length: n }, (_, i) => ((i + 0.5) * page.end_s) / n);
  const phases = [...new Set(page.phases.map(([phase]) => phase))];
  const lanes = phases.map((phase) => {
    const own = page.phases.filter(([name]) => name === phase);
    return {
      type: "bar", orientation: "h", yaxis: "y2", name: title(phase), base: own.map(([, from]) => from), x: own.map(([, from, to]) => to - from), y: own.map(() => 0), width: 0.8,
      marker: { color: tint(phase), line: { width: 0 } }, hovertemplate: `%{x:,.1f} s ${title(phase)}<extra></extra>`,
    };
  });
  const top = phases.length ? 0.86 : 1;
  plot("did", [...inOrder(new Set(parts)).map((part) => ({
    type: "scatter", mode: "lines", stackgroup: "all", name: title(part), x: at, y: page.did[part],
    line: { width: 0, color: tint(part) }, fillcolor: tint(part), hovertemplate: "%{y:,.1f} %{fullData.name}<extra></extra>",
  })), ...lanes], {
    height: 230, hovermode: "x", barmode: "overlay", margin: room(), shapes: shades(), xaxis: timeAxis(),
    yaxis: axis("trajectories", { rangemode: "tozero", fixedrange: true, automargin: false, domain: [0, phases.length ? 0.82 : 1] }),
    yaxis2: axis("", { domain: [top, 1], range: [-0.5, 0.5], tickvals: [0], ticktext: ["trainer"], fixedrange: true, automargin: false, showgrid: false, visible: phases.length > 0 }),
  }, zooms);
}

// Trajectories as a grid of pixels: each has the part that takes most of its time.
function drawEach() {
  const { names, kinds, tick_s: s, runs: [{ intervals: own }] } = page;
  show("each", names.length > 0);
  if (!names.length) return;
  const [from, to] = span();
  const across = 900;
  const width = (to - from) / across;
  const first = new Uint32Array(names.length + 1);
  for (const row of own.row) first[row + 1] += 1;
  for (let row = 0; row < names.length; row += 1) first[row + 1] += first[row];
  const z = names.map((_, row) => {
    const most = new Float32Array(across);
    const cells = new Array(across).fill(null);
    for (let i = first[row]; i < first[row + 1]; i += 1) {
      const [a, b] = [(own.start[i] * s - from) / width, (own.end[i] * s - from) / width];
      for (let cell = Math.max(Math.floor(a), 0); cell < Math.min(b, across); cell += 1) {
        const covered = Math.min(b, cell + 1) - Math.max(a, cell);
        if (covered > most[cell]) [most[cell], cells[cell]] = [covered, own.part[i]];
      }
    }
    return cells;
  });
  const last = kinds.length;
  const shown = spaced(names.map((_, row) => row), LABELS);
  plot("each", [{
    type: "heatmap", z, x0: from + width / 2, dx: width, y0: 0, dy: 1, zmin: -0.5, zmax: last - 0.5, showscale: false, hoverinfo: "none", hoverongaps: false, ygap: names.length <= 80 ? 1 : 0,
    colorscale: kinds.flatMap((kind, k) => [[k / last, tint(kind)], [(k + 1) / last, tint(kind)]]),
  }], {
    height: Math.min(Math.max(names.length * 14, 90), 560) + 50, margin: room(), shapes: shades(), xaxis: timeAxis(),
    yaxis: axis("", { automargin: false, range: [names.length - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, tickvals: shown, ticktext: shown.map((row) => shortened(names[row])) }),
  }, {
    ...zooms,
    plotly_hover: ({ event, points: [point] }) => {
      const [start, end] = span();
      const at = start + ((point.pointNumber[1] + 0.5) * (end - start)) / across;
      const row = point.pointNumber[0];
      const i = Array.from({ length: first[row + 1] - first[row] }, (_, k) => first[row] + k).find((k) => own.end[k] * s >= at && own.start[k] * s <= at);
      tip(event, names[row], [i === undefined ? title(kinds[point.z]) : `${title(kinds[own.part[i]])} from ${seconds(own.start[i] * s)} to ${seconds(own.end[i] * s)}: ${seconds((own.end[i] - own.start[i]) * s)}`]);
    },
  });
}

function drawEngines() {
  const { engines, end_s: end } = page;
  for (const id of ["requests", "fleet"]) show(id, engines.length > 0);
  byId("busy").hidden = document.querySelector('[data-table="busy"]').hidden = !engines.length;
  if (!engines.length) return;
  const n = engines[0].batch.length;
  const at = Array.from({ length: n }, (_, i) => ((i + 0.5) * end) / n);
  legend("requests-legend", [["running", tint("decode")], ["waiting", tint("queue")]]);
  plot("requests", MEASURES.map(([name, text]) => ({
    type: "scatter", mode: "lines", name: text, x: at, y: at.map((_, i) => engines.reduce((sum, each) => sum + each[name][i], 0)),
    line: { shape: "hvh", width: 1.6, color: tint(name === "batch" ? "decode" : "queue") }, hovertemplate: "%{y:,.1f} %{fullData.name}<extra></extra>",
  })), { height: 190, hovermode: "x", margin: room(), shapes: shades(), xaxis: timeAxis(), yaxis: axis("requests", { rangemode: "tozero", fixedrange: true, automargin: false }) }, zooms);
  const drawn = spaced(engines, MOST_ENGINES);
  const named = spaced(drawn.map((_, i) => i), LABELS);
  choice("measure", MEASURES, viewed.measure, (value) => {
    viewed.measure = value;
    drawEngines();
  });
  const shade = viewed.measure === "batch" ? "" : "-waiting";
  plot("fleet", [{
    type: "heatmap", z: drawn.map((each) => each[viewed.measure]), x0: end / n / 2, dx: end / n, y0: 0, dy: 1, hovertemplate: `%{y}, at %{x:,.1f} s: %{z:,.1f} ${viewed.measure === "batch" ? "running" : "waiting"}<extra></extra>`, zmin: 0,
    zmax: Math.max(1e-9, ...drawn.flatMap((each) => each[viewed.measure])),
    colorscale: [[0, css(`--low${shade}`)], [0.5, css(`--mid${shade}`)], [1, css(`--high${shade}`)]], colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 11, color: css("--soft") }, x: 1.01 },
  }], {
    height: Math.min(Math.max(drawn.length * 20, 90), 520) + 50, margin: room(), xaxis: timeAxis(),
    yaxis: axis("", { automargin: false, range: [drawn.length - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, tickvals: named, ticktext: named.map((i) => shortened(drawn[i].engine)) }),
  }, zooms);
  tableOf("busy", ["engine", "busy", "idle while some wait", "mean batch"].map((text) => el("th", { scope: "col" }, text)), engines.map((each) => el("tr", {},
    el("td", {}, each.engine), valued(each.busy_s / page.measured_s, percent), valued(each.idle_waiting_s / page.measured_s, percent), valued(each.mean_batch, tenths))));
}

function drawLongest() {
  const paths = page.longest;
  section("longest", paths.length);
  if (!paths.length) return;
  const parts = new Set(paths.flatMap((path) => Object.keys(path.parts).filter((part) => path.parts[part] >= 0.0005 * path.lasts_s)));
  legendOf("paths-legend", parts);
  const each = paths.flatMap((path, y) => path.intervals.map(([part, from, to]) => ({ part, from, to, y })));
  plot("paths", inOrder(new Set(each.map(({ part }) => part))).map((part) => {
    const own = each.filter((one) => one.part === part);
    return {
      type: "bar", orientation: "h", name: title(part), base: own.map((one) => one.from), x: own.map((one) => one.to - one.from), y: own.map((one) => one.y), width: 0.7,
      marker: { color: tint(part), line: { width: 0 } }, hovertemplate: `%{x:,.2f} s ${title(part)} from %{base:,.1f} s<extra></extra>`,
    };
  }), {
    height: 56 + 34 * paths.length, barmode: "overlay", margin: { ...room(), r: 14 }, xaxis: axis(page.alone ? "seconds since its start" : "seconds since the start of its step", { rangemode: "tozero" }),
    yaxis: axis("", { automargin: false, range: [paths.length - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, tickvals: paths.map((_, y) => y), ticktext: paths.map((path) => shortened(path.trajectory)) }),
  });
  tableOf("slowest", ["trajectory", "seconds", ...inOrder(parts).map(title)].map((text) => el("th", { scope: "col" }, text)), paths.map((path) => el("tr", {},
    el("td", {}, path.trajectory), valued(path.lasts_s, tenths), ...inOrder(parts).map((part) => valued(path.parts[part] ?? 0, tenths)))));
}

function drawRemedies() {
  const { remedies, no_remedies: none } = page;
  byId("simulated").textContent = none ? `No remedies: ${none}.` : `Less time than ${remedies[0].over} takes, simulated on these trajectories, with the 95 % interval of the mean.`;
  byId("settings").hidden = document.querySelector('[data-table="settings"]').hidden = !remedies.length;
  tableOf("settings", ["setting", "less time", "from", "to"].map((text) => el("th", { scope: "col" }, text)), remedies.map((each) => el("tr", {},
    el("td", {}, each.setting), valued(each.saving, percent), valued(each.low, percent), valued(each.high, percent))));
  byId("blocks").replaceChildren(...remedies.flatMap((each) => [el("h3", {}, `${each.setting}: settings of ${each.framework} to paste`), el("pre", {}, each.block)]));
}

// What is drawn as a grid of pixels is exported as it was measured.
Object.assign(OWN_CSV, {
  each: ({ names, kinds, tick_s: s, runs: [{ intervals: own }] }) => [["trajectory", "part", "start_s", "end_s"],
    ...Array.from(own.row, (row, i) => [names[row], title(kinds[own.part[i]]), (own.start[i] * s).toFixed(4), (own.end[i] * s).toFixed(4)])],
  fleet: ({ engines, end_s: end }) => [["engine", "time_s", "running", "waiting"],
    ...engines.flatMap((each) => each.batch.map((running, i) => [each.engine, (((i + 0.5) * end) / each.batch.length).toFixed(4), running, each.waiting[i]]))],
});

function drawAll() {
  drawHead();
  drawSummary();
  drawTimeline();
  drawLongest();
  drawRemedies();
}

begin((unpacked) => {
  page = unpacked;
  drawAll();
  addExports(page);
  showMeanings();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
});
