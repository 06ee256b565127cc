// The page put together: heading, summary, the run in view, and what follows the reader's clicks.

const HEADLINE = [
  ["throughput_tok_s", "tokens/s"], ["queueing_p99_s", "queueing p99\u00a0s"], ["tpot_mean_ms", "TPOT\u00a0ms"],
  ["prefix_hit", "prefix hit"], ["utilisation", "utilisation"], ["migrations", "migr."], ["preemptions", "preempt."],
  ["gpu_hours", "GPU-hours"], ["dollars", "$"],
];
const OF_LOOPS = [["rl_step_s", "step\u00a0s"], ["samples_per_s", "samples/s"], ["staleness_mean", "staleness"], ["wasted_tokens", "wasted tokens"]];
const LABELS = new Map([...HEADLINE, ...OF_LOOPS]);
const labelOf = (key) => LABELS.get(key) ?? key.replaceAll("_", "\u00a0").replace(/^(ttft|tpot|rl)/, (word) => word.toUpperCase());
const NOT_OF_LOOPS = ["queueing_p99_s", "migrations", "preemptions"];

// Seeds may draw other values, so the lowest bound counts.
const bounded = (row) => row.runs.reduce((least, at) => Math.min(least, page.runs[at].bound.makespan_s ?? Infinity), Infinity);

function drawHead(page) {
  const { how, summary } = page.runs[0];
  document.querySelector("h1").textContent = page.trace;
  byId("about").textContent = `${number(summary.arrived)} trajectories, ${number(summary.output_tokens)} output tokens on ${how.cluster}, ${how.model}`;
  const shown = page.why.rows.filter((row) => row.oracle).map((row) => `${rowName(row)} was shown the future: what it reaches is a bound, not a result.`);
  const notes = page.runs.flatMap((run) => [
    ...(run.note ? [`${run.label}: ${run.note}. Shown is what its journal holds, up to ${seconds(run.end_s)}; it is no result.`] : []),
    ...(run.sample ? [`${run.label}: ${run.sample}. ${run.activity ? `Summary, rollout, plan and what trajectories were doing count all of them${page.runs.length > 1 ? "; how many gained and lost is counted among those drawn by their names" : ""}.` : ""}`] : []),
    ...(run.late ? [`${run.label}: ${run.late}.`] : []),
    ...(page.why.rows[0].seeds.includes(run.seed) ? [] : [`${run.label} has another seed than ${page.runs[0].label}: values that the trace does not tell, and the order of groups, may differ.`]),
    ...(["cluster", "model"].some((key) => run.how[key] !== how[key]) ? [`${run.label} ran on ${run.how.cluster}, ${run.how.model}.`] : []),
  ]);
  byId("notes").replaceChildren(...[...notes, ...shown].map((note) => el("p", { class: "note" }, note)));
}

function drawSummary(page) {
  const { rows } = page.why;
  const anyBound = rows.some((row) => Number.isFinite(bounded(row)));
  const longest = Math.max(...rows.map((row) => Math.max(row.mean_s, anyBound && Number.isFinite(bounded(row)) ? bounded(row) : 0)));
  const finished = rows.filter((row) => row.finished && !row.oracle);
  const best = Math.min(...finished.map((row) => row.mean_s));
  const first = rows[0].summary.throughput_tok_s;
  const bar = (row) => {
    const bound = Number.isFinite(bounded(row)) ? bounded(row) : 0;
    const share = (value) => `${(100 * value) / longest}%`;
    return el("div", { class: "bar", title: bound ? `at least ${seconds(bound)}` : null },
      el("span", { class: "rest", style: `width:${share(row.mean_s)};background:${rowColour(page, row)}` }),
      el("span", { style: `width:${share(Math.min(bound, row.mean_s))};background:${rowColour(page, row)}` }));
  };
  const headline = page.runs.some((run) => run.training) ? [...OF_LOOPS, ...HEADLINE.filter(([key]) => !NOT_OF_LOOPS.includes(key))] : HEADLINE;
  const ratio = (value, text) => valued(value, () => (value === null ? "–" : text(value)));
  // The narrowest setting that the comparison tried stands beside the best.
  const triedOf = (row) => page.runs[row.runs[0]].tried;
  const narrowest = page.runs.find((run) => run.tried)?.tried.narrowest;
  const tried = (row) => (narrowest === undefined ? [] : [ratio(triedOf(row)?.narrowest === narrowest ? triedOf(row).narrowest_s : null, number)]);
  const line = (row) => el("tr", { class: row.runs.includes(page.run.at) && rows.length > 1 ? "focus" : null },
    el("td", {}, el("span", { class: "swatch", style: `background:${rowColour(page, row)}` }), rowName(row)),
    valued(row.mean_s, () => `${row.finished ? "" : "≥ "}${number(row.mean_s)}${row.ci95_s === null ? "" : ` ± ${tenths(row.ci95_s)}`}`, { class: finished.includes(row) && row.mean_s === best && finished.length > 1 ? "best" : null }),
    ...tried(row),
    el("td", { class: "wide" }, bar(row)),
    ...(anyBound ? [ratio(Number.isFinite(bounded(row)) && row.finished ? bounded(row) / row.mean_s : null, (value) => value.toFixed(2))] : []),
    ratio(first && row.summary.throughput_tok_s ? row.summary.throughput_tok_s / first : null, (value) => `${value.toFixed(2)} ×`),
    el("td", {}, page.runs[row.runs[0]].fleet.of.map(([label, , count]) => `${number(count)} × ${label}`).join(" + ")),
    ...headline.map(([key]) => valued(row.summary[key], number)));
  const seeded = rows.some((row) => row.ci95_s !== null);
  byId("runs").replaceChildren(el("thead", {}, el("tr", {},
    head("", "row"), head(`makespan\u00a0s${seeded ? " ± 95\u00a0%" : ""}`, "makespan_s"),
    ...(narrowest === undefined ? [] : [head(`s at ${narrowest}`, "narrowest_s")]), head(anyBound ? "against the bound" : "", "bar", { class: "wide" }),
    ...(anyBound ? [head("of bound", "of_bound")] : []), head(`vs ${rows[0].label.split(":")[0]}`, "against_first"), head("engines", "engines_of"),
    ...headline.map(([key, text]) => head(text, key)))), el("tbody", {}, ...rows.map(line)));
  const { bound } = page.runs[0];
  byId("bound").textContent = bound.makespan_s === undefined
    ? `No bound is shown: ${bound.why}.`
    : `The full part of each bar is the bound: no policy ends this trace on this cluster before ${seconds(bound.makespan_s)} (longest trajectory alone ${seconds(bound.solo_s)}, capacity ${seconds(bound.capacity_s)}${bound.tools_s ? `, tools ${seconds(bound.tools_s)}` : ""}).`;
  // Means of a policy's seeds first, then each run.
  spread("figures", [...rows.filter((row) => row.runs.length > 1), ...page.runs].map((each) => [each.runs ? `mean of ${rowName(each)}` : each.label, each.summary]), meaningOf);
  spread("how", page.runs.map((run) => [run.label, run.how]), () => null);
}

