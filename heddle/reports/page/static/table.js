// All trajectories of the run in view. Only rows in sight are in the document, so thousands are no burden.

const ROW = 28;
const SIGHT = 15; // as many as the style sheet leaves room for
const sorting = { by: "finished", down: true };
const listed = { rows: [], from: -1, run: null };

const time = (name) => (run, row) => (run.trajectories[name][row] === NONE ? null : run.trajectories[name][row] * run.tick_s);
const count = (name) => (run, row) => run.trajectories[name][row];
const COLUMNS = [
  ["name", "trajectory", (run, row, page) => page.names[run.trajectories.name[row]]],
  ["finished", "ends at s", time("finished")],
  ["change", "change s", (run, row, page) => changeOf(page, run, row)],
  ["steps", "steps", count("steps")],
  ["output", "tokens", count("output")],
  ["waited", "waited s", time("waited")],
  ["prefill", "prefill s", time("prefill")],
  ["decode", "decode s", time("decode")],
  ["tool", "tools s", time("tool")],
  ["preemptions", "preempt.", count("preemptions")],
  ["recomputes", "recomp.", count("recomputes")],
  ["migrations", "migr.", count("migrations")],
  ["home", "engine", (run, row) => (run.trajectories.home[row] === NONE ? "" : run.engines[run.trajectories.home[row]].name)],
  ["outcome", "outcome", (run, row) => (run.trajectories.outcome[row] === NONE ? "unfinished" : run.outcomes[run.trajectories.outcome[row]])],
];

const TIMES = ["finished", "change", "waited", "prefill", "decode", "tool"];

// Against the first run of the page, or, for that one, against the second.
const other = (page, run) => page.runs[run.at === 0 ? 1 : 0];

function changeOf(page, run, row) {
  const against = other(page, run);
  const there = against ? against.rowOf[run.trajectories.name[row]] : -1;
  if (there < 0 || run.trajectories.finished[row] === NONE || against.trajectories.finished[there] === NONE) return null;
  return run.trajectories.finished[row] * run.tick_s - against.trajectories.finished[there] * against.tick_s;
}

function columnsOf(page) {
  return COLUMNS.filter(([name]) => name !== "change" || page.runs.length > 1);
}

function drawTable(page) {
  const run = page.run;
  const box = byId("table");
  byId("search").oninput = () => fill(page);
  const heads = columnsOf(page).map(([name, text]) => el("th", {
    scope: "col", "data-column": name, "aria-sort": sorting.by === name ? (sorting.down ? "descending" : "ascending") : null,
    "data-says": name === "change" ? `Against its end under ${other(page, run).label}; negative is sooner. Click to sort.` : `${meaningOf(`of:${name}`)} Click to sort.`,
  }, el("button", {
    type: "button",
    onclick: () => {
      Object.assign(sorting, { by: name, down: sorting.by === name ? !sorting.down : name !== "name" });
      drawTable(page);
    },
  }, text, sorting.by === name ? (sorting.down ? " ▾" : " ▴") : "")));
  box.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody")));
  box.onscroll = () => show(page);
  fill(page);
}

function fill(page) {
  const run = page.run;
  const wanted = byId("search").value.trim().toLowerCase();
  const text = (row) => {
    const t = run.trajectories;
    return [page.names[t.name[row]], run.groups[t.group[row]], t.home[row] === NONE ? "" : run.engines[t.home[row]].name, t.outcome[row] === NONE ? "unfinished" : run.outcomes[t.outcome[row]]]
      .some((word) => word !== undefined && word.toLowerCase().includes(wanted));
  };
  const [, , value] = COLUMNS.find(([name]) => name === sorting.by);
  const found = [];
  for (let row = 0; row < run.trajectories.name.length; row += 1) {
    if (!wanted || text(row)) found.push([value(run, row, page), row]);
  }
  const way = sorting.down ? -1 : 1;
  // What has no value comes last in either order.
  const compare = (x, y) => (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  found.sort(([x, i], [y, j]) => (x === null) - (y === null) || (x === null ? 0 : way * compare(x, y)) || i - j);
  Object.assign(listed, { rows: found.map(([, row]) => row), from: -1, run });
  const here = run.trajectories.name.length;
  const all = here < run.trajectories_in_all ? ` shown of ${number(run.trajectories_in_all)}` : "";
  byId("found").textContent = `${number(listed.rows.length)} of ${number(here)} trajectories${all}`;
  byId("table").scrollTop = 0;
  show(page);
}

function show(page) {
  const box = byId("table");
  const sight = SIGHT + 12;
  const from = Math.max(Math.min(Math.floor(box.scrollTop / ROW) - 6, listed.rows.length - sight), 0);
  if (from === listed.from) return;
  listed.from = from;
  const columns = columnsOf(page);
  const gap = (rows) => el("tr", { class: "gap" }, el("td", { colspan: columns.length, style: `height:${rows * ROW}px` }));
  const cell = (name, value) => {
    const tone = name === "change" && value ? (value < 0 ? "gain" : "loss") : null;
    const text = name === "change" && value !== null ? signed(value) : TIMES.includes(name) ? tenths(value) : number(value);
    return el("td", { class: tone }, text);
  };
  const made = listed.rows.slice(from, from + sight).map((row) => {
    const name = listed.run.trajectories.name[row];
    return el("tr", {
      tabindex: 0, class: name === page.followed ? "focus" : null, "data-name": page.names[name],
      onclick: () => page.follow(name), onkeydown: (event) => { if (event.key === "Enter") page.follow(name); },
    }, ...columns.map(([column, , value]) => cell(column, value(listed.run, row, page))));
  });
  const rest = Math.max(listed.rows.length - from - sight, 0);
  box.querySelector("tbody").replaceChildren(gap(from), ...made, gap(rest));
}
