// The conversation: asks, streams the answer, and asks again from any of its messages.

import { streamAnswer } from "./answering.js";
import { router } from "./api.js";
import { Bubble } from "./bubble.js";
import { keepMessages, loadMessages, promptOf } from "./conversation.js";
import { sampling, startSettings, systemPrompt } from "./settings.js";

const NEAR = 60; // pixels from the end within which the list scrolls along with the text
const list = document.getElementById("messages");
const form = document.getElementById("ask");
const question = document.getElementById("question");
const stop = document.getElementById("stop");
const send = document.getElementById("send");
const fresh = document.getElementById("fresh");
const offline = document.getElementById("ask-offline");

let messages = loadMessages();
let running = null;
let actions = null;
let leaving = false; // a browser breaks a page's connections when it leaves the page

export function startChat(showTiming) {
  actions = { edit, regenerate, showTiming };
  startSettings();
  for (const message of messages) add(message);
  list.scrollTop = list.scrollHeight;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(question.value.trim());
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!send.disabled) form.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
  });
  stop.addEventListener("click", () => running?.abort());
  fresh.addEventListener("click", () => {
    running?.abort();
    cut(0);
    question.focus();
  });
  addEventListener("beforeunload", () => (leaving = true));
  addEventListener("pagehide", () => keepMessages(messages));
  router.addEventListener("lost", () => (offline.hidden = false));
  router.addEventListener("back", () => (offline.hidden = true));
  for (const event of ["lost", "back"]) router.addEventListener(event, controls);
  controls();
}

function ask(text) {
  if (!text || send.disabled) return;
  question.value = "";
  messages.push({ role: "user", content: text });
  add(messages.at(-1));
  answer();
}

function edit(message, text) {
  if (send.disabled) return;
  cut(messages.indexOf(message));
  ask(text);
}

function regenerate(message) {
  if (send.disabled) return;
  cut(messages.indexOf(message));
  answer();
}

/** Drops the messages from `first` on. */
function cut(first) {
  messages = messages.slice(0, first);
  while (list.children.length > first) list.lastChild.remove();
  keepMessages(messages);
  controls();
}

async function answer() {
  const message = { role: "assistant", content: "", writing: true };
  const prompt = promptOf(messages, systemPrompt());
  messages.push(message);
  const bubble = add(message);
  const mine = new AbortController();
  running = mine;
  controls();
  list.scrollTop = list.scrollHeight;
  const frame = () => {
    if (!message.writing) return;
    const began = performance.now();
    follow(bubble);
    // A slow browser gets fewer frames, so that it stays responsive.
    setTimeout(() => requestAnimationFrame(frame), 2 * (performance.now() - began));
  };
  requestAnimationFrame(frame);
  try {
    await streamAnswer(message, prompt, sampling(), mine.signal);
  } catch (error) {
    if (error.name === "AbortError" || leaving) message.stopped = true;
    else message.error = error.message;
  }
  delete message.writing;
  running = null;
  follow(bubble);
  keepMessages(messages);
  controls();
  // A phone would open its keyboard.
  if (document.activeElement === document.body && matchMedia("(pointer: fine)").matches) question.focus();
}

function follow(bubble) {
  const near = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR;
  bubble.show();
  if (near) list.scrollTop = list.scrollHeight;
}

function add(message) {
  const bubble = new Bubble(message, actions);
  list.append(bubble.item);
  return bubble;
}

function controls() {
  form.classList.toggle("busy", Boolean(running));
  list.classList.toggle("busy", Boolean(running));
  send.disabled = Boolean(running) || !offline.hidden;
  stop.hidden = !running;
  fresh.disabled = !messages.length;
}
