// One trajectory under every run: when it waited, ran, was in tools, moved.

function drawLife(page) {
  const name = page.followed;
  byId("who").textContent = name === null ? "choose one in the table" : page.names[name];
  legend("life-legend", [
    ...STATES.map(([state, text]) => [text, css(`--${state}`)]),
    ["preempted", css("--preempted"), "×"], ["migrated", css("--migration"), "◆"],
  ]);
  const runs = page.runs.filter((run) => name !== null && run.rowOf[name] >= 0);
  const bars = Object.fromEntries(STATES.map(([state]) => [state, { x: [], base: [], y: [], of: [] }]));
  const marked = { preempted: { x: [], y: [], of: [] }, migration: { x: [], y: [], of: [] } };
  runs.forEach((run, y) => gather(run, name, y, bars, marked));
  const traces = STATES.map(([state, text]) => ({
    type: "bar", orientation: "h", name: text, ...pick(bars[state]), base: bars[state].base, width: 0.62, hoverinfo: "none",
    marker: { color: css(`--${state}`), line: { width: 0 } },
  }));
  const symbols = { preempted: "x-thin", migration: "diamond" };
  for (const [kind, found] of Object.entries(marked)) {
    traces.push({
      type: "scatter", mode: "markers", ...pick(found), hoverinfo: "none",
      marker: { symbol: symbols[kind], size: 9, color: css(`--${kind}`), line: { width: kind === "preempted" ? 2.5 : 1, color: kind === "preempted" ? css("--preempted") : css("--raised") } },
    });
  }
  const end = Math.max(...runs.map((run) => run.end_s), 1e-9);
  plot("life", traces, {
    height: 64 + 44 * Math.max(runs.length, 1), barmode: "overlay", margin: { l: 130, r: 14, t: 6, b: 40 },
    xaxis: axis("time (s)", { range: [0, end], autorange: false }),
    yaxis: axis("", { range: [Math.max(runs.length, 1) - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, tickvals: runs.map((_, y) => y), ticktext: runs.map((run) => plain(run.label)) }),
  }, {
    plotly_hover: ({ event, points }) => {
      const [at, i, note] = points[0].customdata;
      const run = page.runs[at];
      const [title, lines] = stepTooltip(page, run, i);
      tip(event, `${run.label}: ${title}`, note ? [note, ...lines] : lines);
    },
  });
}

const pick = ({ x, y, of }) => ({ x, y, customdata: of });

function gather(run, name, y, bars, marked) {
  const row = run.rowOf[name];
  const add = (state, from, to, i) => {
    if (!(to > from)) return;
    const into = bars[state];
    into.base.push(from);
    into.x.push(to - from);
    into.y.push(y);
    into.of.push([run.at, i, null]);
  };
  for (let i = run.first[row]; i < run.first[row + 1]; i += 1) {
    const p = phases(run, i);
    add("waiting", p.runnable, p.began, i);
    add("prefill", p.began, p.decoding, i);
    add("decode", p.decoding, p.ended, i);
    add("tool", p.ended, toolUntil(run, i), i);
    if (run.dispatches.flags[i] & FLAG.preempted) mark(marked.preempted, p.ended, y, [run.at, i, null]);
  }
  if (run.trajectories.pending[row] !== NONE && run.first[row + 1] > run.first[row]) {
    add("waiting", run.trajectories.pending[row] * run.tick_s, run.end_s, run.first[row + 1] - 1);
  }
  for (const m of run.migrationsOf.get(row) ?? []) {
    const { migrations: moves } = run;
    const at = moves.began[m] * run.tick_s;
    const note = `${run.engines[moves.source[m]].name} to ${run.engines[moves.target[m]].name} at ${seconds(at)}: ${moves.ok[m] ? `${number(moves.kv[m])} tokens of KV moved` : "without its KV"}`;
    let i = run.first[row];
    while (i + 1 < run.first[row + 1] && run.dispatches.dispatched[i + 1] <= moves.began[m]) i += 1;
    mark(marked.migration, at, y, [run.at, i, note]);
  }
}

function mark(into, x, y, of) {
  into.x.push(x);
  into.y.push(y);
  into.of.push(of);
}
