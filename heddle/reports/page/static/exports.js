// Every table and figure as CSV, every figure as PNG, SVG and PDF, every table as LaTeX.

const csvCell = (value) => {
  const text = value === null || value === undefined || Number.isNaN(value) ? "" : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
};
const csvText = (lines) => lines.map((line) => `${line.map(csvCell).join(",")}\r\n`).join("");

function save(name, url) {
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
}

function saveText(page, id, ending, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain;charset=utf-8" }));
  save(`${page.trace}-${id}.${ending}`, url);
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

async function savePicture(page, id, format) {
  save(`${page.trace}-${id}.${format}`, await pictureOf(page, id, format));
}

// A PDF page of the size of the picture, which it has as a JPEG.
async function savePdf(page, id) {
  const url = await pictureOf(page, id, "jpeg");
  const picture = new Image();
  picture.src = url;
  await picture.decode();
  const [w, h] = [picture.naturalWidth, picture.naturalHeight];
  const [wide, high] = [w / 2, h / 2];
  const jpeg = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
  const drawing = `q ${wide} 0 0 ${high} 0 0 cm /P Do Q`;
  const objects = [
    ["<< /Type /Catalog /Pages 2 0 R >>"],
    ["<< /Type /Pages /Kids [3 0 R] /Count 1 >>"],
    [`<< /Type /Page /Parent 2 0 R /MediaBox [0 0 ${wide} ${high}] /Resources << /XObject << /P 4 0 R >> >> /Contents 5 0 R >>`],
    [`<< /Type /XObject /Subtype /Image /Width ${w} /Height ${h} /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /DCTDecode /Length ${jpeg.length} >>\nstream\n`, jpeg, "\nendstream"],
    [`<< /Length ${drawing.length} >>\nstream\n${drawing}\nendstream`],
  ];
  const parts = ["%PDF-1.4\n"];
  const size = () => parts.reduce((sum, part) => sum + part.length, 0);
  const offsets = objects.map((object, i) => {
    const at = size();
    parts.push(`${i + 1} 0 obj\n`, ...object, "\nendobj\n");
    return `${String(at).padStart(10, "0")} 00000 n \n`;
  });
  const table = size();
  parts.push(`xref\n0 ${objects.length + 1}\n0000000000 65535 f \n${offsets.join("")}trailer\n<< /Size ${objects.length + 1} /Root 1 0 R >>\nstartxref\n${table}\n%%EOF\n`);
  const file = URL.createObjectURL(new Blob(parts, { type: "application/pdf" }));
  save(`${page.trace}-${id}.pdf`, file);
  setTimeout(() => URL.revokeObjectURL(file), 10000);
}

const LATEX = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}" };
const latexCell = (value) => String(value ?? "").replace(/[\\~^]/g, (c) => LATEX[c]).replace(/[&%$#_]/g, "\\$&");

// A table of the package booktabs: text to the left, numbers to the right.
function latexOf(page, id) {
  const [heads, ...rows] = linesOf(page, id);
  const kinds = heads.map((_, i) => (rows.some((row) => row[i] !== "" && row[i] !== null && Number.isNaN(Number(row[i]))) ? "l" : "r")).join("");
  const line = (cells) => `${cells.map(latexCell).join(" & ")} \\\\`;
  return ["\\begin{tabular}{" + kinds + "}", "\\toprule", line(heads), "\\midrule", ...rows.map(line), "\\bottomrule", "\\end{tabular}", ""].join("\n");
}

// A picture as on the page, with a title, and the legend that the page draws beside it.
function pictureOf(page, id, format) {
  const box = byId(id);
  const heading = [...box.closest("figure").querySelector("figcaption").childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.textContent.trim()).join(" ").trim();
  const of = box.closest("section").querySelector("h2 .of")?.textContent ?? "";
  const legended = box.data.some((trace) => trace.name && trace.type !== "box");
  const { margin, height } = box.layout;
  return Plotly.toImage({
    data: box.data.map((trace) => ({ ...trace, showlegend: Boolean(trace.name) })),
    layout: {
      ...box.layout, showlegend: legended, legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0 }, paper_bgcolor: css("--raised"), plot_bgcolor: css("--raised"),
      title: { text: plain(`${heading} ${of}`.trim()), x: 0.01, xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 8 }, font: { size: 14 } },
      margin: { ...margin, t: margin.t + (legended ? 64 : 34) },
    },
  }, { format, width: Math.max(box.clientWidth, 640), height: height + (legended ? 64 : 34), scale: 2 });
}

function linesOf(page, id) {
  if (OWN_CSV[id]) return OWN_CSV[id](page);
  const box = byId(id);
  return box.tagName === "TABLE" || box.querySelector(":scope > table") ? tableLines(box) : figureLines(box);
}

const tableLines = (box) => [...box.querySelectorAll("tr:not(.gap)")].map((tr) => [...tr.cells].filter((cell) => !cell.classList.contains("wide")).map((cell) => cell.dataset.value ?? cell.textContent.trim().replace(/\u00a0/g, " ")));

