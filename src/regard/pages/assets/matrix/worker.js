// The script of the worker; matrixClient.js embeds it as a string.
import { createWorkerApi } from "./workerApi.js";

const answer = createWorkerApi();
onmessage = async ({ data }) => {
  const reply = await answer(data);
  if (reply) postMessage(reply, reply.value?.buffer ? [reply.value.buffer] : []);
};
postMessage("ready");
