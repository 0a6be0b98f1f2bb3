// Streams one answer, and measures it.

import { call, events } from "./api.js";
import { count, element, time } from "./format.js";
import { chosenModel } from "./models.js";

/** Fills `message`: content, reasoning, id and figures. */
export async function streamAnswer(message, messages, sampling, signal) {
  const began = performance.now();
  const model = chosenModel() ? { model: chosenModel() } : {};
  message.figures = { began, tokens: 0 };
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ messages, ...model, ...sampling, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  message.id = response.headers.get("x-request-id");
  for await (const chunk of events(response)) {
    const delta = chunk.choices[0]?.delta ?? {};
    message.content += delta.content ?? "";
    if (delta.reasoning_content) message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
    if (delta.content || delta.reasoning_content) note(message.figures);
    if (chunk.usage) conclude(message.figures, chunk.usage);
  }
}

function note(figures) {
  figures.last = performance.now();
  figures.first ??= figures.last;
  figures.tokens += 1;
}

function conclude(figures, usage) {
  figures.tokens = usage.completion_tokens;
  figures.cached = usage.prompt_tokens_details?.cached_tokens;
  figures.exact = true;
}

/** The figures of an answer, as far as they are known. */
export function figuresOf({ figures, writing }) {
  if (!figures || (!figures.first && !writing)) return [];
  const parts = [element("span", "ttft", `TTFT ${time(((figures.first ?? performance.now()) - figures.began) / 1000)}`)];
  const seconds = (figures.last - figures.first) / 1000;
  if (figures.tokens > 1 && seconds > 0) {
    parts.push(element("span", "rate", `${((figures.tokens - 1) / seconds).toFixed(1)} tokens/s`));
  }
  if (figures.tokens) parts.push(element("span", "", `${figures.exact ? "" : "≈ "}${count(figures.tokens)} tokens`));
  if (figures.cached) parts.push(element("span", "", `${count(figures.cached)} prompt tokens cached`));
  return parts;
}
