// The messages of the chat, which this browser keeps over a reload.
//
// A message has a role and content. An answer may also have reasoning, figures, the request's id,
// an error, and `stopped`.

const KEY = "baton-chat";
const MOST_CHARACTERS = 500_000; // kept; browsers allow a site about ten times as much

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

/** The messages sent to the model: all but unanswered questions before the last. */
export function promptOf(messages, system) {
  const asked = messages.filter((message, number) => {
    if (message.role === "assistant") return message.content;
    return number === messages.length - 1 || messages[number + 1]?.content;
  });
  const turns = asked.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}
