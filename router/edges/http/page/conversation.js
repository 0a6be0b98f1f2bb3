// The messages of the chat, kept in this browser over a reload.
//
// A message has a role and content; an answer also reasoning, figures, the request's id, and why it
// failed or that it was stopped.

const KEY = "baton-chat";
const MOST_CHARACTERS = 500_000; // kept; a browser keeps about ten times as much for one site

export function loadMessages() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    const known = kept.filter(({ role, content }) => ["user", "assistant"].includes(role) && typeof content === "string");
    return known.map(({ writing, ...message }) => (writing ? { ...message, stopped: true } : message));
  } catch {
    return [];
  }
}

/** Keeps the latest messages that fit, from a question on. */
export function keepMessages(messages) {
  let room = MOST_CHARACTERS;
  let first = messages.length;
  for (let number = messages.length - 1; number >= 0 && room >= 0; number -= 1) {
    room -= JSON.stringify(messages[number]).length;
    if (room >= 0 && messages[number].role === "user") first = number;
  }
  try {
    if (first < messages.length) localStorage.setItem(KEY, JSON.stringify(messages.slice(first)));
    else localStorage.removeItem(KEY);
  } catch {
    localStorage.removeItem(KEY); // full, or not allowed: an older state would mislead
  }
}

/** What the model is given: without questions that got no answer, but for the last. */
export function promptOf(messages, system) {
  const asked = messages.filter((message, number) => {
    if (message.role === "assistant") return message.content;
    return number === messages.length - 1 || messages[number + 1]?.content;
  });
  const turns = asked.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}
