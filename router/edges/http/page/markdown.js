// Renders Markdown as elements. Text never becomes HTML, and nothing is loaded: an image is a link.

import { copyButton } from "./copying.js";
import { element } from "./format.js";

const DEEPEST = 8; // nested lists, quotes and emphasis; deeper ones are plain text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const CLOSING = /^ {0,3}(`+|~+)\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?: +|$)/;
const COLUMNS = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Shows a growing text. Complete blocks are kept; only blocks that may change are rebuilt. */
export class MarkdownView {
  #target;
  #settled = 0; // characters in complete blocks
  #open = []; // elements of the other blocks

  constructor(target) {
    this.#target = target;
  }

  show(text) {
    const lines = text.slice(this.#settled).split("\n");
    const found = blocks(lines);
    found.forEach((block, number) => this.#put(block, number));
    for (const surplus of this.#open.splice(found.length)) surplus.remove();
    // A block ends where another begins, which only a whole line shows: "2" may become "2. next".
    const last = found.findLastIndex((block) => block.from < lines.length - 1);
    if (last > 0) {
      this.#settled += lines.slice(0, found[last].from).join("\n").length + 1;
      this.#open.splice(0, last);
    }
  }

  #put({ kind, lines }, number) {
    const old = this.#open[number];
    if (old && kind.grow?.(old, lines)) return;
    const made = kind.build(lines, 0);
    if (old) old.replaceWith(made);
    else this.#target.append(made);
    this.#open[number] = made;
  }
}

// How each kind of block begins, where it ends, and its element.
const CODE = {
  begins: (lines, at) => FENCE.test(lines[at]),
  end: (lines, at) => Math.min(lines.length, until(lines, at, (number) => closes(lines[at], lines[number])) + 1),
  build: (lines) => {
    const code = element("code", "", content(lines));
    const head = element("div", "code-head", element("span", "", language(lines)), copyButton(() => code.textContent));
    return element("div", "code", head, element("pre", "", code));
  },
  // In place, so that it keeps its scroll position and selection.
  grow: (old, lines) => {
    if (old.className !== "code") return false;
    old.querySelector("span").textContent = language(lines);
    old.querySelector("code").firstChild.data = content(lines);
    return true;
  },
};

const PARAGRAPH = {
  begins: () => true,
  end: (lines, at) => until(lines, at, (number) => !lines[number].trim() || interrupts(lines, number)),
  build: (lines, depth) => element("p", "", ...inline(lines.join("\n").trim(), depth)),
};

const KINDS = [
  CODE,
  {
    begins: (lines, at) => HEADING.test(lines[at]),
    end: (lines, at) => at + 1,
    build: ([line], depth) => {
      const [, marks, title] = HEADING.exec(line);
      return element(`h${Math.min(6, marks.length + 2)}`, "", ...inline(title.replace(/\s#+$/, ""), depth)); // below the page's own
    },
  },
  { begins: (lines, at) => RULE.test(lines[at]), end: (lines, at) => at + 1, build: () => element("hr") },
  {
    begins: (lines, at) => QUOTE.test(lines[at]),
    end: (lines, at) => until(lines, at, (number) => !QUOTE.test(lines[number])),
    build: (lines, depth) => element("blockquote", "", ...nested(lines.map((line) => line.replace(QUOTE, "")), depth)),
  },
  {
    begins: (lines, at) => ITEM.test(lines[at]),
    end: endOfList,
    build: (lines, depth) => fill(emptyList(lines), lines, depth),
    // Long lists are common, so only changed items are rebuilt.
    grow: (old, lines) => {
      const same = emptyList(lines).outerHTML === old.cloneNode(false).outerHTML;
      if (same) fill(old, lines, 0);
      return same;
    },
  },
  {
    begins: (lines, at) => lines[at].includes("|") && COLUMNS.test(lines[at + 1] ?? "") && cells(lines[at]).length === cells(lines[at + 1]).length,
    end: (lines, at) => until(lines, at, (number) => !lines[number].includes("|")),
    build: table,
  },
  PARAGRAPH,
];

function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; at += 1) {
    if (!lines[at].trim()) continue;
    const kind = KINDS.find((each) => each.begins(lines, at));
    const end = kind.end(lines, at);
    found.push({ kind, from: at, lines: lines.slice(at, end) });
    at = end - 1;
  }
  return found;
}

function nested(lines, depth) {
  if (depth >= DEEPEST) return [element("p", "", lines.join("\n"))];
  return blocks(lines).map((block) => block.kind.build(block.lines, depth + 1));
}

/** The first line after `at` where `ends` is true. */
function until(lines, at, ends) {
  let number = at + 1;
  while (number < lines.length && !ends(number)) number += 1;
  return number;
}

/** True if a paragraph ends here. A number begins a list only if it is 1 ("in\n1984. Then …"). */
function interrupts(lines, at) {
  const item = ITEM.exec(lines[at]);
  if (item) return item[0].length < lines[at].length && (item[3] ?? "1") === "1";
  return KINDS.some((kind) => kind !== PARAGRAPH && kind.begins(lines, at));
}

function closes(opening, line) {
  return Boolean(CLOSING.exec(line)?.[1].startsWith(FENCE.exec(opening)[1]));
}

function language(lines) {
  return FENCE.exec(lines[0])[2].trim().split(/\s/)[0];
}

function content(lines) {
  return lines.slice(1, closes(lines[0], lines.at(-1)) ? -1 : undefined).join("\n");
}

function indent(line) {
  return line.length - line.trimStart().length;
}

/** An item's further lines are indented by two or more, and blank lines may separate them. */
function endOfList(lines, at) {
  const base = indent(lines[at]);
  const ordered = ITEM.exec(lines[at])[3] !== undefined;
  const goes = (number) => {
    if (!lines[number].trim() || indent(lines[number]) >= base + 2) return true;
    const item = ITEM.exec(lines[number]);
    if (item) return (item[3] !== undefined) === ordered && !RULE.test(lines[number]);
    return Boolean(lines[number - 1].trim()) && !interrupts(lines, number);
  };
  let end = until(lines, at, (number) => !goes(number));
  while (!lines[end - 1].trim()) end -= 1;
  return end;
}

function emptyList(lines) {
  const number = ITEM.exec(lines[0])[3];
  const made = element(number === undefined ? "ul" : "ol");
  if (number !== undefined) made.start = Number(number);
  return made;
}

const sources = new WeakMap(); // the text of each item of a list

function fill(list, lines, depth) {
  const before = sources.get(list) ?? [];
  const items = itemsOf(lines);
  const texts = items.map((item) => item.join("\n"));
  items.forEach((item, number) => {
    if (texts[number] === before[number]) return;
    const made = element("li", "", ...nested(item, depth));
    if (list.children[number]) list.children[number].replaceWith(made);
    else list.append(made);
  });
  while (list.children.length > items.length) list.lastChild.remove();
  sources.set(list, texts);
  return list;
}

/** The lines of each item, without its marker and indentation. */
function itemsOf(lines) {
  const base = indent(lines[0]);
  const items = [];
  let width = 0; // of an item's marker and the spaces after it
  for (const line of lines) {
    const found = indent(line) < base + 2 ? ITEM.exec(line) : null;
    if (found) {
      width = found[0].length;
      items.push([line.slice(width)]);
    } else {
      // Many texts indent by two although the text of "1. " begins after three characters.
      if (items.at(-1).length === 1 && line.trim()) width = Math.min(width, Math.max(2, indent(line)));
      items.at(-1).push(line.slice(Math.min(indent(line), width)));
    }
  }
  return items;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, depth) {
  const aligned = cells(lines[1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : ""));
  const row = (line, tag) => {
    const texts = cells(line);
    const made = aligned.map((align, number) => {
      const cell = element(tag, "", ...inline(texts[number] ?? "", depth));
      if (align) cell.style.textAlign = align;
      return cell;
    });
    return element("tr", "", ...made);
  };
  const body = element("tbody", "", ...lines.slice(2).map((line) => row(line, "td")));
  return element("div", "scroll", element("table", "", element("thead", "", row(lines[0], "th")), body));
}

// Inline elements. Lengths are bounded, since unclosed marks would take quadratic time.
const MARK = /[\\`*_~[!<]|https?:\/\//g;
const SPANS = [
  [/\\([!-/:-@[-`{-~])/y, ([, mark]) => mark],
  [/(`+)(?!`)([^]{0,2000}?[^`])\1(?!`)/y, ([, , code]) => element("code", "", code.replace(/^ (.*) $/s, "$1"))],
  [/!?\[([^[\]]{0,500})\]\(\s*<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:\s+"[^"\n]{0,200}")?\s*\)/y, link],
  [/<(https?:\/\/[^\s<>]{1,2000})>/y, ([whole, url], depth) => link([whole, "", url], depth)],
  [/https?:\/\/[^\s<>`*]{0,2000}[^\s<>`*.,:;!?"'()\]]/y, ([url], depth) => link([url, "", url], depth)],
  [/<br\s{0,3}\/?>/iy, () => element("br")],
  [/(\*\*)(?=\S)([^]{0,500}?\S)\1(?!\*)/y, wrap("strong")],
  [/(?<!\w)(__)(?=\S)([^]{0,500}?\S)\1(?!\w)/y, wrap("strong")],
  [/(\*)(?=[^\s*])([^]{0,500}?[^\s*])\1(?!\*)/y, wrap("em")],
  [/(?<!\w)(_)(?=[^\s_])([^]{0,500}?[^\s_])\1(?!\w)/y, wrap("em")],
  [/(~~)(?=\S)([^]{0,500}?\S)\1/y, wrap("del")],
];

function wrap(tag) {
  return ([, , text], depth) => element(tag, "", ...inline(text, depth + 1));
}

/** Other schemes than these, such as javascript:, stay text. */
function link([whole, label, url], depth) {
  if (depth >= DEEPEST || !/^(?:https?:\/\/|mailto:)/i.test(url)) return whole;
  const made = element("a", "", ...(label ? inline(label, DEEPEST) : [url]));
  made.href = url;
  made.title = url;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function inline(text, depth) {
  if (depth > DEEPEST) return [text];
  const parts = [];
  let from = 0;
  MARK.lastIndex = 0;
  for (let mark = MARK.exec(text); mark; mark = MARK.exec(text)) {
    const [match, build] = span(text, mark.index);
    const next = match ? mark.index + match[0].length : mark.index + 1;
    if (match) {
      parts.push(text.slice(from, mark.index), build(match, depth));
      from = next;
    }
    MARK.lastIndex = next; // building may have moved it
  }
  return [...parts, text.slice(from)].filter((part) => part !== "");
}

function span(text, at) {
  for (const [pattern, build] of SPANS) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    if (match) return [match, build];
  }
  return [null, null];
}
