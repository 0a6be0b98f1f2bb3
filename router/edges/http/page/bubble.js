// One message of the chat, and what can be done with it.

import { figuresOf } from "./answering.js";
import { copyButton } from "./copying.js";
import { button, element } from "./format.js";
import { MarkdownView } from "./markdown.js";

export class Bubble {
  #message;
  #actions; // edit, regenerate and showTiming
  #text = element("div", "text");
  #notes = element("div", "figures");
  #buttons = element("div", "actions");
  #shown = null; // the content as last shown
  #thoughts = null;
  #view = null;

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    const who = element("span", "hidden", message.role === "user" ? "You: " : "Answer: ");
    this.item = element("li", `message ${message.role}`, who, this.#text, this.#notes, this.#buttons);
    if (message.role === "user") this.#text.textContent = message.content;
    else this.#view = new MarkdownView(this.#text);
    this.show();
  }

  /** Brings the message up to date; called for every frame while it is written. */
  show() {
    const { role, content, error, stopped, writing } = this.#message;
    this.item.classList.toggle("writing", Boolean(writing));
    this.item.ariaBusy = String(Boolean(writing));
    if (role === "assistant") this.#showAnswer();
    if (writing) return;
    this.#notes.append(...(stopped ? [element("span", "", "stopped")] : []), ...(error ? [element("span", "not-ok", error)] : []));
    this.#buttons.replaceChildren(
      ...(content ? [copyButton(() => content)] : []),
      ...(role === "user" ? [button("Edit", "", () => this.#edit())] : [button("Regenerate", "", () => this.#actions.regenerate(this.#message))]),
      ...(this.#message.id && this.#message.figures?.first ? [button("Where did the time go?", "", () => this.#actions.showTiming(this.#message.id))] : []),
    );
  }

  #showAnswer() {
    const { content, reasoning } = this.#message;
    if (reasoning) this.#think(reasoning);
    if (content !== this.#shown) this.#view.show(content);
    this.#shown = content;
    this.#text.hidden = !content && !this.#message.writing;
    this.#notes.replaceChildren(...figuresOf(this.#message));
  }

  #think(reasoning) {
    if (!this.#thoughts) {
      this.#thoughts = element("div", "", "");
      this.#text.before(element("details", "thoughts", element("summary", "", "Reasoning"), this.#thoughts));
    }
    this.#thoughts.firstChild.data = reasoning;
  }

  #edit() {
    const field = element("textarea", "");
    field.value = this.#message.content;
    field.ariaLabel = "Edit your message";
    field.rows = Math.min(10, field.value.split("\n").length + 1);
    const close = () => form.replaceWith(this.#text, this.#notes, this.#buttons);
    const save = () => field.value.trim() && this.#actions.edit(this.#message, field.value.trim());
    const form = element("div", "edit", field, element("div", "controls", button("Cancel", "quiet", close), button("Ask again", "", save)));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      save();
    });
    this.#text.replaceWith(form);
    this.#notes.remove();
    this.#buttons.remove();
    field.focus();
  }
}
