// A conversation that streams, with the time to the first token and the rate as it goes.

import { events, headers, locked, problem } from "./api.js";
import { count, element, time } from "./format.js";

const list = document.getElementById("messages");
const form = document.getElementById("ask");
const question = document.getElementById("question");
const stop = document.getElementById("stop");
const send = document.getElementById("send");

let conversation = [];
let running = null;

export function start(showTiming) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(question.value.trim(), showTiming);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => running?.abort());
  document.getElementById("fresh").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    list.replaceChildren();
    question.focus();
  });
}

async function ask(text, showTiming) {
  if (!text || running) return;
  question.value = "";
  conversation.push({ role: "user", content: text });
  list.append(bubble("user", text).item);
  const answer = bubble("assistant", "");
  list.append(answer.item);
  scroll();
  running = new AbortController();
  busy(true);
  const clock = new Clock(answer.figures);
  try {
    await read(answer, clock);
    conversation.push({ role: "assistant", content: answer.text.textContent });
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (stopped && answer.text.textContent) {
      conversation.push({ role: "assistant", content: answer.text.textContent });
    } else {
      conversation.pop();
      answer.item.classList.add("failed");
      answer.text.textContent ||= stopped ? "stopped" : error.message;
    }
  } finally {
    clock.end();
    answer.item.classList.remove("writing");
    if (clock.id) answer.figures.append(timingButton(clock.id, showTiming));
    running = null;
    busy(false);
    scroll();
    question.focus();
  }
}

async function read(answer, clock) {
  answer.item.classList.add("writing");
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({
      messages: conversation,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(document.getElementById("temperature").value),
      max_tokens: Number(document.getElementById("limit").value) || undefined,
    }),
    signal: running.signal,
  });
  clock.id = response.headers.get("x-request-id");
  if (response.status === 401) locked.dispatchEvent(new Event("locked"));
  if (!response.ok) throw new Error(await problem(response));
  for await (const chunk of events(response)) {
    const piece = chunk.choices[0]?.delta?.content;
    if (piece) {
      answer.text.append(piece);
      clock.token();
      scroll();
    }
    if (chunk.usage) clock.usage(chunk.usage);
  }
}

/** The times of one answer, shown as they change. */
class Clock {
  constructor(figures) {
    this.began = performance.now();
    this.first = 0;
    this.last = 0;
    this.tokens = 0;
    this.exact = false;
    this.cached = 0;
    this.figures = figures;
    this.show = this.show.bind(this);
    this.timer = setInterval(this.show, 100);
    this.show();
  }

  token() {
    this.last = performance.now();
    this.first ||= this.last;
    this.tokens += 1;
  }

  usage(usage) {
    this.tokens = usage.completion_tokens;
    this.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    this.exact = true;
  }

  end() {
    clearInterval(this.timer);
    this.show();
  }

  show() {
    const waited = (this.first || performance.now()) - this.began;
    const parts = [element("span", "ttft", `TTFT ${time(waited / 1000)}`)];
    if (this.tokens > 1 && this.last > this.first) {
      const rate = (this.tokens - 1) / ((this.last - this.first) / 1000);
      parts.push(element("span", "rate", `${rate.toFixed(1)} tokens/s`));
    }
    if (this.tokens) parts.push(element("span", "", `${this.exact ? "" : "≈ "}${count(this.tokens)} tokens`));
    if (this.cached) parts.push(element("span", "", `${count(this.cached)} prompt tokens cached`));
    this.figures.replaceChildren(...parts);
  }
}

function bubble(role, content) {
  const text = element("div", "text", content);
  const figures = element("div", "figures");
  const who = element("span", "hidden", role === "user" ? "You: " : "Answer: ");
  const item = element("li", `message ${role}`, who, text, ...(role === "user" ? [] : [figures]));
  return { item, text, figures };
}

function timingButton(id, showTiming) {
  const button = element("button", "", "where did the time go?");
  button.type = "button";
  button.addEventListener("click", () => showTiming(id));
  return button;
}

function busy(is) {
  send.disabled = is;
  stop.hidden = !is;
}

function scroll() {
  list.scrollTop = list.scrollHeight;
}