// What a figure draws: a line for each point.
function figureLines(box) {
  const { xaxis, yaxis } = box.layout;
  const named = (its) => {
    const texts = new Map((its?.tickvals ?? []).map((value, i) => [value, unplain(its.ticktext?.[i] ?? value)]));
    return (value) => texts.get(value) ?? value;
  };
  // Labels of a logarithmic axis are rounded; those of categories are names.
  const [x, y] = [xaxis, yaxis].map((its) => (its?.type === "log" ? (value) => value : named(its)));
  const heads = [its(xaxis, "x"), its(yaxis, "y")];
  const based = box.data.some((trace) => trace.base);
  const lines = box.data.flatMap((trace) => Array.from(trace.x, (value, i) => [
    trace.name ? unplain(trace.name) : "", x(value), y(trace.y[i]), ...(based ? [trace.base?.[i] ?? null] : []),
  ]));
  return [["series", ...heads, ...(based ? ["from"] : [])], ...lines];
}

const its = (layout, name) => layout?.title?.text || name;
const unplain = (text) => String(text).replace(/<br>/g, " ").replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

// Where what is drawn is not what a reader can use: names of engines, exact times, all rows.
const OWN_CSV = {
  engines: (page) => {
    const { run } = page;
    const [from, to] = span(run);
    const grids = ["running", "waiting", "kv"].map((name) => rows(run, name));
    return [["engine", "time_s", "running", "waiting", "kv_share"], ...run.drawn.flatMap((e, at) => Array.from({ length: BINS }, (_, i) => [
      run.engines[e].name, (from + ((i + 0.5) * (to - from)) / BINS).toFixed(4), ...grids.map((grid) => (Number.isNaN(grid[at][i]) ? null : +grid[at][i].toFixed(4))),
    ]))];
  },
  slots: (page) => {
    const { run } = page;
    const { dispatches: d } = run;
    const [from, to] = span(run);
    return [["trajectory", "step", "engine", "slot", "runnable_s", "dispatched_s", "prefill_s", "decode_s", "ended_s", "context_tokens", "cached_tokens", "output_tokens"],
      ...run.ofEngine[timeline.engine].map((i) => [i, phases(run, i)]).filter(([, p]) => p.ended >= from && p.dispatched <= to).map(([i, p]) => [
        page.names[run.trajectories.name[d.trajectory[i]]], d.step[i], run.engines[d.engine[i]].name, d.slot[i],
        ...[p.runnable, p.dispatched, p.began, p.decoding, p.ended].map((s) => s.toFixed(4)), d.context[i], d.cached[i], d.output[i],
      ])];
  },
  lengths: (page) => {
    const { run } = page;
    return [["engine", "shape", "trajectories", "tokens", "least", "q1", "median", "q3", "most"],
      ...run.drawn.flatMap((e, at) => {
        const each = run.lengths[membership.chosen][at];
        return each ? [[run.engines[e].name, run.engines[e].label, ...each]] : [];
      })];
  },
  changes: (page) => {
    const [a, b] = [page.runs[pair.from], page.runs[pair.to]];
    return [["trajectory", "output_tokens", `end_s under ${a.label}`, `end_s under ${b.label}`, "change_s"],
      ...changes(a, b).map((each) => [page.names[each.name], each.output, ...each.ends.map((s) => s.toFixed(4)), each.change.toFixed(4)])];
  },
  loop: (page) => {
    const { trainings: t, training, tick_s: s } = page.run;
    return [["batch", "began_s", "ended_s", "trajectories", "version", "mean_staleness"],
      ...Array.from(t.batch, (batch, i) => [batch, (t.began[i] * s).toFixed(4), (t.ended[i] * s).toFixed(4), t.trajectories[i], t.version[i], training.staleness[i]])];
  },
  table: (page) => {
    const columns = columnsOf(page);
    return [columns.map(([, text]) => text), ...listed.rows.map((row) => columns.map(([, , value]) => {
      const found = value(listed.run, row, page);
      return typeof found === "number" && !Number.isInteger(found) ? found.toFixed(4) : found;
    }))];
  },
};

function exportButtons(page, id, pictured) {
  const button = (text, act) => el("button", { type: "button", "data-export": `${id}.${text.toLowerCase()}`, title: `Save as ${text}`, onclick: act }, text);
  const pictures = pictured ? ["PNG", "SVG"].map((format) => button(format, () => savePicture(page, id, format.toLowerCase()))).concat(button("PDF", () => savePdf(page, id))) : [];
  const table = pictured ? [] : [button("LaTeX", () => saveText(page, id, "tex", latexOf(page, id)))];
  return el("span", { class: "exports" }, ...pictures, button("CSV", () => saveText(page, id, "csv", csvText(linesOf(page, id)))), ...table);
}

function addExports(page) {
  for (const box of document.querySelectorAll("figure > .plot")) box.closest("figure").querySelector("figcaption").append(exportButtons(page, box.id, true));
  for (const box of document.querySelectorAll("[data-table]")) box.append(exportButtons(page, box.dataset.table, false));
}
