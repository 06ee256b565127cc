// The data of the page: unpacked once, then columns by run, table and name.

const NONE = 0xffffffff;
const FLAG = { open: 1, preempted: 2, lost: 4 };

async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const block = await new Response(stream).arrayBuffer();
  const size = new DataView(block).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(block, 4, size)));
  const arrays = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array };
  head.columns.forEach((tables, at) => {
    const run = Object.assign(head.runs[at], { at });
    for (const [table, columns] of Object.entries(tables)) {
      run[table] = {};
      for (const [name, [kind, from, length]] of Object.entries(columns)) {
        run[table][name] = new arrays[kind](block, 4 + size + from, length);
      }
    }
  });
  return head;
}

// Unpack the page, let `start` draw it, and say so where that fails.
async function begin(start) {
  try {
    if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the page: it cannot unpack the data");
    start(await unpack());
    document.body.dataset.ready = "true";
  } catch (error) {
    document.body.dataset.ready = "failed";
    byId("notes").replaceChildren(el("p", { class: "note" }, `The page could not be drawn: ${error.message}`));
    throw error;
  }
}

// Where each trajectory's dispatches begin, and which row of the run a name of the page has.
function index(run, names) {
  const { trajectories: t, dispatches: d } = run;
  run.rowOf = new Int32Array(names).fill(-1);
  t.name.forEach((name, row) => { run.rowOf[name] = row; });
  run.first = new Uint32Array(t.name.length + 1);
  for (const row of d.trajectory) run.first[row + 1] += 1;
  for (let row = 0; row < t.name.length; row += 1) run.first[row + 1] += run.first[row];
  run.ofEngine = run.engines.map(() => []);
  d.engine.forEach((engine, i) => run.ofEngine[engine].push(i));
  run.migrationsOf = new Map();
  run.migrations.trajectory.forEach((row, i) => {
    if (!run.migrationsOf.has(row)) run.migrationsOf.set(row, []);
    run.migrationsOf.get(row).push(i);
  });
}

// Seconds at which dispatch `i` was runnable, dispatched, begun, past its prefill, and over.
function phases(run, i) {
  const { dispatches: d, tick_s: s } = run;
  const began = Math.min(d.dispatched[i] + d.queued[i], d.ended[i]);
  return {
    runnable: d.runnable[i] * s,
    dispatched: d.dispatched[i] * s,
    began: began * s,
    decoding: Math.min(began + d.prefill[i], d.ended[i]) * s,
    ended: d.ended[i] * s,
  };
}

// Seconds until which the tool after dispatch `i` lasted; that dispatch's own end when there was none.
function toolUntil(run, i) {
  const { dispatches: d, trajectories: t, tick_s: s } = run;
  if (d.flags[i]) return d.ended[i] * s;
  const row = d.trajectory[i];
  if (i + 1 < run.first[row + 1]) return d.runnable[i + 1] * s;
  if (t.pending[row] !== NONE) return t.pending[row] * s;
  return t.finished[row] === NONE ? run.end_s : t.finished[row] * s;
}

// Mean number of intervals that hold each of `n` equal stretches of time from `from` to `to`.
function binned(n, from, to, each) {
  const mean = new Float64Array(n);
  const step = new Float64Array(n + 1);
  const width = (to - from) / n;
  each((begin, end) => {
    const a = Math.max((begin - from) / width, 0);
    const b = Math.min((end - from) / width, n);
    if (!(b > a)) return;
    const first = Math.floor(a);
    const last = Math.min(Math.floor(b), n - 1);
    if (first === last) {
      mean[first] += b - a;
      return;
    }
    mean[first] += first + 1 - a;
    mean[last] += b - last;
    step[first + 1] += 1;
    step[last] -= 1;
  });
  for (let i = 0, sum = 0; i < n; i += 1) {
    sum += step[i];
    mean[i] += sum;
  }
  return mean;
}
