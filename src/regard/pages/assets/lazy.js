// The lazy matrix as the page sees it: questions that a worker answers, or the page itself where there is no worker.
import { server } from "./serve.js";
import { partOf } from "./weights.js";

const WORKER = source("./worker.js");
const MEASURED = 1000; // answers whose times are kept, for whoever looks at performance

// -- Parts that stand in the page --

// A part's text once it is all there: a page begins before it is read to its end.
async function textOf(number) {
  const find = () => document.getElementById(`part${number}`);
  if (document.readyState === "loading" && !find()?.nextElementSibling) {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  return find().textContent;
}

// The numbers of a part, for the page itself.
export async function numbersOf(part) {
  return partOf(part.kind, await textOf(part.part));
}

function partsOf(record, head) {
  const query = record.query[record.query_of[head]], key = record.key[record.key_of[head]];
  const mask = record.masks[record.mask_of[head]];
  const mods = record.mods.flatMap((mod) => Object.values(mod).filter((each) => each?.kind && "part" in each));
  return [query.numbers, key.numbers, record.lse[head], record.positions, mask.counts, mask.edges, ...mods];
}

// -- Questions: one at a time, so that those no longer wanted are never begun --

let send = null, numbered = 0, busy = null;
const waiting = [], sent = new Set();
let loading = Promise.resolve(), opened = 0;

// What a worker is sent before it is ready, it gets when it is; if it never is, the page takes it.
function connect() {
  const here = server(), early = [];
  const toPage = async (message) => {
    await new Promise((done) => setTimeout(done));
    receive(await here(message));
  };
  const settle = (to) => {
    if (send !== later) return;
    send = to;
    early.forEach(to);
  };
  const later = (message) => early.push(message);
  send = later;
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([WORKER], { type: "text/javascript" })));
    worker.onmessage = ({ data }) => (data === "ready" ? settle((message) => worker.postMessage(message)) : receive(data));
    worker.onerror = (event) => {
      event.preventDefault();
      settle(toPage);
    };
  } catch {
    settle(toPage);
  }
}

function receive(reply) {
  if (!reply) return;
  const { resolve, reject, message, start } = busy;
  busy = null;
  performance.measure(message.what, { start, end: performance.now(), detail: reply.took });
  if (performance.getEntriesByType("measure").length > MEASURED) performance.clearMeasures();
  if (reply.error) reject(new Error(reply.error));
  else resolve(reply.value);
  next();
}

// The newest first, and what a reader points at before what is only drawn.
function next() {
  if (busy || !waiting.length) return;
  let best = waiting.length - 1;
  for (let i = best; i >= 0; i--) {
    if (waiting[i].urgent) {
      best = i;
      break;
    }
  }
  [busy] = waiting.splice(best, 1);
  busy.start = performance.now();
  send(busy.message);
}

async function question(matrix, record, head, what, args, { signal = null, urgent = what !== "picture" } = {}) {
  if (!send) connect();
  const fresh = partsOf(record, head).filter((part) => !sent.has(part.part));
  fresh.forEach((part) => sent.add(part.part));
  // In the order they are asked for: what a head needs is sent before anyone can ask it.
  loading = loading.then(async () => {
    for (const { part, kind } of fresh) {
      const text = await textOf(part); // before `send` is looked up: meanwhile the worker may have become ready
      send({ part, kind, text });
      document.getElementById(`part${part}`).remove(); // it is the worker's now
    }
  });
  await loading;
  if (signal?.aborted) return null;
  return new Promise((resolve, reject) => {
    const entry = { message: { ask: ++numbered, matrix, head, what, args }, resolve, reject, urgent };
    waiting.push(entry);
    signal?.addEventListener("abort", () => {
      const place = waiting.indexOf(entry);
      if (place < 0) return; // under way, or done
      waiting.splice(place, 1);
      resolve(null);
    }, { once: true });
    next();
  });
}

// A matrix of the page. Each question names a head (a pair, counted from 0), and may end with { signal, urgent }; the
// answer to one that was dropped by its signal is null.
//   cell(head, i, j)                        { weight, hidden }
//   row(head, i)                            Float32Array of all weights
//   block(head, rows, columns)              Float32Array, rows × columns; columns ascend
//   tile(head, rowStart, rowStep, rowCount, columnStart, columnStep, columnCount)    Float32Array
//   strongest(head, i, count)               [{ key, weight }], largest first
//   picture(head, …as tile…, probes)        Float32Array of means, −1 where all is hidden; see weights.js
const LENGTHS = { cell: 2, row: 1, block: 2, tile: 6, strongest: 2, picture: 7 };

export function openMatrix(record) {
  const matrix = opened++;
  let told = false;
  const methods = Object.entries(LENGTHS).map(([what, length]) => [what, (head, ...args) => {
    if (!send) connect();
    if (!told) send({ matrix, record });
    told = true;
    return question(matrix, record, head, what, args.slice(0, length), args[length]);
  }]);
  return Object.fromEntries(methods);
}
