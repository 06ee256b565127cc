// The address holds the view: section, run, stretch of time, engine, trajectory, order, search, pair.
// `#timeline?run=heddle+s0&from=10&to=20`. What is as the page opens is left out.

const address = { section: "", opened: null, quiet: true };

const VIEW = {
  run: { get: (page) => page.run.label, set: (page, text) => found(page.runs.findIndex((run) => run.label === text), (at) => { page.run = page.runs[at]; }) },
  trajectory: { get: (page) => (page.followed === null ? "" : page.names[page.followed]), set: (page, text) => found(page.names.indexOf(text), (at) => { page.followed = at; }) },
  time: {
    get: () => (timeline.range === null ? "" : timeline.range.map((s) => +s.toFixed(3)).join("-")),
    set: (page, text) => {
      const [from, to] = text.split("-").map(Number);
      const known = from >= 0 && to > from && from < page.run.end_s;
      if (known) timeline.range = [from, Math.min(to, page.run.end_s)];
      return known;
    },
  },
  engine: { get: (page) => page.run.engines[timeline.engine]?.name ?? "", set: (page, text) => found(page.run.drawn.find((e) => page.run.engines[e].name === text) ?? -1, (e) => { timeline.engine = e; }) },
  measure: { get: () => timeline.measure, set: (page, text) => found(MEASURES.findIndex(([name]) => name === text), () => { timeline.measure = text; }) },
  lengths: { get: () => membership.chosen ?? "", set: (page, text) => found(["planned", "ended"].indexOf(text), () => { membership.chosen = text; }) },
  sort: {
    get: () => `${sorting.by}${sorting.down ? "" : "-up"}`,
    set: (page, text) => {
      const by = text.replace(/-up$/, "");
      return found(columnsOf(page).findIndex(([name]) => name === by), () => Object.assign(sorting, { by, down: by === text }));
    },
  },
  search: { get: () => byId("search").value, set: (page, text) => { byId("search").value = text; return true; } },
  against: {
    get: (page) => (page.runs.length > 1 ? `${page.runs[pair.from].label} / ${page.runs[pair.to].label}` : ""),
    set: (page, text) => {
      const [from, to] = text.split(" / ").map((label) => page.runs.findIndex((run) => run.label === label));
      const known = from >= 0 && to >= 0 && from !== to;
      if (known) Object.assign(pair, { from, to });
      return known;
    },
  },
};

function found(at, use) {
  if (at < 0) return false;
  use(at);
  return true;
}

const viewed = (page) => Object.fromEntries(Object.entries(VIEW).map(([name, { get }]) => [name, get(page)]));

// What depends on the run in view is as that run opens, not as the page does.
const OF_RUN = ["engine", "lengths", "time"];

// Called after every change of the view.
function remember(page) {
  if (address.quiet) return;
  const now = viewed(page);
  const params = new URLSearchParams();
  const other = now.run !== address.opened.run;
  for (const [name, value] of Object.entries(now)) {
    const usual = other && OF_RUN.includes(name) ? page.run.opened?.[name] : address.opened[name];
    if (value !== usual) params.set(name, value);
  }
  const query = params.toString();
  const hash = address.section || query ? `#${address.section}${query ? `?${query}` : ""}` : "";
  if (hash !== location.hash) history.replaceState(null, "", hash || location.pathname + location.search);
}

// Read the address. Names that this page does not have are listed in a note.
function restore(page) {
  const [section, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  const params = new URLSearchParams(query);
  address.section = document.querySelector(`section[id="${CSS.escape(section)}"]`) ? section : "";
  const unknown = [];
  // The run and its defaults first: an engine and a stretch of time are of it.
  if (params.has("run") && !VIEW.run.set(page, params.get("run"))) unknown.push("run");
  enter(page);
  for (const [name, { set }] of Object.entries(VIEW)) {
    if (name !== "run" && params.has(name) && !set(page, params.get(name))) unknown.push(name);
  }
  byId("unknown").hidden = !unknown.length;
  byId("unknown").textContent = `The address has another ${unknown.join(", ")} than this page: shown is what the page opens with.`;
}

const goTo = (section) => byId(section || "summary").scrollIntoView();

function followAddress(page) {
  for (const link of document.querySelectorAll("nav .links a")) {
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      address.section = link.getAttribute("href").slice(1);
      remember(page);
      goTo(address.section);
    });
  }
  document.querySelector("main").addEventListener("click", (event) => {
    const section = event.target.closest("section");
    if (section) address.section = section.id;
    remember(page);
  });
  byId("search").addEventListener("input", () => remember(page));
  window.addEventListener("hashchange", () => {
    reopen(page);
    goTo(address.section);
  });
}
