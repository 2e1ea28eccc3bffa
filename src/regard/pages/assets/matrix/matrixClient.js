// The page's side of the lazy matrix: requests to a worker, or to the page itself if there is no worker.
import { decodeArray } from "./payload.js";
import { loadText } from "./storedText.js";
import { MEAN } from "./weights.js";
import { createWorkerApi } from "./workerApi.js";

const WORKER = source("./worker.js");
const MAX_MEASURES = 1000; // entries of the performance timeline that are kept

// -- Arrays that are stored in the page --

// Resolve to the numbers of an encoded array, decoded in the page itself.
export async function loadArray({ array, encoding }) {
  return decodeArray(encoding, await loadText(array));
}

function arraysOfHead(record, head) {
  if (head === MEAN) {
    const arrays = record.query_index.flatMap((_, pair) => arraysOfHead(record, pair));
    return [...new Map(arrays.map((encoded) => [encoded.array, encoded])).values()];
  }
  const query = record.query[record.query_index[head]], key = record.key[record.key_index[head]];
  const mask = record.masks[record.mask_index[head]];
  const modArrays = record.score_mods.flatMap((mod) => Object.values(mod).filter((value) => value?.encoding));
  return [query.numbers, key.numbers, record.lse[head], record.positions, mask.counts, mask.edges, ...modArrays];
}

// -- Requests: one is in flight at a time, so that an aborted one is never started --

let send = null, lastRequest = 0, active = null;
const queue = [], sentArrays = new Set();
let sending = Promise.resolve(), matrixCount = 0;

// Messages that are sent before the worker is ready are kept for it; if it fails to start, the page answers them.
function connect() {
  const answer = createWorkerApi(), pending = [];
  const sendToPage = async (message) => {
    await new Promise((resolve) => setTimeout(resolve));
    receive(await answer(message));
  };
  const keep = (message) => pending.push(message);
  const useSender = (sender) => {
    if (send !== keep) return;
    send = sender;
    pending.forEach(sender);
  };
  send = keep;
  try {
    const worker = new Worker(URL.createObjectURL(new Blob([WORKER], { type: "text/javascript" })));
    worker.onmessage = ({ data }) => (data === "ready" ? useSender((message) => worker.postMessage(message)) : receive(data));
    worker.onerror = (event) => {
      event.preventDefault();
      useSender(sendToPage);
    };
  } catch {
    useSender(sendToPage);
  }
}

function receive(reply) {
  if (!reply) return;
  const { resolve, reject, message, start } = active;
  active = null;
  performance.measure(message.method, { start, end: performance.now(), detail: reply.duration });
  if (performance.getEntriesByType("measure").length > MAX_MEASURES) performance.clearMeasures();
  if (reply.error) reject(new Error(reply.error));
  else resolve(reply.value);
  startNext();
}

// Start the newest request, urgent ones before those that only draw.
function startNext() {
  if (active || !queue.length) return;
  const urgent = queue.findLastIndex((entry) => entry.urgent);
  [active] = queue.splice(urgent < 0 ? queue.length - 1 : urgent, 1);
  active.start = performance.now();
  send(active.message);
}

async function request(matrix, record, head, method, args, { signal = null, urgent = method !== "picture" } = {}) {
  if (!send) connect();
  const arrays = arraysOfHead(record, head).filter(({ array }) => !sentArrays.has(array));
  arrays.forEach(({ array }) => sentArrays.add(array));
  // In the order of the requests: the arrays of a head are sent before any request to it.
  sending = sending.then(async () => {
    for (const { array, encoding } of arrays) {
      const text = await loadText(array); // before `send` is read: meanwhile the worker may have become ready
      send({ array, encoding, text });
      document.getElementById(`array${array}`).remove(); // the worker has it now
    }
  });
  await sending;
  if (signal?.aborted) return null;
  return new Promise((resolve, reject) => {
    const entry = { message: { request: ++lastRequest, matrix, head, method, args }, resolve, reject, urgent };
    queue.push(entry);
    signal?.addEventListener("abort", () => {
      const place = queue.indexOf(entry);
      if (place < 0) return; // in flight, or done
      queue.splice(place, 1);
      resolve(null);
    }, { once: true });
    startNext();
  });
}

// A matrix of the page. Every method takes a head (the number of a pair, or MEAN) and may take { signal, urgent } as its last
// argument; it resolves to null if the signal aborted it.
//   cell(head, i, j)                        { weight, masked }
//   explain(head, i, j)                     how the weight arose, or null; see weights.js
//   row(head, i)                            Float32Array of all weights
//   block(head, rows, columns)              Float32Array, rows × columns; columns ascend
//   tile(head, rowStart, rowStep, rowCount, columnStart, columnStep, columnCount)    Float32Array
//   topKeys(head, i, count)                 [{ key, weight }], the largest first
//   topPairs(head, rows, columns, count)    [{ row, column, weight }], the largest first; columns ascend
//   picture(head, …as tile…, probes, reduce)  Float32Array of maxima or means, MASKED where all is masked; see weights.js
const ARGUMENT_COUNTS = { cell: 2, explain: 2, row: 1, block: 2, tile: 6, topKeys: 2, topPairs: 3, picture: 8 };

export function openMatrix(record) {
  const matrix = matrixCount++;
  let opened = false;
  const methods = Object.entries(ARGUMENT_COUNTS).map(([method, count]) => [method, (head, ...args) => {
    if (!send) connect();
    if (!opened) send({ matrix, record });
    opened = true;
    return request(matrix, record, head, method, args.slice(0, count), args[count]);
  }]);
  return Object.fromEntries(methods);
}
