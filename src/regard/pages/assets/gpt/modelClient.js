// The page's side of the model: requests to a worker, or to the page itself if there is no worker.
import { loadText } from "../matrix/storedText.js";
import { createModelApi } from "./workerApi.js";

const WORKER = source("./worker.js");

// Resolve to a function that sends a message and resolves to its reply.
function connect() {
  const waiting = new Map();
  const receive = (reply) => {
    waiting.get(reply.request)(reply);
    waiting.delete(reply.request);
  };
  const answer = createModelApi();
  const inPage = async (message) => receive(await answer(message));
  return new Promise((resolve) => {
    const use = (send) => resolve((message) => new Promise((done) => {
      waiting.set(message.request, done);
      send(message);
    }));
    try {
      const worker = new Worker(URL.createObjectURL(new Blob([WORKER], { type: "text/javascript" })));
      worker.onmessage = ({ data }) => (data === "ready" ? use((message) => worker.postMessage(message)) : receive(data));
      worker.onerror = (event) => {
        event.preventDefault();
        use(inPage);
      };
    } catch {
      use(inPage);
    }
  });
}

// Resolve to { unembedding, ask }: `ask(method, args)` resolves to the value of the worker's method, see workerApi.js.
export async function openModel(record) {
  const stored = [record.weights, record.vectors];
  const [send, ...texts] = await Promise.all([connect(), ...stored.map(({ array }) => loadText(array))]);
  let requests = 0;
  async function ask(method, args = {}) {
    const start = performance.now(), reply = await send({ request: ++requests, method, ...args });
    if (reply.error) throw new Error(reply.error);
    performance.measure(method, { start, end: performance.now(), detail: reply.duration });
    return reply.value;
  }
  const arrays = stored.map(({ encoding }, n) => ({ encoding, base64: texts[n] }));
  const unembedding = await ask("load", { record: { config: record.config, shapes: record.shapes }, arrays });
  for (const { array } of stored) document.getElementById(`array${array}`).remove(); // the worker has it now
  return { unembedding, ask };
}