// A table with one row for each key and one column for each object.
function spread(id, columns, meaning) {
  const keys = [...new Set(columns.flatMap(([, values]) => Object.keys(values)))];
  byId(id).replaceChildren(
    el("thead", {}, el("tr", {}, el("th"), ...columns.map(([label]) => el("th", { scope: "col" }, label)))),
    el("tbody", {}, ...keys.map((key) => el("tr", {}, el("td", { "data-says": meaning(key), tabindex: meaning(key) ? 0 : null }, labelOf(key)), ...columns.map(([, values]) => valued(values[key], number))))),
  );
}

function focus(page, run) {
  page.run = run;
  for (const each of document.querySelectorAll("h2 .of")) each.textContent = page.runs.length > 1 ? `of ${run.label}` : "";
  byId("focus").replaceChildren(...(page.runs.length > 1 ? page.runs.map((each) => el("button", {
    type: "button", "aria-pressed": String(each === run), "data-run": each.at,
    onclick: () => {
      focus(page, each);
      drawSummary(page);
      drawOfRun(page);
      remember(page);
    },
  }, el("span", { class: "swatch", style: `background:${runColour(each)}` }), each.label)) : []));
}

function drawOfRun(page) {
  drawTraining(page);
  drawTimeline(page);
  drawPlan(page);
  drawTable(page);
}

function drawAll(page) {
  focus(page, page.run);
  drawHead(page);
  drawSummary(page);
  drawWhy(page);
  drawOverlays(page);
  drawDifferences(page);
  drawOfRun(page);
  drawLife(page);
}

// The trajectory that ends last, which all wait for.
function straggler(run) {
  const t = run.trajectories;
  const end = (row) => (t.finished[row] === NONE ? Infinity : t.finished[row]);
  let last = 0;
  for (let row = 1; row < t.name.length; row += 1) if (end(row) > end(last)) last = row;
  return t.name[last];
}

let page = null;

function start(unpacked) {
  page = unpacked;
  page.runs.forEach((run) => index(run, page.names.length));
  page.follow = (name) => {
    page.followed = name;
    listed.from = -1;
    show(page);
    drawLife(page);
    byId("life").scrollIntoView({ block: "nearest" });
    remember(page);
  };
  reopen(page);
  addExports(page);
  showMeanings();
  followAddress(page);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(page));
  // What the address points at has moved down while the page was drawn.
  if (address.section) goTo(address.section);
}

// The view as the page opens, then what the address says of it.
function reopen(page) {
  address.quiet = true;
  page.run = page.runs[page.opens];
  page.followed = straggler(page.run);
  Object.assign(sorting, { by: "finished", down: true });
  Object.assign(pair, { from: 0, to: page.opens });
  Object.assign(timeline, { of: null, measure: "running" });
  byId("search").value = "";
  enter(page);
  address.opened = viewed(page);
  restore(page);
  drawAll(page);
  address.quiet = false;
}

begin(start);
