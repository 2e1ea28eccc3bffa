// A worker's own script; `lazy.js` has its text.
import { server } from "./serve.js";

const answer = server();
onmessage = async ({ data }) => {
  const reply = await answer(data);
  if (reply) postMessage(reply, reply.value?.buffer ? [reply.value.buffer] : []);
};
postMessage("ready");
