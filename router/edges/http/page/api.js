// Calls to the router that served this page, with the key where it asks for one.

const KEY = "baton-key";

/** Called when the router wants a key. */
export const locked = new EventTarget();

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function get(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (response.status === 401) locked.dispatchEvent(new Event("locked"));
  if (!response.ok) throw Object.assign(new Error(await problem(response)), { status: response.status });
  return response.json();
}

/** What went wrong, in the router's own words. */
export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}

/** The data of each server-sent event; throws what an event called "error" says. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
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
