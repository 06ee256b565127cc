// How things look: colours from the style sheet, numbers as text, elements, tooltips, plots.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const byId = (id) => document.getElementById(id);
const runColour = (run) => css(`--run-${run.colour}`);
const runDash = (run) => ["solid", "dash", "dot", "dashdot"][run.dash];

// Text for Plotly, which reads some tags.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function el(tag, more = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(more)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const digits = Number.isInteger(value) ? 0 : Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: digits });
}

const seconds = (value) => (value === null ? "–" : `${number(Math.abs(value) >= 1000 ? Math.round(value) : value)} s`);
const tenths = (value) => (value === null ? "–" : (Math.abs(value) < 0.05 ? 0 : value).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }));
const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : "±"}${tenths(Math.abs(value))}`;

function legend(id, entries) {
  byId(id).replaceChildren(...entries.map(([text, colour, mark]) => {
    const sign = mark ? el("i", { class: "mark", style: `color:${colour}` }, mark) : el("i", { style: `background:${colour}` });
    return el("span", {}, sign, text);
  }));
}

function choice(id, entries, chosen, choose) {
  byId(id).replaceChildren(...entries.map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value, onclick: () => choose(value) }, text)));
}

// A column's head, with its meaning as a tooltip.
function head(text, meaning, more = {}) {
  const said = meaningOf(meaning);
  return el("th", { scope: "col", "data-says": said, "aria-description": said, tabindex: said ? 0 : null, ...more }, text);
}

const meaningOf = (key) => page.meanings[key] ?? (key.startsWith("filled_") ? page.meanings["filled_*"] : null);

// A cell with its exact value for exports.
const valued = (value, text, more = {}) => el("td", { "data-value": value, ...more }, text(value));

function showMeanings() {
  const at = (event) => event.target.closest?.("[data-says]");
  for (const begin of ["pointerover", "focusin"]) {
    document.addEventListener(begin, (event) => {
      const cell = at(event);
      if (!cell) return;
      const { left, bottom } = cell.getBoundingClientRect();
      tip({ clientX: left, clientY: bottom }, cell.textContent.replace(/ [▾▴]$/, ""), [cell.dataset.says]);
    });
  }
  for (const end of ["pointerout", "focusout"]) document.addEventListener(end, (event) => { if (at(event)) tip(null); });
}

function tip(event, title, lines) {
  const box = byId("tip");
  if (!title) {
    box.hidden = true;
    return;
  }
  box.replaceChildren(el("b", {}, title), ...lines.map((line) => el("div", {}, line)));
  box.hidden = false;
  const { clientX: x, clientY: y } = event;
  const width = box.offsetWidth;
  const height = box.offsetHeight;
  box.style.left = `${x + 16 + width > innerWidth ? Math.max(x - width - 16, 4) : x + 16}px`;
  box.style.top = `${Math.max(Math.min(y + 14, innerHeight - height - 6), 4)}px`;
}

function axis(title, more = {}) {
  return {
    title: { text: title, standoff: 6, font: { size: 11.5, color: css("--soft") } },
    gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, showline: true,
    tickfont: { size: 11, color: css("--soft") }, automargin: true, separatethousands: true, ...more,
  };
}

// A logarithmic axis of whole numbers, labelled at 1, 2 and 5 of each power of ten.
function logAxis(title, more = {}) {
  const ticks = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((n) => n * 10 ** power));
  return axis(title, { type: "log", tickvals: ticks, ticktext: ticks.map(number), ...more });
}

// Draw or draw again. `on` has handlers by Plotly's event names, bound the first time.
function plot(id, traces, layout, on = {}) {
  const box = byId(id);
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, bargap: 0.25,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--text") },
    margin: { l: 58, r: 14, t: 8, b: 40 }, dragmode: "zoom", hovermode: "closest",
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 }, align: "left" },
  };
  const config = {
    displayModeBar: false, responsive: true, showTips: false, doubleClick: on.plotly_doubleclick ? false : "reset+autosize",
  };
  const drawn = Plotly.react(box, traces, { ...base, ...layout }, config);
  if (!box.dataset.bound) {
    box.dataset.bound = "yes";
    for (const [event, handle] of Object.entries(on)) box.on(event, handle);
    box.on("plotly_unhover", () => tip(null));
  }
  return drawn;
}
