// llama.cpp as a peer of bench.engine: answers JSON lines (bench/peers/__init__.py).
//
//     node llama_peer.mjs FOLDER THREADS
//
// FOLDER has node_modules/node-llama-cpp, as npm installs it, and model.gguf.

import { createInterface } from "node:readline";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [, , folder, threads] = process.argv;
const entry = join(resolve(folder), "node_modules/node-llama-cpp/dist/index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry));
const options = { gpu: false, build: "never", maxThreads: +threads };
const llama = await getLlama({ ...options, logLevel: LlamaLogLevel.error });
const model = await llama.loadModel({ modelPath: join(folder, "model.gguf") });
let context = null;
let sequences = [];
let size = 0;

async function makeRoom(count, tokens) {
  if (sequences.length === count && size >= tokens) return;
  await context?.dispose();
  context = await model.createContext({
    sequences: count, contextSize: tokens, batchSize: 512, threads: +threads,
  });
  sequences = Array.from({ length: count }, () => context.getSequence());
  size = tokens;
}

async function answer(sequence, prompt, count) {
  await sequence.clearHistory();
  let tokens = 0;
  for await (const _ of sequence.evaluate(prompt, { temperature: 0, yieldEogToken: true }))
    if (++tokens >= count) return;
  throw new Error(`the answer ended after ${tokens} of ${count} tokens`);
}

console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  const { prompts, count } = JSON.parse(line);
  const longest = Math.max(...prompts.map((each) => each.length));
  await makeRoom(prompts.length, longest + count + 16);
  await Promise.all(prompts.map((prompt, i) => answer(sequences[i], prompt, count)));
  console.log("done");
}
process.exit(0);
