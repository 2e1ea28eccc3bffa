// The script of the worker.
import { createModelApi } from "./workerApi.js";

const answer = createModelApi();
self.onmessage = async ({ data }) => self.postMessage(await answer(data));
self.postMessage("ready");
