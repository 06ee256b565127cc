// The page put together: heading, summary, the run in view, and what follows the reader's clicks.

const HEADLINE = [
  ["throughput_tok_s", "tokens/s"], ["queueing_p99_s", "queueing p99\u00a0s"], ["tpot_mean_ms", "TPOT\u00a0ms"],
  ["prefix_hit", "prefix hit"], ["utilisation", "utilisation"], ["migrations", "migrations"], ["preemptions", "preemptions"],
  ["gpu_hours", "GPU-hours"], ["dollars", "$"],
];
const OF_LOOPS = [["rl_step_s", "step\u00a0s"], ["samples_per_s", "samples/s"], ["staleness_mean", "staleness"], ["wasted_tokens", "wasted tokens"]];
const NOT_OF_LOOPS = ["queueing_p99_s", "migrations", "preemptions"];

const bounded = (run) => run.bound.makespan_s ?? null;
const lasted = (run) => run.summary.makespan_s ?? run.end_s;

function drawHead(page) {
  const { how, summary } = page.runs[0];
  document.querySelector("h1").textContent = page.trace;
  byId("about").textContent = `${number(summary.arrived)} trajectories, ${number(summary.output_tokens)} output tokens on ${how.cluster}, ${how.model}`;
  const notes = page.runs.flatMap((run) => [
    ...(run.note ? [`${run.label}: ${run.note}. Shown is what its journal holds, up to ${seconds(run.end_s)}; it is no result.`] : []),
    ...(run.sample ? [`${run.label}: ${run.sample}. ${run.activity ? `Summary, rollout, plan and what trajectories were doing count all of them${page.runs.length > 1 ? "; how many gained and lost is counted among those drawn by their names" : ""}.` : ""}`] : []),
    ...(run.how["shown the future"] === "no" ? [] : [`${run.label} was shown the future: what it reaches is a bound, not a result.`]),
    ...(run.seed === page.runs[0].seed ? [] : [`${run.label} has another seed than ${page.runs[0].label}: values that the trace does not tell, and the order of groups, may differ.`]),
    ...(["cluster", "model"].some((key) => run.how[key] !== how[key]) ? [`${run.label} ran on ${run.how.cluster}, ${run.how.model}.`] : []),
  ]);
  byId("notes").replaceChildren(...notes.map((note) => el("p", { class: "note" }, note)));
}

function drawSummary(page) {
  const longest = Math.max(...page.runs.map((run) => Math.max(lasted(run), bounded(run) ?? 0)));
  const finished = page.runs.filter((run) => !run.note);
  const best = Math.min(...finished.map(lasted));
  const first = page.runs[0].summary.throughput_tok_s;
  const anyBound = page.runs.some((run) => bounded(run) !== null);
  const bar = (run) => {
    const bound = Math.min(bounded(run) ?? 0, lasted(run));
    const share = (value) => `${(100 * value) / longest}%`;
    return el("div", { class: "bar", title: bounded(run) === null ? null : `at least ${seconds(bounded(run))}` },
      el("span", { class: "rest", style: `width:${share(lasted(run))};background:${runColour(run)}` }),
      el("span", { style: `width:${share(bound)};background:${runColour(run)}` }));
  };
  const headline = page.runs.some((run) => run.training) ? [...OF_LOOPS, ...HEADLINE.filter(([key]) => !NOT_OF_LOOPS.includes(key))] : HEADLINE;
  const cells = (run) => headline.map(([key]) => el("td", {}, number(run.summary[key])));
  const row = (run) => el("tr", { class: run === page.run && page.runs.length > 1 ? "focus" : null },
    el("td", {}, el("span", { class: "swatch", style: `background:${runColour(run)}` }), run.label),
    el("td", { class: run.note === null && lasted(run) === best && finished.length > 1 ? "best" : null }, `${run.note ? "≥ " : ""}${number(lasted(run))}`),
    el("td", { class: "wide" }, bar(run)),
    ...(anyBound ? [el("td", {}, bounded(run) === null || run.note ? "–" : (bounded(run) / lasted(run)).toFixed(2))] : []),
    el("td", {}, first && run.summary.throughput_tok_s ? `${(run.summary.throughput_tok_s / first).toFixed(2)} ×` : "–"), ...cells(run));
  const heads = ["", "makespan\u00a0s", anyBound ? "against the bound" : "", ...(anyBound ? ["of bound"] : []), `vs ${(page.runs[0].regime ?? page.runs[0].policy).split(":")[0]}`, ...headline.map(([, text]) => text)];
  byId("runs").replaceChildren(el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col", class: text.startsWith("against") ? "wide" : null }, text)))), el("tbody", {}, ...page.runs.map(row)));
  const { bound } = page.runs[0];
  byId("bound").textContent = bounded(page.runs[0]) === null
    ? `No bound is shown: ${bound.why}.`
    : `The full part of each bar is the bound: no policy ends this trace on this cluster before ${seconds(bound.makespan_s)} (longest trajectory alone ${seconds(bound.solo_s)}, capacity ${seconds(bound.capacity_s)}${bound.tools_s ? `, tools ${seconds(bound.tools_s)}` : ""}).`;
  spread(page, "figures", (run) => run.summary);
  spread(page, "how", (run) => run.how);
}

// A table with one row for each key and one column for each run.
function spread(page, id, values) {
  const keys = [...new Set(page.runs.flatMap((run) => Object.keys(values(run))))];
  byId(id).replaceChildren(
    el("thead", {}, el("tr", {}, el("th"), ...page.runs.map((run) => el("th", { scope: "col" }, run.label)))),
    el("tbody", {}, ...keys.map((key) => el("tr", {}, el("td", {}, key), ...page.runs.map((run) => el("td", {}, number(values(run)[key])))))),
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

async function begin() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page: it cannot unpack the data");
  page = await unpack();
  page.run = page.runs[page.opens];
  page.followed = straggler(page.run);
  page.follow = (name) => {
    page.followed = name;
    listed.from = -1;
    show(page);
    drawLife(page);
    byId("life").scrollIntoView({ block: "nearest" });
  };
  drawAll(page);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll(page));
  document.body.dataset.ready = "true";
  // What the address points at has moved down while the page was drawn.
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

begin().catch((error) => {
  document.body.dataset.ready = "failed";
  byId("notes").replaceChildren(el("p", { class: "note" }, `The page could not be drawn: ${error.message}`));
  throw error;
});
