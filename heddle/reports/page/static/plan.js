// The engines of the run in view as blocks of GPUs, and whose lengths they hold.

const membership = { chosen: null };

function tpColour(tp) {
  return css(`--tp-${tp >= 8 ? 8 : tp >= 4 ? 4 : tp >= 2 ? 2 : 1}`);
}

function drawPlan(page) {
  const run = page.run;
  const planned = run.lengths.planned !== undefined;
  const options = planned ? [["planned", "as planned"], ["ended", "that ended there"]] : [["ended", "that ended there"]];
  choice("membership", options, membership.chosen, (value) => {
    membership.chosen = value;
    drawPlan(page);
  });
  if (options.length === 1) byId("membership").textContent = options[0][1];
  const lengths = run.lengths[membership.chosen].map((each) => each && {
    count: each[0], total: each[1], least: each[2], q1: each[3], median: each[4], q3: each[5], most: each[6],
  });
  const some = run.drawn.length < run.engines.length ? ` ${number(run.drawn.length)} of ${number(run.engines.length)} engines are drawn.` : "";
  byId("mix").textContent = `${mix(run)}${some}`;
  byId("cluster").replaceChildren(...run.drawn.map((e, at) => block(page, run.engines[e], e, lengths[at])));
  byId("lengths").closest("figure").hidden = !run.drawn.length;
  if (run.drawn.length) drawLengths(run, lengths);
}

function mix(run) {
  const { of, again } = run.fleet;
  const parts = of.map(([label, _, count]) => `${number(count)} × ${label}`);
  const gpus = of.reduce((sum, [_, tp, count]) => sum + tp * count, 0);
  const gpuCounts = `${parts.join(" + ")} = ${gpus} GPUs${again ? `, and ${again} started again after a failure` : ""}.`;
  if (!run.plan) return `${gpuCounts} Not planned: the policy takes the engines it is given.`;
  if (run.plan.of_tail) return `${gpuCounts} The policy chose the first engines when the rollout started; the first plan for its tail came after ${seconds(run.plan.solved_s)}.`;
  const estimated = run.plan.estimated_makespan_s;
  return `${gpuCounts} Planned at ${seconds(run.plan.solved_s)}${estimated === null ? "" : `, with an estimated makespan of ${seconds(estimated)}; it took ${seconds(run.end_s)}`}.`;
}

function block(page, engine, e, length) {
  const gpus = Array.from({ length: engine.tp }, () => el("i", { style: `background:${tpColour(engine.tp)}` }));
  const trajectories = `${number(length ? length.count : 0)} traj.`;
  return el("button", {
    type: "button", title: "See its slots", "data-engine": e,
    onclick: () => {
      pickEngine(page, e);
      byId("slots").scrollIntoView({ block: "center" });
    },
  }, `${engine.name} `, el("small", {}, `${engine.label} · ${trajectories}${engine.failed ? " · failed" : ""}`), el("div", { class: "gpus" }, ...gpus));
}

function drawLengths(run, lengths) {
  const shapes = new Map(run.drawn.map((e) => [run.engines[e].label, run.engines[e].tp]));
  const traces = [...shapes].sort((a, b) => b[1] - a[1]).map(([label, tp]) => {
    const mine = run.drawn.map((_, at) => at).filter((at) => run.engines[run.drawn[at]].label === label && lengths[at]);
    const each = (name) => mine.map((at) => Math.max(lengths[at][name], 1));
    return {
      type: "box", name: label, x: mine, lowerfence: each("least"), q1: each("q1"), median: each("median"), q3: each("q3"), upperfence: each("most"),
      marker: { color: tpColour(tp) }, line: { color: css("--text"), width: 1.2 }, fillcolor: tpColour(tp), width: 0.6, hoverinfo: "none", customdata: mine,
    };
  });
  const count = run.drawn.length;
  const every = Math.ceil(count / 40);
  const shown = run.drawn.map((_, at) => at).filter((at) => at % every === 0);
  plot("lengths", traces, {
    height: 280, boxmode: "overlay",
    xaxis: axis("engine", { range: [-0.6, Math.max(count, 8) - 0.4], showgrid: false, tickvals: shown, ticktext: shown.map((at) => plain(run.engines[run.drawn[at]].name)) }),
    yaxis: logAxis("output tokens"),
  });
  const box = byId("lengths");
  box.removeAllListeners("plotly_hover");
  box.on("plotly_hover", ({ event, points }) => {
    const engine = run.engines[run.drawn[points[0].x]];
    const length = lengths[points[0].x];
    tip(event, `${engine.name}, ${engine.label}: ${number(length.count)} trajectories`, [
      `${number(length.least)} to ${number(length.most)} output tokens, median ${number(length.median)}`,
      `${number(length.total)} in all`,
    ]);
  });
}
