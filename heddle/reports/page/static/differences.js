// Two runs of one trace: which trajectories end earlier under the second, and which later.

const DOTS = 8000;
const pair = { from: 0, to: 0 };

function drawDifferences(page) {
  if (page.runs.length < 2) {
    byId("differences").hidden = true;
    document.querySelector('nav a[href="#differences"]').hidden = true;
    return;
  }
  for (const end of ["from", "to"]) {
    byId(end).replaceChildren(...page.runs.map((run) => el("option", { value: run.at, selected: run.at === pair[end] }, run.label)));
    byId(end).onchange = (event) => {
      const other = end === "from" ? "to" : "from";
      const value = Number(event.target.value);
      if (value === pair[other]) pair[other] = pair[end];
      pair[end] = value;
      drawDifferences(page);
      remember(page);
    };
  }
  const [a, b] = [page.runs[pair.from], page.runs[pair.to]];
  const found = changes(a, b);
  // Those that were chosen as the last to end, or for their engine, would count too often.
  const random = found.filter((each) => each.atRandom);
  verdict(page, a, b, random);
  drawChanges(page, a, b, found);
  drawTenths(random);
  list(page, "gained", found.filter((each) => each.change < 0).slice(0, 6));
  list(page, "lost", found.filter((each) => each.change > 0).reverse().slice(0, 6));
}

// Trajectories that ended in both, by change of their end in seconds, the largest gain first.
function changes(a, b) {
  const found = [];
  a.trajectories.name.forEach((name, row) => {
    const other = b.rowOf[name];
    if (other < 0 || a.trajectories.finished[row] === NONE || b.trajectories.finished[other] === NONE) return;
    const ends = [a.trajectories.finished[row] * a.tick_s, b.trajectories.finished[other] * b.tick_s];
    found.push({ name, ends, atRandom: a.trajectories.at_random[row] === 1 && b.trajectories.at_random[other] === 1, change: ends[1] - ends[0], output: Math.max(b.trajectories.output[other], 1) });
  });
  return found.sort((x, y) => x.change - y.change);
}

function verdict(page, a, b, found) {
  const gained = found.filter((each) => each.change < 0);
  const lost = found.filter((each) => each.change > 0);
  const middle = (side) => seconds(Math.abs(side.length ? side[Math.floor(side.length / 2)].change : 0));
  const all = b.end_s - a.end_s;
  const sampled = [a, b].some((run) => run.activity);
  const missing = sampled ? 0 : page.names.length - found.length;
  const share = (side) => `${side.length.toLocaleString("en")} of ${found.length.toLocaleString("en")}`;
  const broken = [a, b].filter((run) => run.note);
  const whole = broken.length
    ? [`Not the whole of it: ${broken.map((run) => run.label).join(" and ")} did not finish. Of what ended in both, `]
    : [el("b", {}, b.label), " ends ", el("b", { class: all < 0 ? "gain" : "loss" }, `${seconds(Math.abs(all))} ${all < 0 ? "sooner" : "later"}`), " than ", el("b", {}, a.label), ". "];
  byId("verdict").replaceChildren(...whole,
    sampled ? `Of a sample of ${number(Math.max(a.trajectories_in_all, b.trajectories_in_all))} trajectories: ` : "",
    el("span", { class: "gain" }, `${share(gained)} trajectories end sooner`), ` (by ${middle(gained)} at the median), `,
    el("span", { class: "loss" }, `${share(lost)} later`), ` (by ${middle(lost)}).`,
    missing ? ` ${missing.toLocaleString("en")} did not end in both and are left out.` : "",
  );
}

function drawChanges(page, a, b, found) {
  // Beyond some thousands, dots only lie on each other: every n-th by change stands for its neighbours.
  const every = Math.ceil(found.length / DOTS);
  const shown = found.filter((_, i) => i % every === 0);
  plot("changes", [{
    type: "scatter", mode: "markers", x: shown.map((each) => each.output), y: shown.map((each) => each.change),
    customdata: shown.map((each) => each.name), hoverinfo: "none",
    marker: { size: shown.length > 1500 ? 4 : 6, opacity: shown.length > 1500 ? 0.5 : 0.75, color: shown.map((each) => css(each.change < 0 ? "--gain" : "--loss")) },
  }], {
    height: 320, xaxis: logAxis("output tokens of the trajectory"),
    yaxis: axis("change of its end (s)", { zeroline: true, zerolinecolor: css("--soft"), zerolinewidth: 1 }),
  }, {
    plotly_click: ({ points }) => page.follow(points[0].customdata),
    plotly_hover: ({ event, points }) => {
      const name = points[0].customdata;
      const [one, two] = [page.runs[pair.from], page.runs[pair.to]];
      const ended = (run) => run.trajectories.finished[run.rowOf[name]] * run.tick_s;
      tip(event, page.names[name], [
        `ends at ${seconds(ended(one))} under ${one.label}, at ${seconds(ended(two))} under ${two.label}`,
        `${number(points[0].x)} output tokens`,
      ]);
    },
  });
}

function drawTenths(found) {
  const byLength = [...found].sort((x, y) => x.output - y.output);
  const count = Math.min(10, byLength.length);
  const parts = Array.from({ length: count }, (_, i) =>
    byLength.slice(Math.floor((i * byLength.length) / count), Math.floor(((i + 1) * byLength.length) / count)));
  const mean = parts.map((part) => part.reduce((sum, each) => sum + each.change, 0) / part.length);
  const label = (part) => `${number(part[0].output)} to ${number(part.at(-1).output)}`;
  plot("tenths", [{
    type: "bar", x: parts.map((_, i) => i), y: mean, marker: { color: mean.map((value) => css(value < 0 ? "--gain" : "--loss")) },
    customdata: parts.map((part) => [label(part), part.length, part.filter((each) => each.change < 0).length]),
    hovertemplate: "%{customdata[0]} output tokens<br>ends %{y:+,.1f} s on average<br>%{customdata[2]:,} of %{customdata[1]:,} sooner<extra></extra>",
  }], {
    height: 320, xaxis: axis("output tokens, up to", { tickvals: parts.map((_, i) => i), ticktext: parts.map((part) => number(part.at(-1).output)), showgrid: false, range: [-0.6, parts.length - 0.4] }),
    yaxis: axis("mean change of the end (s)", { zeroline: true, zerolinecolor: css("--soft"), zerolinewidth: 1 }),
  });
}

function list(page, id, found) {
  byId(id).replaceChildren(...found.map(({ name, change, ends, output }) => el("li", {},
    el("button", { type: "button", onclick: () => page.follow(name) }, page.names[name]),
    ` ${signed(change)} s (${tenths(ends[0])} to ${tenths(ends[1])} s), ${number(output)} tokens`)));
}
