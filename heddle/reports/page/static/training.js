// An RL loop: trainer, weight updates, engines and services over time, and a table of its steps.

const STEP_COLUMNS = [
  ["batch", "batch"], ["end_s", "ends at s"], ["step_s", "step s"], ["rollout_s", "rollout s"], ["reward_s", "reward s"],
  ["training_s", "training s"], ["update_s", "update s"], ["mean_staleness", "staleness"], ["most_staleness", "oldest"],
  ["trajectories", "trajectories"], ["tokens", "tokens"], ["longest_over_mean", "longest / mean"], ["mean_reward", "reward"], ["wasted_tokens", "wasted tokens"],
];
const LANES = { trainer: 0, weights: 1 };

function drawTraining(page) {
  const { run } = page;
  const none = !run.training;
  byId("training").hidden = none;
  document.querySelector("nav a[href='#training']").hidden = none;
  if (none) return;
  legend("loop-legend", [
    ["weight update", css("--migration")], ...(run.training.moves.length ? [["GPUs to the trainer and back", css("--tool")]] : []), ["rewards due", css("--waiting")], ["starts of environments", css("--decode")],
  ]);
  drawSteps(run); // what is drawn over time follows with the timeline
}

// Updates of one version as one bar: engines are updated together, or a few seconds apart.
function versions(run) {
  const { updates: u, tick_s: s } = run;
  const found = new Map();
  u.version.forEach((version, i) => {
    const known = found.get(version) ?? { version, engines: 0, began: Infinity, ended: 0 };
    found.set(version, { version, engines: known.engines + 1, began: Math.min(known.began, u.began[i] * s), ended: Math.max(known.ended, u.ended[i] * s) });
  });
  return [...found.values()];
}

function lane(items, place, colour, more = {}) {
  return {
    type: "bar", orientation: "h", yaxis: "y", hoverinfo: "none", width: 0.72,
    base: items.map((item) => item.began), x: items.map((item) => item.ended - item.began), y: items.map(() => place),
    customdata: items.map((item) => item.said), marker: { color: colour, line: { width: 0 }, ...more },
  };
}

