// Calls to the router that served this page, with the API key if it requires one.

const KEY = "baton-key";
const TIMEOUT = 8000; // milliseconds; a frozen router does not refuse connections
const GATEWAY = new Set([502, 504]); // a proxy's statuses for a router that does not answer

/** Sends "locked" when the router requires a key, "lost" when it does not answer, and "back". */
export const router = new EventTarget();

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response = null;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
  }
  const answered = response !== null && !GATEWAY.has(response.status);
  router.dispatchEvent(new Event(answered ? "back" : "lost"));
  if (!answered) throw new Error("The router does not answer.");
  if (response.status === 401) router.dispatchEvent(new Event("locked"));
  if (!response.ok) throw Object.assign(new Error(await errorMessage(response)), { status: response.status });
  return response;
}

export async function get(path) {
  return (await call(path, { signal: AbortSignal.timeout(TIMEOUT) })).json();
}

/** The router's error message. */
async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}

/** The data of each server-sent event. Throws the error of an event called "error". */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await next(reader);
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (block.startsWith("event: error")) throw new Error(JSON.parse(data).error.message);
      if (data) yield JSON.parse(data);
    }
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The connection to the router broke.");
  }
}
