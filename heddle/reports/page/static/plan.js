// The engines of the run in view as blocks of GPUs, and whose lengths they hold.

const membership = { chosen: null };

function tpColour(tp) {
  return css(`--tp-${tp >= 8 ? 8 : tp >= 4 ? 4 : tp >= 2 ? 2 : 1}`);
}

function drawPlan(page) {
  const run = page.run;
  const planned = run.plan && Object.keys(run.plan.homes).length > 0;
  const options = planned ? [["planned", "as planned"], ["ended", "that ended there"]] : [["ended", "that ended there"]];
  if (!options.some(([value]) => value === membership.chosen)) membership.chosen = options[0][0];
  choice("membership", options, membership.chosen, (value) => {
    membership.chosen = value;
    drawPlan(page);
  });
  if (options.length === 1) byId("membership").textContent = options[0][1];
  const members = membership.chosen === "planned" ? homes(run) : ends(run);
  byId("mix").textContent = mix(run);
  byId("cluster").replaceChildren(...run.engines.map((engine, e) => block(page, engine, e, members[e])));
  drawLengths(run, members);
}

// Rows of trajectories by engine: where their last step ran.
function ends(run) {
  const found = run.engines.map(() => []);
  run.trajectories.home.forEach((engine, row) => { if (engine !== NONE) found[engine].push(row); });
  return found;
}

function homes(run) {
  return run.engines.map((engine) => (run.plan.homes[engine.name] ?? []).map((name) => run.rowOf[name]).filter((row) => row >= 0));
}

function mix(run) {
  const first = run.engines.filter((engine) => !/\+\d+$/.test(engine.name));
  const tps = [...new Set(first.map((engine) => engine.tp))].sort((a, b) => b - a);
  const parts = tps.map((tp) => `${first.filter((engine) => engine.tp === tp).length} × TP ${tp}`);
  const gpus = first.reduce((sum, engine) => sum + engine.tp, 0);
  const again = run.engines.length - first.length;
  const gpuCounts = `${parts.join(" + ")} = ${gpus} GPUs${again ? `, and ${again} started again after a failure` : ""}.`;
  if (!run.plan) return `${gpuCounts} Not planned: the policy takes the engines it is given.`;
  const estimated = run.plan.estimated_makespan_s;
  return `${gpuCounts} Planned at ${seconds(run.plan.solved_s)}${estimated === null ? "" : `, with an estimated makespan of ${seconds(estimated)}; it took ${seconds(run.end_s)}`}.`;
}

function block(page, engine, e, rows) {
  const gpus = Array.from({ length: engine.tp }, () => el("i", { style: `background:${tpColour(engine.tp)}` }));
  const trajectories = `${rows.length.toLocaleString("en")} traj.`;
  return el("button", {
    type: "button", title: "See its slots", "data-engine": e,
    onclick: () => {
      pickEngine(page, e);
      byId("slots").scrollIntoView({ block: "center" });
    },
  }, `${engine.name} `, el("small", {}, `TP ${engine.tp} · ${trajectories}${engine.failed ? " · failed" : ""}`), el("div", { class: "gpus" }, ...gpus));
}

function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (at - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}

function drawLengths(run, members) {
  const groups = members.map((rows) => rows.map((row) => run.trajectories.output[row]).sort((a, b) => a - b));
  const tps = [...new Set(run.engines.map((engine) => engine.tp))].sort((a, b) => b - a);
  const traces = tps.map((tp) => {
    const mine = run.engines.map((_, e) => e).filter((e) => run.engines[e].tp === tp && groups[e].length);
    const at = (share) => mine.map((e) => Math.max(quantile(groups[e], share), 1));
    return {
      type: "box", name: `TP ${tp}`, x: mine, lowerfence: at(0), q1: at(0.25), median: at(0.5), q3: at(0.75), upperfence: at(1),
      marker: { color: tpColour(tp) }, line: { color: css("--text"), width: 1.2 }, fillcolor: tpColour(tp), width: 0.6, hoverinfo: "none", customdata: mine,
    };
  });
  const every = Math.ceil(run.engines.length / 40);
  const shown = run.engines.map((_, e) => e).filter((e) => e % every === 0);
  plot("lengths", traces, {
    height: 280, boxmode: "overlay",
    xaxis: axis("engine", { range: [-0.6, Math.max(run.engines.length, 8) - 0.4], showgrid: false, tickvals: shown, ticktext: shown.map((e) => plain(run.engines[e].name)) }),
    yaxis: logAxis("output tokens"),
  });
  const box = byId("lengths");
  box.removeAllListeners("plotly_hover");
  box.on("plotly_hover", ({ event, points }) => {
    const e = points[0].x;
    const lengths = groups[e];
    tip(event, `${run.engines[e].name}, TP ${run.engines[e].tp}: ${lengths.length.toLocaleString("en")} trajectories`, [
      `${number(lengths[0])} to ${number(lengths.at(-1))} output tokens, median ${number(quantile(lengths, 0.5))}`,
      `${number(lengths.reduce((sum, tokens) => sum + tokens, 0))} in all`,
    ]);
  });
}