function drawLoop(page) {
  const { run } = page;
  if (!run.training) return;
  const { trainings: t, training, tick_s: s } = run;
  const [from, to] = span(run);
  const inSight = (items) => items.filter((item) => item.ended >= from && item.began <= to);
  const batches = inSight(Array.from(t.batch, (batch, i) => ({
    began: t.began[i] * s, ended: t.ended[i] * s, stale: training.staleness[i],
    said: [`Batch ${number(batch)}, ${seconds(t.began[i] * s)} to ${seconds(t.ended[i] * s)}`,
      `${seconds((t.ended[i] - t.began[i]) * s)} of training on ${number(t.trajectories[i])} trajectories, weights version ${number(t.version[i])}`,
      `staleness ${number(training.staleness[i])} in the mean, ${number(t.most_staleness[i])} at most`],
  })));
  const updates = inSight(versions(run).map((each) => ({
    ...each,
    said: [`Weights version ${number(each.version)}`, `${seconds(each.began)} to ${seconds(each.ended)}: ${seconds(each.ended - each.began)} from the end of training until the last of ${number(each.engines)} engines has them`],
  })));
  const moves = inSight(training.moves.map(([role, began, ended]) => ({
    began, ended, said: [`GPUs to ${role}`, `${seconds(began)} to ${seconds(ended)}`],
  })));
  const most = Math.max(1, ...training.staleness);
  const scale = [[0, css("--low-stale")], [0.5, css("--mid-stale")], [1, css("--high-stale")]];
  const drawn = run.drawn.length;
  const width = (to - from) / BINS;
  const engines = {
    type: "heatmap", z: rows(run, "running"), x0: from + width / 2, dx: width, y0: 0, dy: 1, yaxis: "y2", hoverinfo: "none", hoverongaps: false,
    colorscale: [[0, css("--low")], [0.5, css("--mid")], [1, css("--high")]], zmin: 0, zmax: peak(run, "running"),
    colorbar: { title: { text: "running", font: { size: 11, color: css("--soft") } }, thickness: 10, outlinewidth: 0, tickfont: { size: 11, color: css("--soft") }, x: 1.01, y: 0.28, yanchor: "bottom", len: 0.42 },
  };
  const stepped = (curve, name, more) => ({
    type: "scatter", mode: "lines", yaxis: "y3", name, x: [...curve.x, run.end_s], y: [...curve.y, curve.y.at(-1)],
    line: { shape: "hv", width: 1.4, color: css(more) }, hovertemplate: `%{y} ${name}<extra></extra>`,
  });
  const rewards = { ...stepped(training.rewards, "rewards due", "--waiting"), fill: "tozeroy" };
  const bars = [
    lane(batches, LANES.trainer, batches.map((item) => item.stale), {
      colorscale: scale, cmin: 0, cmax: most, showscale: true,
      colorbar: { title: { text: "staleness", font: { size: 11, color: css("--soft") } }, thickness: 10, outlinewidth: 0, tickfont: { size: 11, color: css("--soft") }, x: 1.01, y: 1, yanchor: "top", len: 0.3, nticks: 4 },
    }),
    lane(updates, LANES.weights, css("--migration")),
    lane(moves, LANES.trainer, css("--tool")),
  ];
  const every = Math.ceil(drawn / 16);
  const shown = run.drawn.map((_, at) => at).filter((at) => at % every === 0);
  const inner = { automargin: false, showgrid: false, fixedrange: true, autorange: false };
  plot("loop", [engines, rewards, stepped(training.starts, "environments starting", "--decode"), ...bars], {
    height: 250 + Math.min(Math.max(drawn * 12, 60), 320), margin: { ...room(run), r: 96 }, barmode: "overlay",
    xaxis: timeAxis(run, { anchor: "y3" }),
    yaxis: axis("", { ...inner, domain: [0.78, 1], range: [1.5, -0.5], tickvals: [0, 1], ticktext: ["trainer", "weights"] }),
    yaxis2: axis("", { ...inner, domain: [0.26, 0.74], range: [drawn - 0.5, -0.5], tickvals: shown, ticktext: shown.map((at) => plain(engineLabel(run.engines[run.drawn[at]]))) }),
    yaxis3: axis("", { automargin: false, domain: [0, 0.22], rangemode: "tozero", fixedrange: true, nticks: 4 }),
  }, {
    ...inView(page),
    plotly_hover: ({ event, points }) => {
      const [point] = points;
      if (point.customdata) {
        const [title, ...lines] = point.customdata;
        tip(event, title, lines);
      } else if (point.data.type === "heatmap") {
        const [e, i] = point.pointNumber;
        const [start, end] = span(page.run);
        tip(event, `${page.run.engines[page.run.drawn[e]].name}, at ${seconds(start + ((i + 0.5) * (end - start)) / BINS)}`, [`${number(point.z)} running`]);
      }
    },
  });
}

function drawSteps(run) {
  const { steps, steps_in_all: all } = run.training;
  byId("steps-note").textContent = steps.length
    ? `Seconds of a step: the trainer waits for trajectories, waits only for rewards of its batch, trains, waits for a weight update or for GPUs.${steps.length < all ? ` ${number(steps.length)} of ${number(all)} steps.` : ""}`
    : "No figures of steps: the loop did not finish.";
  const cell = (step, key) => valued(step[key], key.endsWith("_s") ? tenths : number);
  byId("steps").replaceChildren(...(steps.length ? [el("table", {},
    el("thead", {}, el("tr", {}, ...STEP_COLUMNS.map(([key, text]) => head(text, key)))),
    el("tbody", {}, ...steps.map((step) => el("tr", {}, ...STEP_COLUMNS.map(([key]) => cell(step, key))))))] : []));
}
