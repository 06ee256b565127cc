// What ran in each slot of one engine, and the tooltip of a step.

const MARKS = 1200;

// Slots as a grid of pixels: any number of steps costs the same to draw.
function drawSlots(page) {
  const run = page.run;
  const [from, to] = span(run);
  const { dispatches: d } = run;
  byId("engine").value = String(timeline.engine);
  const mine = run.ofEngine[timeline.engine].filter((i) => phases(run, i).ended >= from && phases(run, i).dispatched <= to);
  const slots = run.ofEngine[timeline.engine].reduce((most, i) => Math.max(most, d.slot[i] + 1), 1);
  const across = Math.max(Math.min(byId("slots").clientWidth - room(run).l - room(run).r, 1600), 300);
  const kinds = Array.from({ length: slots }, () => new Float32Array(across).fill(NaN));
  const cells = Array.from({ length: slots }, () => new Int32Array(across).fill(-1));
  const column = (s) => Math.floor(((s - from) / (to - from)) * across);
  for (const i of mine) {
    const p = phases(run, i);
    const last = Math.min(Math.max(column(p.ended), column(p.dispatched) + 1), across);
    const fill = (begin, end, kind) => {
      kinds[d.slot[i]].fill(kind, Math.max(begin, 0), Math.max(end, 0));
      cells[d.slot[i]].fill(i, Math.max(begin, 0), Math.max(end, 0));
    };
    fill(column(p.dispatched), last, d.flags[i] & FLAG.lost ? 4 : 3);
    if (!(d.flags[i] & FLAG.lost)) {
      fill(column(p.dispatched), Math.min(column(p.decoding), last), 2);
      fill(column(p.dispatched), Math.min(column(p.began), last), 1);
    }
    // A hair of nothing between two steps, where there is room for it.
    if (last - column(p.dispatched) > 6 && last < across) kinds[d.slot[i]][last - 1] = NaN;
  }
  timeline.cells = cells;
  const colour = ["--waiting", "--prefill", "--decode", "--lost"].map(css);
  const trace = {
    type: "heatmap", z: kinds, x0: from + (to - from) / across / 2, dx: (to - from) / across, y0: 0, dy: 1, zmin: 0.5, zmax: 4.5, showscale: false, hoverinfo: "none",
    colorscale: colour.flatMap((each, k) => [[k / 4, each], [(k + 1) / 4, each]]), ygap: slots <= 130 ? 1 : 0, hoverongaps: false,
  };
  plot("slots", [trace, ...marks(run, mine)], {
    height: Math.min(Math.max(slots * 8, 70), 560) + 50, margin: room(run), hoverdistance: 4, // beside a mark is the step below it
    xaxis: timeAxis(run),
    yaxis: axis("slot", { automargin: false, range: [slots - 0.5, -0.5], autorange: false, fixedrange: true, showgrid: false, nticks: 6, tickformat: "d" }),
  }, {
    ...inView(page),
    plotly_click: ({ points }) => {
      const i = dispatchAt(points[0]);
      // Not at once: a second click would mean to see all again.
      if (i >= 0) timeline.soon = setTimeout(() => page.follow(page.run.trajectories.name[page.run.dispatches.trajectory[i]]), 350);
    },
    plotly_hover: ({ event, points }) => {
      const i = dispatchAt(points[0]);
      if (i >= 0) tip(event, ...stepTooltip(page, page.run, i));
      else tip(null);
    },
  });
}

const dispatchAt = (point) => (Array.isArray(point.pointNumber) ? timeline.cells[point.pointNumber[0]][point.pointNumber[1]] : point.customdata);

// Preemptions and arrivals by migration, as long as single ones are distinguishable.
function marks(run, mine) {
  const { dispatches: d } = run;
  const found = { preempted: [], moved: [] };
  for (const i of mine) {
    if (d.flags[i] & FLAG.preempted) found.preempted.push(i);
    if (cameFrom(run, i) !== null) found.moved.push(i);
  }
  const look = { preempted: ["x-thin", "--preempted", (p) => p.ended], moved: ["diamond", "--migration", (p) => p.dispatched] };
  return Object.entries(look).filter(([name]) => found[name].length <= MARKS).map(([name, [symbol, colour, when]]) => ({
    type: "scatter", mode: "markers", cliponaxis: false, x: found[name].map((i) => when(phases(run, i))), y: found[name].map((i) => d.slot[i]), customdata: found[name], hoverinfo: "none",
    marker: { symbol, size: 7, color: css(colour), line: { width: name === "preempted" ? 2 : 1, color: name === "preempted" ? css(colour) : css("--raised") } },
  }));
}

// The engine on which the trajectory ran before, when this dispatch is the first after a move.
function cameFrom(run, i) {
  const { dispatches: d } = run;
  const before = i > 0 && d.trajectory[i - 1] === d.trajectory[i] ? d.engine[i - 1] : null;
  return before === null || before === d.engine[i] ? null : before;
}

function stepTooltip(page, run, i) {
  const { dispatches: d, tick_s: s } = run;
  const p = phases(run, i);
  const name = page.names[run.trajectories.name[d.trajectory[i]]];
  const flags = d.flags[i];
  const end = flags & FLAG.lost ? "lost with its engine" : flags & FLAG.preempted ? "preempted" : flags & FLAG.open ? "still running" : "finished";
  const from = cameFrom(run, i);
  const tool = d.tool[i] === NONE || !run.tools[d.tool[i]] ? "" : `, then ${run.tools[d.tool[i]]} for ${seconds(toolUntil(run, i) - p.ended)}`;
  const decode = p.ended - p.decoding;
  const pace = d.output[i] > 1 && !(flags & (FLAG.lost | FLAG.open)) ? `, ${number((1000 * decode) / (d.output[i] - 1))} ms per token` : "";
  return [`${name}, step ${d.step[i]}`, [
    `on ${run.engines[d.engine[i]].name} from ${seconds(p.dispatched)} to ${seconds(p.ended)}: ${end}${tool}`,
    `waited ${seconds(p.dispatched - p.runnable)} for it and ${seconds(d.queued[i] * s)} inside it`,
    `prefill ${seconds(d.prefill[i] * s)} of ${number(d.context[i])} tokens, ${number(d.cached[i])} of them cached`,
    `${number(d.output[i])} tokens in ${seconds(decode)}${pace}`,
    ...(from === null ? [] : [`its step before ran on ${run.engines[from].name}`]),
    ...(d.recomputes[i] ? [`recomputed ${d.recomputes[i]} times`] : []),
  ]];
}
